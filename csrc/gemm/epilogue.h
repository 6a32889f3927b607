// What follows the sums: bias, residual and rounding to the dtype of out.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include <arm_neon.h>

#include "common/stored.h"
#include "gemm/blocking.h"

namespace {

// `columns` <= 8 columns of sums [rows][stride] to out at (row, column), without a residual or with.
template <class Stored, bool kResidual>
inline void finish_panel(const vac_gemm_args &args, const float *sums, size_t stride, size_t rows, size_t row,
                         size_t column, size_t columns) {
    using Element = typename Stored::Element;
    const size_t high = columns > 4 ? columns - 4 : 0, out_stride = args.out_stride;
    // Nothing is added without a bias but -0.0, which changes no sum.
    float32x4_t bias_low = vdupq_n_f32(-0.0f), bias_high = bias_low;
    if (args.bias) {
        bias_low = load_some(args.bias_dtype, args.bias, column, columns);
        if (high) bias_high = load_some(args.bias_dtype, args.bias, column + 4, high);
    }
    Element *out = static_cast<Element *>(args.out) + row * out_stride + column;
    const size_t residual_stride = args.residual_stride;
    const Element *residual =
        kResidual ? static_cast<const Element *>(args.residual) + row * residual_stride + column : nullptr;
    if (columns >= 8) {
        for (size_t r = 0; r < rows; ++r, sums += stride, out += out_stride) {
            float32x4_t a = vaddq_f32(vld1q_f32(sums), bias_low), b = vaddq_f32(vld1q_f32(sums + 4), bias_high);
            if (kResidual) {
                a = vaddq_f32(a, Stored::load4(residual));
                b = vaddq_f32(b, Stored::load4(residual + 4));
                residual += residual_stride;
            }
            Stored::store4(out, a);
            Stored::store4(out + 4, b);
        }
        return;
    }
    for (size_t r = 0; r < rows; ++r, sums += stride, out += out_stride) {
        float32x4_t a = vaddq_f32(vld1q_f32(sums), bias_low), b = vaddq_f32(vld1q_f32(sums + 4), bias_high);
        if (kResidual) {
            a = vaddq_f32(a, load_some<Stored>(residual, columns));
            if (high) b = vaddq_f32(b, load_some<Stored>(residual + 4, high));
            residual += residual_stride;
        }
        store_some<Stored>(out, a, columns);
        if (high) store_some<Stored>(out + 4, b, high);
    }
}

template <class Stored>
inline void finish_panel(const vac_gemm_args &args, const float *sums, size_t stride, size_t rows, size_t row,
                         size_t column, size_t columns) {
    if (args.residual) return finish_panel<Stored, true>(args, sums, stride, rows, row, column, columns);
    finish_panel<Stored, false>(args, sums, stride, rows, row, column, columns);
}

// Finishes sums [rows][columns], columns a multiple of 8, and writes them to out at (row, column); columns beyond N
// are left out.
[[gnu::noinline]] void finish_rows(const vac_gemm_args &args, const float *sums, size_t columns, size_t rows,
                                   size_t row, size_t column) {
    for (size_t c = 0; c < columns; c += kPanelColumns) {
        const size_t count = min_size(kPanelColumns, args.n - column - c);
        if (args.out_dtype == VAC_F32)
            finish_panel<StoredF32>(args, sums + c, columns, rows, row, column + c, count);
        else if (args.out_dtype == VAC_F16)
            finish_panel<StoredF16>(args, sums + c, columns, rows, row, column + c, count);
        else
            finish_panel<StoredBF16>(args, sums + c, columns, rows, row, column + c, count);
    }
}

}  // namespace
