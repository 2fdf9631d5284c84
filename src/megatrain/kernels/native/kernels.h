// The kernels of one instruction set, and the table that module.cpp chooses from.
#pragma once

#include "adamw.h"
#include "speculate.h"

namespace megatrain {

struct Kernels {
    const char* name;
    bool (*supported)();
    void (*adamw)(const AdamWArgs&, std::int64_t begin, std::int64_t end);
    void (*speculate)(const AdamWArgs&, std::uint8_t* waiting, float reach, std::int64_t begin, std::int64_t end);
    void (*resolve)(const AdamWArgs&, const std::uint8_t* waiting, const Correction&, std::int64_t begin,
                    std::int64_t end);
    void (*split)(const float* master, std::uint16_t* head, std::int16_t* tail, std::int64_t begin, std::int64_t end);
    void (*join)(const std::uint16_t* head, const std::int16_t* tail, float* master, std::int64_t begin,
                 std::int64_t end);
};

extern const Kernels kPlain;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

namespace {

template <class V>
constexpr Kernels kernels_of(const char* name, bool (*supported)()) {
    return {name, supported, adamw_range<V>, speculate_range<V>, resolve_range<V>, split_range<V>, join_range<V>};
}

}  // namespace
}  // namespace megatrain
