// The Python module megatrain.kernels._native. It takes addresses, not arrays: native.py checks types and sizes, and
// neither torch nor NumPy is needed to build or to load this.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "adamw.h"
#include "pool.h"

namespace nb = nanobind;

namespace megatrain {
namespace {

// Raised with every change of a signature or of the arithmetic; native.py refuses a build of another number.
constexpr int kInterface = 1;

const std::vector<const Kernels*>& all_kernels() {
    static const std::vector<const Kernels*> kernels = {
#if defined(__x86_64__)
        &kAvx512, &kAvx2,
#endif
        &kPlain};
    return kernels;
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* kernels : all_kernels()) {
        if (name == kernels->name && kernels->supported()) return *kernels;
    }
    throw nb::value_error(("this processor or build has no instruction set '" + name + "'").c_str());
}

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : all_kernels()) {
        if (kernels->supported()) names.emplace_back(kernels->name);
    }
    return names;
}

void adamw(const std::string& isa, int threads, std::int64_t n, std::uintptr_t head, std::uintptr_t tail,
           std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t grad, bool grad_is_bfloat16, double decay,
           double lerp_weight, double beta2, double square_weight, double root_correction, double eps,
           double step_size, double grad_scale) {
    const Kernels& kernels = kernels_named(isa);
    AdamWArgs args;
    args.head = pointer<void>(head);
    args.tail = pointer<std::int16_t>(tail);
    args.exp_avg = pointer<float>(exp_avg);
    args.exp_avg_sq = pointer<float>(exp_avg_sq);
    args.grad = pointer<const void>(grad);
    args.grad_is_bfloat16 = grad_is_bfloat16;
    // The caller computes in double; each scalar is rounded to float once, as torch rounds it.
    args.scalars = {static_cast<float>(decay),           static_cast<float>(lerp_weight),
                    static_cast<float>(beta2),           static_cast<float>(square_weight),
                    static_cast<float>(root_correction), static_cast<float>(eps),
                    static_cast<float>(step_size),       static_cast<float>(grad_scale)};
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads,
                    [&](std::int64_t begin, std::int64_t end) { kernels.adamw(args, begin, end); });
}

void split(const std::string& isa, int threads, std::int64_t n, std::uintptr_t master, std::uintptr_t head,
           std::uintptr_t tail) {
    const Kernels& kernels = kernels_named(isa);
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
        kernels.split(pointer<const float>(master), pointer<std::uint16_t>(head), pointer<std::int16_t>(tail), begin,
                      end);
    });
}

void join(const std::string& isa, int threads, std::int64_t n, std::uintptr_t head, std::uintptr_t tail,
          std::uintptr_t master) {
    const Kernels& kernels = kernels_named(isa);
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
        kernels.join(pointer<const std::uint16_t>(head), pointer<const std::int16_t>(tail), pointer<float>(master),
                     begin, end);
    });
}

}  // namespace
}  // namespace megatrain

NB_MODULE(_native, m) {
    using namespace nb::literals;
    m.attr("INTERFACE") = megatrain::kInterface;
    m.def("instruction_sets", &megatrain::instruction_sets, "Those that this processor runs, widest first.");
    m.def("last_thread_ids", &megatrain::last_thread_ids, "Ids of the threads that worked in the last call.");
    m.def("shutdown", &megatrain::shutdown_pool, nb::call_guard<nb::gil_scoped_release>(), "Join the worker threads.");
    m.def("adamw", &megatrain::adamw, "isa"_a, "threads"_a, "n"_a, "head"_a, "tail"_a, "exp_avg"_a, "exp_avg_sq"_a,
          "grad"_a, "grad_is_bfloat16"_a, "decay"_a, "lerp_weight"_a, "beta2"_a, "square_weight"_a,
          "root_correction"_a, "eps"_a, "step_size"_a, "grad_scale"_a);
    m.def("split", &megatrain::split, "isa"_a, "threads"_a, "n"_a, "master"_a, "head"_a, "tail"_a);
    m.def("join", &megatrain::join, "isa"_a, "threads"_a, "n"_a, "head"_a, "tail"_a, "master"_a);
}
