// The arithmetic of one AdamW step, shared by every instruction set.
//
// Each vector type V (Scalar below, the others in avx2.cpp and avx512.cpp) offers the same few IEEE operations. The
// places of the fused multiply-adds are written out, and the sources are built with -ffp-contract=off, so every V gives
// the same bits as megatrain/kernels/reference.py. Everything here lives in an unnamed namespace: each translation unit
// is compiled for another instruction set, and a shared inline symbol would let the linker pick the AVX-512 copy for
// all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

namespace megatrain {

struct AdamWScalars {
    float decay;            // 1 - lr * weight_decay
    float lerp_weight;      // 1 - beta1
    float beta2;
    float square_weight;    // 1 - beta2
    float root_correction;  // sqrt(1 - beta2^step)
    float eps;
    float step_size;        // -lr / (1 - beta1^step)
    float grad_scale;
};

// Ranges of every kernel are [begin, end) in elements; units may exceed 2^31 elements.
struct AdamWArgs {
    void* head;          // float when tail is null, else bfloat16
    std::int16_t* tail;  // low half of the FP32 bit pattern, or null
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    bool grad_is_bfloat16;
    AdamWScalars scalars;
};

namespace {

// One element at a time: the plain C++ kernel, and what is left over at the end of a vectorised range.
struct Scalar {
    static constexpr std::int64_t width = 1;
    float x;

    static Scalar set(float value) { return {value}; }
    static Scalar load(const float* p) { return {*p}; }
    static Scalar load_bfloat16(const std::uint16_t* p) { return from_bits(std::uint32_t{*p} << 16); }
    static Scalar join(const std::uint16_t* head, const std::int16_t* tail) {
        return from_bits((std::uint32_t{*head} << 16) + static_cast<std::uint32_t>(std::int32_t{*tail}));
    }
    void store(float* p) const { *p = x; }
    void split(std::uint16_t* head, std::int16_t* tail) const {
        std::uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        *head = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
        *tail = static_cast<std::int16_t>(bits);
    }
    static Scalar from_bits(std::uint32_t bits) {
        Scalar result;
        std::memcpy(&result.x, &bits, sizeof bits);
        return result;
    }
    friend Scalar operator+(Scalar a, Scalar b) { return {a.x + b.x}; }
    friend Scalar operator-(Scalar a, Scalar b) { return {a.x - b.x}; }
    friend Scalar operator*(Scalar a, Scalar b) { return {a.x * b.x}; }
    friend Scalar operator/(Scalar a, Scalar b) { return {a.x / b.x}; }
    static Scalar fma(Scalar a, Scalar b, Scalar c) { return {std::fma(a.x, b.x, c.x)}; }
    static Scalar sqrt(Scalar a) { return {std::sqrt(a.x)}; }
    static Scalar abs(Scalar a) { return {std::fabs(a.x)}; }
    static Scalar max(Scalar a, Scalar b) { return {a.x > b.x ? a.x : b.x}; }
    static bool all_at_most(Scalar a, Scalar b) { return a.x <= b.x; }
    static bool all_below(Scalar a, Scalar b) { return a.x < b.x; }
};

// The scalars of a step, spread over the lanes of V. As torch.lerp, the first moment starts from the nearer end.
template <class V>
struct Constants {
    V decay, lerp_coefficient, beta2, square_weight, root_correction, eps, step_size, grad_scale;
    bool lerp_from_moment;

