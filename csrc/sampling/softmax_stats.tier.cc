// What softmax needs of a row, without its probabilities: the maximum and the sum of exponentials, for each piece of
// a row by itself and then put together. Where nothing near a piece's maximum lies in a block of 64, as behind top-k
// and top-p, its exponentials are left out.
#include "vac/sampling.h"

#include "sampling/blocks.h"
#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

// exp(x) for x <= 0, to be summed: relative error below 2^-20 where x is above -40, and below -87 about 2^-125 instead
// of nothing. 2^r on [-1/2, 1/2] is a minimax polynomial (relative error 2^-23.1; exp(0) is 1), its terms paired so
// that few constants are copied: a third less instructions than exp_negative's.
inline float32x4_t exp_summand(float32x4_t x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    constexpr float kLog2e = 1.44269504f;
    x = max(x, constant(-87.0f));
    const float32x4_t rounded = vfmaq_n_f32(constant(kRound), x, kLog2e);
    const float32x4_t r = vfmaq_n_f32(vsubq_f32(constant(kRound), rounded), x, kLog2e);
    const float32x4_t square = vmulq_f32(r, r);
    const float32x4_t p0 = fma(constant(1.0f), r, constant(0.693147004f));
    const float32x4_t p2 = fma(constant(0.240222424f), r, constant(0.0555073358f));
    const float32x4_t p4 = fma(constant(0.00967151299f), r, constant(0.00132647273f));
    const float32x4_t p = fma(p0, square, fma(p2, square, p4));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23)));
}

vac_softmax_stat stat_of(const float *logits, int64_t size) {
    float maxima[kPieceSize / kMaskBlock];
    // Only read: blocks.h also serves kernels that change the row.
    Row row{const_cast<float *>(logits), size, mask_blocks_of(size), maxima, 0};
    find_maxima(row);
    if (row.largest == -kInfinity) return {row.largest, 0.0f};
    if (!(row.largest < kInfinity)) return {row.largest, __builtin_nanf("")};
    const float32x4_t largest = vdupq_n_f32(row.largest);
    float32x4_t sum[4];
    for (auto &v : sum) v = vdupq_n_f32(0);
    float rest = 0;
    for (int64_t b = 0; b < row.num_blocks; ++b) {
        // 2048 logits so far below the largest weigh less than 2^-46 of it.
        if (maxima[b] < row.largest - 40.0f) continue;
        const int64_t end = smaller((b + 1) * kMaskBlock, size);
        int64_t i = b * kMaskBlock;
        for (; i + 16 <= end; i += 16)
            for (int j = 0; j < 4; ++j)
                sum[j] = vaddq_f32(sum[j], exp_summand(vsubq_f32(vld1q_f32(logits + i + 4 * j), largest)));
        for (; i < end; ++i) rest += vgetq_lane_f32(exp_summand(vdupq_n_f32(logits[i] - row.largest)), 0);
    }
    return {row.largest, rest + vaddvq_f32(vaddq_f32(vaddq_f32(sum[0], sum[1]), vaddq_f32(sum[2], sum[3])))};
}

vac_softmax_stat joined(const vac_softmax_stat *entries, int64_t count) {
    float largest = -kInfinity;
    for (int64_t i = 0; i < count; ++i) largest = max(largest, entries[i].max);
    if (!(__builtin_fabsf(largest) < kInfinity)) return {largest, __builtin_nanf("")};
    double total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float weight = vgetq_lane_f32(exp_negative(vdupq_n_f32(entries[i].max - largest)), 0);
        total += static_cast<double>(weight) * static_cast<double>(entries[i].sum);
    }
    return {largest, static_cast<float>(total)};
}

}  // namespace

void softmax_stats_partial(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_softmax_stats_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    const Share share = share_of(args.num_rows * pieces, thread_index, thread_count);
    for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t row = i / pieces, begin = i % pieces * kPieceSize;
        static_cast<vac_softmax_stat *>(args.workspace)[i] =
            stat_of(args.logits + row * args.row_stride + begin, smaller(kPieceSize, args.vocab_size - begin));
    }
}

void softmax_stats_merge(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_softmax_stats_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    const Share share = share_of(args.num_rows, thread_index, thread_count);
    for (int64_t row = share.begin; row < share.end; ++row) {
        const auto *entries = static_cast<const vac_softmax_stat *>(args.workspace) + row * pieces;
        args.out[row] = joined(entries, pieces);
        if (args.argmax == nullptr) continue;
        const float largest = args.out[row].max;
        int64_t piece = 0;
        while (piece + 1 < pieces && !(entries[piece].max >= largest) && entries[piece].max == entries[piece].max)
            ++piece;
        const int64_t begin = piece * kPieceSize;
        args.argmax[row] = begin + first_index_of<F32>(args.logits + row * args.row_stride + begin,
                                                       smaller(kPieceSize, args.vocab_size - begin), largest);
    }
}

}  // namespace vac::VAC_TIER_NS
