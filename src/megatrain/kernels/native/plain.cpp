// Plain C++: any architecture, and the fallback on x86-64 without AVX2.
#include "kernels.h"

namespace megatrain {
namespace {
bool supported() { return true; }
}  // namespace

const Kernels kPlain = kernels_of<Scalar>("plain", supported);

}  // namespace megatrain
