// What follows the sums: bias, residual and rounding to the dtype of out.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include <arm_neon.h>

#include "gemm/blocking.h"

namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline uint16x4_t bf16_from_f32(float32x4_t value) { return vreinterpret_u16_bf16(vcvt_bf16_f32(value)); }
#else
// Round to nearest even on the bits; a NaN stays one, made quiet.
inline uint16x4_t bf16_from_f32(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
}
#endif

// How a dtype is stored: 4 elements at a time as FP32 and back.
struct StoredF32 {
    using Element = float;
    static float32x4_t load4(const float *p) { return vld1q_f32(p); }
    static void store4(float *p, float32x4_t value) { vst1q_f32(p, value); }
};

struct StoredF16 {
    using Element = uint16_t;
    static float32x4_t load4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static void store4(uint16_t *p, float32x4_t value) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(value))); }
};

struct StoredBF16 {
    using Element = uint16_t;
    static float32x4_t load4(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static void store4(uint16_t *p, float32x4_t value) { vst1_u16(p, bf16_from_f32(value)); }
};

// The first `count` <= 4 elements, the rest zero; reads nothing behind them.
template <class Stored>
inline float32x4_t load_some(const typename Stored::Element *p, size_t count) {
    if (count >= 4) return Stored::load4(p);
    typename Stored::Element buffer[4] = {};
    for (size_t i = 0; i < count; ++i) buffer[i] = p[i];
    return Stored::load4(buffer);
}

template <class Stored>
inline void store_some(typename Stored::Element *p, float32x4_t value, size_t count) {
    if (count >= 4) return Stored::store4(p, value);
    typename Stored::Element buffer[4];
    Stored::store4(buffer, value);
    for (size_t i = 0; i < count; ++i) p[i] = buffer[i];
}

inline float32x4_t load_some(int dtype, const void *base, size_t offset, size_t count) {
    if (dtype == VAC_F32) return load_some<StoredF32>(static_cast<const float *>(base) + offset, count);
    if (dtype == VAC_F16) return load_some<StoredF16>(static_cast<const uint16_t *>(base) + offset, count);
    return load_some<StoredBF16>(static_cast<const uint16_t *>(base) + offset, count);
}

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
