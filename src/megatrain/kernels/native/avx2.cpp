// AVX2 and FMA, eight lanes. Built with -mavx2 -mfma; reached only after a run-time check.
#include <immintrin.h>

#include "kernels.h"

namespace megatrain {
namespace {

struct Avx2 {
    static constexpr std::int64_t width = 8;
    __m256 x;

    static Avx2 set(float value) { return {_mm256_set1_ps(value)}; }
    static Avx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Avx2 load_bfloat16(const std::uint16_t* p) { return {_mm256_castsi256_ps(high_half(p))}; }
    static Avx2 join(const std::uint16_t* head, const std::int16_t* tail) {
        const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tail)));
        return {_mm256_castsi256_ps(_mm256_add_epi32(high_half(head), low))};
    }
    void store(float* p) const { _mm256_storeu_ps(p, x); }
    void split(std::uint16_t* head, std::int16_t* tail) const {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
        const __m256i low = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
        // The pack works per 128-bit half: [h0-3 l0-3 h4-7 l4-7]; the permutation gathers the heads and the tails.
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, low), 0xD8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(head), _mm256_castsi256_si128(both));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(tail), _mm256_extracti128_si256(both, 1));
    }
    friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.x, b.x)}; }
    friend Avx2 operator-(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.x, b.x)}; }
    friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.x, b.x)}; }
    friend Avx2 operator/(Avx2 a, Avx2 b) { return {_mm256_div_ps(a.x, b.x)}; }
    static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
    static Avx2 sqrt(Avx2 a) { return {_mm256_sqrt_ps(a.x)}; }
    static Avx2 abs(Avx2 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.x)}; }
    static Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.x, b.x)}; }
    static bool all_at_most(Avx2 a, Avx2 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_LE_OQ)) == 0xFF; }
    static bool all_below(Avx2 a, Avx2 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_LT_OQ)) == 0xFF; }

private:
    static __m256i high_half(const std::uint16_t* p) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    }
};

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

const Kernels kAvx2 = kernels_of<Avx2>("avx2", supported);

}  // namespace megatrain
