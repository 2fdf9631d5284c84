// AVX-512F, sixteen lanes. Built with -mavx512f -mavx2 -mfma; reached only after a run-time check.
#include <immintrin.h>

#include "kernels.h"

namespace megatrain {
namespace {

struct Avx512 {
    static constexpr std::int64_t width = 16;
    __m512 x;

    static Avx512 set(float value) { return {_mm512_set1_ps(value)}; }
    static Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Avx512 load_bfloat16(const std::uint16_t* p) { return {_mm512_castsi512_ps(high_half(p))}; }
    static Avx512 join(const std::uint16_t* head, const std::int16_t* tail) {
        const __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail)));
        return {_mm512_castsi512_ps(_mm512_add_epi32(high_half(head), low))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, x); }
    void split(std::uint16_t* head, std::int16_t* tail) const {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(head), _mm512_cvtepi32_epi16(high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tail), _mm512_cvtepi32_epi16(bits));
    }
    friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.x, b.x)}; }
    friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.x, b.x)}; }
    friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.x, b.x)}; }
    friend Avx512 operator/(Avx512 a, Avx512 b) { return {_mm512_div_ps(a.x, b.x)}; }
    static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
    static Avx512 sqrt(Avx512 a) { return {_mm512_sqrt_ps(a.x)}; }
    static Avx512 abs(Avx512 a) { return {_mm512_abs_ps(a.x)}; }
    static Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.x, b.x)}; }
    static bool all_at_most(Avx512 a, Avx512 b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_LE_OQ) == 0xFFFF; }
    static bool all_below(Avx512 a, Avx512 b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ) == 0xFFFF; }

private:
    static __m512i high_half(const std::uint16_t* p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    }
};

bool supported() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma"); }

}  // namespace

const Kernels kAvx512 = kernels_of<Avx512>("avx512", supported);

}  // namespace megatrain
