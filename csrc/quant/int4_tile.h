// What the tile kernels of vac_int4_w4a8 are given, and what becomes of their sums.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include "quant/int4_quantize.h"

namespace {

// One call of a tile kernel: some rows x some columns over a block of K.
struct Int4Tile {
    const vac_int4_gemm_args *args;
    const int8_t *lhs;  // the first pair's values at the block's first k
    size_t pair_stride;
    const int32_t *sums;  // the first pair's at the block's first group
    size_t sums_stride;
    const uint8_t *values;  // the first panel's at the block's first k, packed or widened
    size_t values_stride;   // bytes from one panel to the next; so below
    const char *scales;     // at the block's first group
    size_t scales_stride;
    const int8_t *zero_points;  // or NULL
    size_t zero_points_stride;
    bool bf16_scales;
    size_t steps, group_steps;  // of 16 k: of the block, and of a whole group
    bool first, last;           // block of K
    void *partial;              // where sums wait between blocks; used unless first and last
    size_t row, column, rows;   // of out
    const float *row_scales;    // of the first row
    const void *bias;           // [n] or NULL
};

inline float32x4_t load_scales(const Int4Tile &tile, const char *scales, size_t at) {
    return tile.bf16_scales ? StoredBF16::load4(reinterpret_cast<const uint16_t *>(scales) + at)
                            : vld1q_f32(reinterpret_cast<const float *>(scales) + at);
}
template <bool kBf16>
inline float32x4_t load_scales(const char *scales, size_t at) {
    return kBf16 ? StoredBF16::load4(reinterpret_cast<const uint16_t *>(scales) + at)
                 : vld1q_f32(reinterpret_cast<const float *>(scales) + at);
}

inline int32x4_t load_zero_points(const int8_t *p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)))));
}

// Sums [rows][columns], columns a multiple of 4 from column `offset` of the tile's first panel on, to out: times the
// row's scale (and, kInteger, the column's) plus bias.
template <class Stored, bool kInteger>
inline void finish_rows_as(const Int4Tile &tile, const void *sums, size_t columns, size_t offset) {
    const vac_int4_gemm_args &args = *tile.args;
    using Element = typename Stored::Element;
    const size_t n = args.n, rows = tile.rows, out_stride = args.out_stride;
    const float *row_scales = tile.row_scales;
    for (size_t c = 0; c < columns; c += 4) {
        const size_t column = tile.column + offset + c;
        if (column >= n) return;
        const size_t count = min_size(n - column, 4), in_panel = offset + c;
        // Nothing is added without a bias but -0.0, which changes no sum.
        const float32x4_t bias = tile.bias ? load_some(args.bias_dtype, tile.bias, column, count) : vdupq_n_f32(-0.0f);
        float32x4_t scale = vdupq_n_f32(1);
        if (kInteger)
            scale = load_scales(tile, tile.scales + in_panel / kPanelColumns * tile.scales_stride,
                                in_panel % kPanelColumns);
        Element *out = static_cast<Element *>(args.out) + tile.row * out_stride + column;
        const auto result = [&](size_t r) {
            float32x4_t sum;
            if (kInteger)
                sum = vmulq_f32(vcvtq_f32_s32(vld1q_s32(static_cast<const int32_t *>(sums) + r * columns + c)), scale);
            else
                sum = vld1q_f32(static_cast<const float *>(sums) + r * columns + c);
            return vfmaq_f32(bias, sum, vdupq_n_f32(row_scales[r]));
        };
        if (count == 4) {
            for (size_t r = 0; r < rows; ++r, out += out_stride) Stored::store4(out, result(r));
        } else {
            for (size_t r = 0; r < rows; ++r, out += out_stride) store_some<Stored>(out, result(r), count);
        }
    }
}

template <bool kInteger>
[[gnu::noinline]] void finish_rows(const Int4Tile &tile, const void *sums, size_t columns, size_t offset) {
    with_stored(tile.args->out_dtype,
                [&](auto stored) { finish_rows_as<decltype(stored), kInteger>(tile, sums, columns, offset); });
}

using TileKernel = void (*)(const Int4Tile &, size_t offset);

}  // namespace
