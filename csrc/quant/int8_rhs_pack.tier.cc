// INT8 weights into panels of 8 columns, with the columns' scales and sums; the layouts are drawn in vac/quant_int8.h.
#include <arm_neon.h>

#include "quant/int8_layout.h"

namespace {

// 16 k of 8 columns; absent columns and what is beyond K are zero.
inline void load_columns(const int8_t *from, size_t stride, size_t columns, size_t k, int8x16_t (&x)[8]) {
    if (columns == 8 && k >= 16) {
        for (size_t c = 0; c < 8; ++c) x[c] = vld1q_s8(from + c * stride);
        return;
    }
    int8_t buffer[8][16] = {};
    for (size_t c = 0; c < columns; ++c) {
        for (size_t i = 0; i < min_size(k, 16); ++i) buffer[c][i] = from[c * stride + i];
    }
    for (size_t c = 0; c < 8; ++c) x[c] = vld1q_s8(buffer[c]);
}

// The order of 16 k x 8 columns, which are 128 bytes, in a panel.
inline void store_columns(const int8x16_t (&x)[8], int8_t *to) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (int pair = 0; pair < 4; ++pair) {
        const int64x2_t a = vreinterpretq_s64_s8(x[2 * pair]), b = vreinterpretq_s64_s8(x[2 * pair + 1]);
        vst1q_s8(to + 16 * pair, vreinterpretq_s8_s64(vzip1q_s64(a, b)));
        vst1q_s8(to + 64 + 16 * pair, vreinterpretq_s8_s64(vzip2q_s64(a, b)));
    }
#else
    for (int half = 0; half < 2; ++half) {
        const int32x4_t a = vreinterpretq_s32_s8(x[4 * half]), b = vreinterpretq_s32_s8(x[4 * half + 1]);
        const int32x4_t c = vreinterpretq_s32_s8(x[4 * half + 2]), d = vreinterpretq_s32_s8(x[4 * half + 3]);
        const int32x4_t ac_low = vzip1q_s32(a, c), ac_high = vzip2q_s32(a, c);
        const int32x4_t bd_low = vzip1q_s32(b, d), bd_high = vzip2q_s32(b, d);
        vst1q_s8(to + 16 * half, vreinterpretq_s8_s32(vzip1q_s32(ac_low, bd_low)));
        vst1q_s8(to + 16 * half + 32, vreinterpretq_s8_s32(vzip2q_s32(ac_low, bd_low)));
        vst1q_s8(to + 16 * half + 64, vreinterpretq_s8_s32(vzip1q_s32(ac_high, bd_high)));
        vst1q_s8(to + 16 * half + 96, vreinterpretq_s8_s32(vzip2q_s32(ac_high, bd_high)));
    }
#endif
}

}  // namespace

namespace vac::VAC_TIER_NS {

void int8_gemm_rhs_pack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int8_gemm_rhs_pack_args *>(opaque);
    const size_t n = args.n, k = args.k;
    char *packed = static_cast<char *>(args.packed);
    auto *scales = reinterpret_cast<float *>(packed + packed_scales_offset(n, k));
    auto *sums = reinterpret_cast<int32_t *>(packed + packed_sums_offset(n, k));
    const Range panels = share(ceil_div(n, kPanelColumns), thread_index, thread_count);
    for (size_t panel = panels.begin; panel < panels.end; ++panel) {
        const size_t column = panel * kPanelColumns, columns = min_size(kPanelColumns, n - column);
        const int8_t *from = args.rhs + column * args.rhs_stride;
        auto *to = reinterpret_cast<int8_t *>(packed) + panel * panel_bytes(k);
        int32x4_t sum[8];
        for (auto &s : sum) s = vdupq_n_s32(0);
        for (size_t i = 0; i < padded_k(k); i += 16, to += 16 * kPanelColumns) {
            int8x16_t x[8];
            load_columns(from + i, args.rhs_stride, columns, i < k ? k - i : 0, x);
            store_columns(x, to);
            for (int c = 0; c < 8; ++c) sum[c] = vpadalq_s16(sum[c], vpaddlq_s8(x[c]));
        }
        for (size_t c = 0; c < kPanelColumns; ++c) {
            scales[column + c] = c < columns ? args.scales[args.one_scale ? 0 : column + c] : 0.0f;
            sums[column + c] = vaddvq_s32(sum[c]);
        }
    }
}

}  // namespace vac::VAC_TIER_NS