    explicit Constants(const AdamWScalars& s)
        : decay(V::set(s.decay)),
          lerp_coefficient(V::set(std::fabs(s.lerp_weight) < 0.5f ? s.lerp_weight : s.lerp_weight - 1.0f)),
          beta2(V::set(s.beta2)),
          square_weight(V::set(s.square_weight)),
          root_correction(V::set(s.root_correction)),
          eps(V::set(s.eps)),
          step_size(V::set(s.step_size)),
          grad_scale(V::set(s.grad_scale)),
          lerp_from_moment(std::fabs(s.lerp_weight) < 0.5f) {}
};

template <class V>
inline V load_gradient(const float* grad) {
    return V::load(grad);
}
template <class V>
inline V load_gradient(const std::uint16_t* grad) {
    return V::load_bfloat16(grad);
}
template <class V>
inline V load_master(const float* head, const std::int16_t*) {
    return V::load(head);
}
template <class V>
inline V load_master(const std::uint16_t* head, const std::int16_t* tail) {
    return V::join(head, tail);
}
template <class V>
inline void store_master(V value, float* head, std::int16_t*) {
    value.store(head);
}
template <class V>
inline void store_master(V value, std::uint16_t* head, std::int16_t* tail) {
    value.split(head, tail);
}

// There is no tail where the head is the FP32 master itself.
template <class Head>
inline std::int16_t* tail_at(const AdamWArgs& args, std::int64_t i) {
    return args.tail + (sizeof(Head) == sizeof(float) ? 0 : i);
}

// What the moments move the master by, without decay.
template <class V>
inline V adamw_change(const Constants<V>& c, V first, V second) {
    return (c.step_size * first) / (V::sqrt(second) / c.root_correction + c.eps);
}

// Asks for the elements a block after `i`. A block is larger than the first cache, so they go to the second.
template <class Head, class Grad>
inline void prefetch_next_block(const AdamWArgs& args, std::int64_t i) {
    i += kBlock;
    __builtin_prefetch(static_cast<const Head*>(args.head) + i, 1, 2);
    if constexpr (sizeof(Head) < sizeof(float)) __builtin_prefetch(args.tail + i, 1, 2);
    __builtin_prefetch(args.exp_avg + i, 1, 2);
    __builtin_prefetch(args.exp_avg_sq + i, 1, 2);
    __builtin_prefetch(static_cast<const Grad*>(args.grad) + i, 0, 2);
}

// Updates whole vectors from `begin` and returns the first element that did not fill one.
template <class V, class Head, class Grad, bool kPrefetch = false>
std::int64_t adamw_vectors(const AdamWArgs& args, std::int64_t begin, std::int64_t end) {
    const Constants<V> c(args.scalars);
    Head* const head = static_cast<Head*>(args.head);
    const Grad* const grad = static_cast<const Grad*>(args.grad);
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) {
        if constexpr (kPrefetch) prefetch_next_block<Head, Grad>(args, i);
        std::int16_t* const tail = tail_at<Head>(args, i);
        const V g = load_gradient<V>(grad + i) * c.grad_scale;
        const V moment = V::load(args.exp_avg + i);
        const V first = V::fma(c.lerp_coefficient, g - moment, c.lerp_from_moment ? moment : g);
        const V second = V::fma(c.square_weight * g, g, V::load(args.exp_avg_sq + i) * c.beta2);
        const V master = load_master<V>(head + i, tail) * c.decay + adamw_change(c, first, second);
        first.store(args.exp_avg + i);
        second.store(args.exp_avg_sq + i);
        store_master(master, head + i, tail);
    }
    return i;
}

template <class V, class Head, class Grad, bool kPrefetch = false>
void adamw_typed(const AdamWArgs& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t rest = adamw_vectors<V, Head, Grad, kPrefetch>(args, begin, end);
    adamw_vectors<Scalar, Head, Grad>(args, rest, end);
}

// Calls work(Head{}, Grad{}) with the element types of the buffers.
template <class Work>
void with_types(const AdamWArgs& args, Work work) {
    if (args.tail != nullptr) {
        if (args.grad_is_bfloat16) {
            work(std::uint16_t{}, std::uint16_t{});
        } else {
            work(std::uint16_t{}, float{});
        }
    } else if (args.grad_is_bfloat16) {
        work(float{}, std::uint16_t{});
    } else {
        work(float{}, float{});
    }
}

template <class V>
void adamw_range(const AdamWArgs& args, std::int64_t begin, std::int64_t end) {
    with_types(args, [&](auto head, auto grad) { adamw_typed<V, decltype(head), decltype(grad)>(args, begin, end); });
}

template <class V>
void split_range(const float* master, std::uint16_t* head, std::int16_t* tail, std::int64_t begin, std::int64_t end) {
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) V::load(master + i).split(head + i, tail + i);
    for (; i < end; ++i) Scalar::load(master + i).split(head + i, tail + i);
}

template <class V>
void join_range(const std::uint16_t* head, const std::int16_t* tail, float* master, std::int64_t begin,
                std::int64_t end) {
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) V::join(head + i, tail + i).store(master + i);
    for (; i < end; ++i) Scalar::join(head + i, tail + i).store(master + i);
}

}  // namespace
}  // namespace megatrain
