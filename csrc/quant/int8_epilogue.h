// A tile of an INT8 linear, and what follows its sums: zero points, scales, bias, residual and rounding to the dtype of
// out. Included by .tier.cc files only, private to each of them.
#pragma once

#include "common/simd.h"
#include "quant/int8_layout.h"

namespace vac::VAC_TIER_NS {
namespace {

// What is the same for all tiles of a weight.
struct Target {
    int32_t out_dtype, bias_dtype;
    size_t n;
    bool wide;   // K > kNarrowK
    bool plain;  // BF16 without bias or residual, not wide
    const float *scales;
    const int32_t *column_sums;
    const void *bias, *residual;
    void *out;
    size_t residual_stride, out_stride;
};

// A tile, the first of several below and beside it: `rows` x (panels * 8) sums over one block of K.
struct Tile {
    const Target *target;
    const int8_t *const *lhs;  // first k of each pair of rows (SMMLA), of each row (SDOT)
    size_t lhs_offset;         // bytes from there to the block's first k
    const int8_t *rhs;         // the first panel at the block's first k
    size_t rhs_stride;         // bytes from one panel to the next
    size_t k;                  // of this block, a multiple of kKAlign, not 0
    bool first, last;          // block of K: sums start at zero, are finished and written to out
    int32_t *partial;          // where they wait between blocks; used unless first and last
    size_t row, column;        // of out
    size_t rows;
    const float *row_scales;     // of each row, readable up to an even number
    const float *pair_scales;    // SMMLA: of each pair of rows as its sums lie, a row's scale twice
    const int32_t *zero_points;  // NULL if all are zero
};

// The exact sum of (q - zero_point) * weight beyond kNarrowK. The sum of q * weight is in [-127 * 128 * K, 128 * 128 *
// K], for K <= 2^17 in [-2^31 + 2^24, 2^31]: of 2^32 neighbours none twice, and what wrapped around is 2^31 itself.
inline F32x8 finish_wide(const int32_t *sums, const int32_t *column_sums, int32_t zero_point) {
    float values[8];
    for (int i = 0; i < 8; ++i) {
        const int64_t sum = int64_t{static_cast<int32_t>(static_cast<uint32_t>(sums[i]) - 1)} + 1;
        values[i] = static_cast<float>(sum - int64_t{zero_point} * column_sums[i]);
    }
    return F32::load(values);
}

inline F32x8 load_bias(const Target &target, size_t column, size_t columns) {
    // Added to a product without a bias: -0.0, which changes nothing.
    F32x8 bias = {vdupq_n_f32(-0.0f), vdupq_n_f32(-0.0f)};
    if (!target.bias) return bias;
    with_dtype(target.bias_dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *p = static_cast<const typename Type::Element *>(target.bias) + column;
        bias = columns >= 8 ? load<Type>(p, Full{}) : load<Type>(p, Tail{static_cast<int64_t>(columns)});
    });
    return bias;
}

// Rows of a tile.
struct TileRows {
    size_t first, count;
};

// One panel of a tile: sums [rows][stride] to out, without a residual or with.
template <class Type, bool kResidual, class Columns>
inline void finish_panel(const Tile &tile, TileRows rows, const int32_t *sums, size_t stride, size_t column, F32x8 bias,
                         Columns columns) {
    using Element = typename Type::Element;
    const Target &target = *tile.target;
    const F32x8 scales = F32::load(target.scales + column);
    const int32_t *column_sums = target.column_sums + column;
    const int32x4_t sum_low = vld1q_s32(column_sums), sum_high = vld1q_s32(column_sums + 4);
    Element *out = static_cast<Element *>(target.out) + (tile.row + rows.first) * target.out_stride + column;
    const Element *residual = nullptr;
    if (kResidual)
        residual =
            static_cast<const Element *>(target.residual) + (tile.row + rows.first) * target.residual_stride + column;
    for (size_t r = rows.first; r < rows.first + rows.count; ++r, sums += stride, out += target.out_stride) {
        const int32_t zero_point = tile.zero_points ? tile.zero_points[r] : 0;
        F32x8 v;
        if (__builtin_expect(target.wide, 0)) {
            v = finish_wide(sums, column_sums, zero_point);
        } else {
            v.lo = vcvtq_f32_s32(vmlsq_n_s32(vld1q_s32(sums), sum_low, zero_point));
            v.hi = vcvtq_f32_s32(vmlsq_n_s32(vld1q_s32(sums + 4), sum_high, zero_point));
        }
        v = multiply_add(bias, v * vdupq_n_f32(tile.row_scales[r]), scales);
        if (kResidual) {
            v = v + load<Type>(residual, columns);
            residual += target.residual_stride;
        }
        store<Type>(out, v, columns);
    }
}

// Finishes sums [count][columns] of the tile's rows first .. first + count, from `column` of out on, columns a multiple
// of 8, and writes them to out; columns beyond N are left out.
[[gnu::noinline]] void finish_rows(const Tile &tile, size_t first, size_t count, size_t column, const int32_t *sums,
                                   size_t columns) {
    const TileRows rows = {first, count};
    const Target &target = *tile.target;
    for (size_t c = 0; c < columns && column < target.n; c += kPanelColumns, column += kPanelColumns) {
        const size_t wide = min_size(kPanelColumns, target.n - column);
        const F32x8 bias = load_bias(target, column, wide);
        with_dtype(target.out_dtype, [&](auto type) {
            using Type = decltype(type);
            const Tail tail = {static_cast<int64_t>(wide)};
            if (target.residual && wide < kPanelColumns)
                finish_panel<Type, true>(tile, rows, sums + c, columns, column, bias, tail);
            else if (target.residual)
                finish_panel<Type, true>(tile, rows, sums + c, columns, column, bias, Full{});
            else if (wide < kPanelColumns)
                finish_panel<Type, false>(tile, rows, sums + c, columns, column, bias, tail);
            else
                finish_panel<Type, false>(tile, rows, sums + c, columns, column, bias, Full{});
        });
    }
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
