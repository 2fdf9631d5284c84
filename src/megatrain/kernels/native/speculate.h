// AdamW steps taken before the clip factor is known, and their correction; see megatrain/kernels/__init__.py.
//
// A block is stepped with factor 1 only if no gradient in it is large beside the second moment: its contribution can
// then be taken out of the moments again at the cost of a few roundings.
#pragma once

#include "adamw.h"
#include "block.h"

namespace megatrain {

// How a step with factor 1 turns into the one with factor c < 1, or into no step at all.
struct Correction {
    bool update_waiting;   // whether blocks that wait get their update now
    bool correct_updated;  // whether the others change
    float first_weight;    // -(1 - beta1) * (1 - c)
    float second_weight;   // -(1 - beta2) * (1 - c^2)
    float first_rescale;   // 1; to undo the step 1 / beta1
    float second_rescale;  // 1; to undo the step 1 / beta2
    float change_weight;   // 1; to undo the step 0
    float master_rescale;  // 1; to undo the step 1 / decay
};

namespace {

inline std::int64_t block_end(std::int64_t begin, std::int64_t end) {
    return end - begin < kBlock ? end : begin + kBlock;
}

// Whether every gradient of whole vectors from `begin` is finite and reach * |g| <= sqrt(v); moves `begin` on.
template <class V, class Grad>
bool within_reach(const AdamWArgs& args, float reach, std::int64_t& begin, std::int64_t end) {
    const Grad* const grad = static_cast<const Grad*>(args.grad);
    const V factor = V::set(reach), largest = V::set(3.402823466e38f);
    for (; begin + V::width <= end; begin += V::width) {
        const V g = V::abs(load_gradient<V>(grad + begin));
        const V size = g * factor, square = V::load(args.exp_avg_sq + begin);
        // A rounded square below v is below it exactly, and then so are the roots: most vectors need none.
        if (V::all_below(size * size, square)) continue;
        if (!V::all_at_most(g, largest) || !V::all_at_most(size, V::sqrt(square))) return false;
    }
    return true;
}

template <class V>
void speculate_range(const AdamWArgs& args, std::uint8_t* waiting, float reach, std::int64_t begin, std::int64_t end) {
    // The guard reads its block at once, so memory would idle while the block before is computed. Not in plain C++:
    // the compiler does not vectorise a loop that prefetches.
    constexpr bool kPrefetch = V::width > 1;
    with_types(args, [&](auto head, auto grad) {
        using Head = decltype(head);
        using Grad = decltype(grad);
        for (std::int64_t start = begin; start < end; start += kBlock) {
            const std::int64_t stop = block_end(start, end);
            std::int64_t i = start;
            const bool steps = within_reach<V, Grad>(args, reach, i, stop) &&
                               within_reach<Scalar, Grad>(args, reach, i, stop);
            if (steps) adamw_typed<V, Head, Grad, kPrefetch>(args, start, stop);
            waiting[start / kBlock] = !steps;
        }
    });
}

// Corrects whole vectors from `begin` and returns the first element that did not fill one.
template <class V, class Head, class Grad>
std::int64_t correct_vectors(const AdamWArgs& args, const Correction& correction, std::int64_t begin,
                             std::int64_t end) {
    const Constants<V> c(args.scalars);
    const V first_weight = V::set(correction.first_weight), second_weight = V::set(correction.second_weight);
    const V first_rescale = V::set(correction.first_rescale), second_rescale = V::set(correction.second_rescale);
    const V change_weight = V::set(correction.change_weight), master_rescale = V::set(correction.master_rescale);
    Head* const head = static_cast<Head*>(args.head);
    const Grad* const grad = static_cast<const Grad*>(args.grad);
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) {
        std::int16_t* const tail = tail_at<Head>(args, i);
        const V g = load_gradient<V>(grad + i);
        const V moment = V::load(args.exp_avg + i), square = V::load(args.exp_avg_sq + i);
        const V first = V::fma(g, first_weight, moment) * first_rescale;
        const V second = V::max(V::fma(second_weight * g, g, square), V::set(0.0f)) * second_rescale;
        const V change = adamw_change(c, first, second) * change_weight - adamw_change(c, moment, square);
        const V master = (load_master<V>(head + i, tail) + change) * master_rescale;
        first.store(args.exp_avg + i);
        second.store(args.exp_avg_sq + i);
        store_master(master, head + i, tail);
    }
    return i;
}

template <class V>
void resolve_range(const AdamWArgs& args, const std::uint8_t* waiting, const Correction& correction,
                   std::int64_t begin, std::int64_t end) {
    with_types(args, [&](auto head, auto grad) {
        using Head = decltype(head);
        using Grad = decltype(grad);
        for (std::int64_t start = begin; start < end; start += kBlock) {
            const std::int64_t stop = block_end(start, end);
            if (waiting[start / kBlock] != 0) {
                if (correction.update_waiting) adamw_typed<V, Head, Grad>(args, start, stop);
            } else if (correction.correct_updated) {
                const std::int64_t rest = correct_vectors<V, Head, Grad>(args, correction, start, stop);
                correct_vectors<Scalar, Head, Grad>(args, correction, rest, stop);
            }
        }
    });
}

}  // namespace
}  // namespace megatrain
