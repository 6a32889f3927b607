// -inf where a mask of bytes says so: 16 tokens at a time, those without a set byte unseen.
#include "vac/sampling.h"

#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

void fill(float *logits, const uint8_t *mask, int64_t size) {
    const float32x4_t lowest = vdupq_n_f32(-kInfinity);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const uint8x16_t bytes = vld1q_u8(mask + i);
        if (vmaxvq_u8(bytes) == 0) continue;
        const int8x16_t set = vreinterpretq_s8_u8(vtstq_u8(bytes, bytes));
        const int16x8_t half[2] = {vmovl_s8(vget_low_s8(set)), vmovl_high_s8(set)};
        for (int j = 0; j < 2; ++j) {
            float *x = logits + i + 8 * j;
            const uint32x4_t low = vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(half[j])));
            const uint32x4_t high = vreinterpretq_u32_s32(vmovl_high_s16(half[j]));
            vst1q_f32(x, vbslq_f32(low, lowest, vld1q_f32(x)));
            vst1q_f32(x + 4, vbslq_f32(high, lowest, vld1q_f32(x + 4)));
        }
    }
    for (; i < size; ++i)
        if (mask[i] != 0) logits[i] = -kInfinity;
}

}  // namespace

void fill_masked(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_fill_masked_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    const Share share = share_of(args.num_reqs * pieces, thread_index, thread_count);
    for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t req = i / pieces, begin = i % pieces * kPieceSize;
        fill(args.logits + req * args.row_stride + begin, args.mask + req * args.mask_row_stride + begin,
             smaller(kPieceSize, args.vocab_size - begin));
    }
}

}  // namespace vac::VAC_TIER_NS
