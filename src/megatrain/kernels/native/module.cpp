// The Python module megatrain.kernels._native. It takes addresses, not arrays: native.py checks types and sizes, and
// neither torch nor NumPy is needed to build or to load this.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;

namespace megatrain {
namespace {

// Raised with every change of a signature or of the arithmetic; native.py refuses a build of another number.
constexpr int kInterface = 3;

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

using Addresses = std::array<std::uintptr_t, 5>;  // head, tail, exp_avg, exp_avg_sq, grad

// The caller computes in double; each scalar is rounded to float once, as torch rounds it.
AdamWArgs arguments(const Addresses& at, bool grad_is_bfloat16, const std::array<double, 8>& scalars) {
    std::array<float, 8> s;
    for (std::size_t i = 0; i < s.size(); ++i) s[i] = static_cast<float>(scalars[i]);
    return {pointer<void>(at[0]),  pointer<std::int16_t>(at[1]), pointer<float>(at[2]),
            pointer<float>(at[3]), pointer<const void>(at[4]),   grad_is_bfloat16,
            {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]}};
}

void adamw(const std::string& isa, int threads, std::int64_t n, const Addresses& at, bool grad_is_bfloat16,
           const std::array<double, 8>& scalars) {
    const Kernels& kernels = kernels_named(isa);
    const AdamWArgs args = arguments(at, grad_is_bfloat16, scalars);
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads,
                    [&](std::int64_t begin, std::int64_t end) { kernels.adamw(args, begin, end); });
}

void speculate(const std::string& isa, int threads, std::int64_t n, const Addresses& at, bool grad_is_bfloat16,
               const std::array<double, 8>& scalars, std::uintptr_t waiting, double reach) {
    const Kernels& kernels = kernels_named(isa);
    const AdamWArgs args = arguments(at, grad_is_bfloat16, scalars);
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
        kernels.speculate(args, pointer<std::uint8_t>(waiting), static_cast<float>(reach), begin, end);
    });
}

void resolve(const std::string& isa, int threads, std::int64_t n, const Addresses& at, bool grad_is_bfloat16,
             const std::array<double, 8>& scalars, std::uintptr_t waiting, bool update_waiting, bool correct_updated,
             const std::array<double, 6>& correction) {
    const Kernels& kernels = kernels_named(isa);
    const AdamWArgs args = arguments(at, grad_is_bfloat16, scalars);
    std::array<float, 6> w;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(correction[i]);
    const Correction change = {update_waiting, correct_updated, w[0], w[1], w[2], w[3], w[4], w[5]};
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
        kernels.resolve(args, pointer<const std::uint8_t>(waiting), change, begin, end);
    });
}

// Touches what a kernel call on n elements would work on, by the same workers. Sections: (address, bytes an element).
void touch(int threads, std::int64_t n, const std::vector<std::pair<std::uintptr_t, std::int64_t>>& sections) {
    const nb::gil_scoped_release no_gil;
    parallel_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
        for (const auto& [address, size] : sections) {
            touch_pages(pointer<char>(address) + begin * size, pointer<char>(address) + end * size);
        }
    });
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
    m.def("bind_workers", &megatrain::bind_workers, "sets"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Keep worker i on the cores of sets[i % len(sets)]; without sets, on all that the process was given.");
    m.def("touch", &megatrain::touch, "threads"_a, "n"_a, "sections"_a);
    m.def("shutdown", &megatrain::shutdown_pool, nb::call_guard<nb::gil_scoped_release>(), "Join the worker threads.");
    m.def("adamw", &megatrain::adamw, "isa"_a, "threads"_a, "n"_a, "at"_a, "grad_is_bfloat16"_a, "scalars"_a);
    m.def("speculate", &megatrain::speculate, "isa"_a, "threads"_a, "n"_a, "at"_a, "grad_is_bfloat16"_a, "scalars"_a,
          "waiting"_a, "reach"_a);
    m.def("resolve", &megatrain::resolve, "isa"_a, "threads"_a, "n"_a, "at"_a, "grad_is_bfloat16"_a, "scalars"_a,
          "waiting"_a, "update_waiting"_a, "correct_updated"_a, "correction"_a);
    m.def("split", &megatrain::split, "isa"_a, "threads"_a, "n"_a, "master"_a, "head"_a, "tail"_a);
    m.def("join", &megatrain::join, "isa"_a, "threads"_a, "n"_a, "head"_a, "tail"_a, "master"_a);
}
