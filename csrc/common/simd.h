// Eight elements at a time of any data type as FP32 vectors, and how a kernel's
// work is cut: included by .tier.cc files only, private to each of them.
#pragma once

#include <arm_neon.h>

#include "vac/base.h"

namespace vac::VAC_TIER_NS {
namespace {

struct F32x8 {
    float32x4_t lo, hi;
};

inline F32x8 operator+(F32x8 a, F32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
inline F32x8 operator*(F32x8 a, F32x8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
inline F32x8 operator*(F32x8 a, float32x4_t b) { return {vmulq_f32(a.lo, b), vmulq_f32(a.hi, b)}; }
// a + b * c and a - b * c, rounded once.
inline F32x8 multiply_add(F32x8 a, F32x8 b, F32x8 c) {
    return {vfmaq_f32(a.lo, b.lo, c.lo), vfmaq_f32(a.hi, b.hi, c.hi)};
}
inline F32x8 multiply_sub(F32x8 a, F32x8 b, F32x8 c) {
    return {vfmsq_f32(a.lo, b.lo, c.lo), vfmsq_f32(a.hi, b.hi, c.hi)};
}

// How exact an activation's exponential and reciprocal have to be for a data type.
enum class Precision { kBF16, kF16, kF32 };

// A data type: how eight elements are read, written, and squared into two
// accumulators without being widened first where the CPU can.
struct F32 {
    using Element = float;
    static constexpr Precision kPrecision = Precision::kF32;
    static F32x8 load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static void store(float *p, F32x8 v) {
        vst1q_f32(p, v.lo);
        vst1q_f32(p + 4, v.hi);
    }
    static F32x8 add_squares(F32x8 sum, const float *p) {
        const F32x8 v = load(p);
        return multiply_add(sum, v, v);
    }
};

struct F16 {
    using Element = uint16_t;
    static constexpr Precision kPrecision = Precision::kF16;
    static F32x8 load(const uint16_t *p) {
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(p));
        return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
    }
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.lo), v.hi)));
    }
    static F32x8 add_squares(F32x8 sum, const uint16_t *p) {
#if defined(__ARM_FEATURE_FP16_FML)
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(p));
        return {vfmlalq_low_f16(sum.lo, v, v), vfmlalq_high_f16(sum.hi, v, v)};
#else
        const F32x8 v = load(p);
        return multiply_add(sum, v, v);
#endif
    }
};

struct BF16 {
    using Element = uint16_t;
    static constexpr Precision kPrecision = Precision::kBF16;
    // A BF16 is the upper half of an FP32: interleaving with zeros widens it,
    // and runs on every vector pipe, which a shift does not.
    static F32x8 load(const uint16_t *p) {
        const uint16x8_t v = vld1q_u16(p), zero = vdupq_n_u16(0);
        return {vreinterpretq_f32_u16(vzip1q_u16(zero, v)), vreinterpretq_f32_u16(vzip2q_u16(zero, v))};
    }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.lo), v.hi)));
    }
    // out = x * weight * scale. The product of two BF16 is exact in FP32 and needs no
    // widening: BFMLALB and BFMLALT multiply the even and the odd elements.
    static void store_scaled_product(uint16_t *out, const uint16_t *x, const uint16_t *weight, float32x4_t scale) {
        const bfloat16x8_t v = vreinterpretq_bf16_u16(vld1q_u16(x)), w = vreinterpretq_bf16_u16(vld1q_u16(weight));
        const float32x4_t zero = vdupq_n_f32(0);
        const float32x4_t even = vmulq_f32(vbfmlalbq_f32(zero, v, w), scale);
        const float32x4_t odd = vmulq_f32(vbfmlaltq_f32(zero, v, w), scale);
        // TBL interleaves: a zip before the store would become the slower ST2.
        constexpr uint8_t kInterleave[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
        const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(even), odd);
        vst1q_u16(out, vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_bf16(both), vld1q_u8(kInterleave))));
    }
    static F32x8 add_squares(F32x8 sum, const uint16_t *p) {
        const bfloat16x8_t v = vreinterpretq_bf16_u16(vld1q_u16(p));
        return {vbfmlalbq_f32(sum.lo, v, v), vbfmlaltq_f32(sum.hi, v, v)};
    }
#else
    // Upper halves of the rounded bits: nearest even; a NaN is kept and made quiet.
    static uint32x4_t round(float32x4_t v) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        // USRA adds the bit that becomes the last one: a tie goes to even.
        const uint32x4_t rounded = vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), vshlq_n_u32(bits, 15), 31);
        return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    }
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vuzp2q_u16(vreinterpretq_u16_u32(round(v.lo)), vreinterpretq_u16_u32(round(v.hi))));
    }
    static F32x8 add_squares(F32x8 sum, const uint16_t *p) {
        const F32x8 v = load(p);
        return multiply_add(sum, v, v);
    }
#endif
};

// How many of eight elements there are: all, or the last `count` of a row.
struct Full {};
struct Tail {
    int64_t count;
};

template <class Type>
inline F32x8 load(const typename Type::Element *p, Full) {
    return Type::load(p);
}
template <class Type>
inline void store(typename Type::Element *p, F32x8 v, Full) {
    Type::store(p, v);
}
// Absent elements read as zero.
template <class Type>
inline F32x8 load(const typename Type::Element *p, Tail tail) {
    typename Type::Element buffer[8] = {};
    for (int64_t i = 0; i < tail.count; ++i) buffer[i] = p[i];
    return Type::load(buffer);
}
template <class Type>
inline void store(typename Type::Element *p, F32x8 v, Tail tail) {
    typename Type::Element buffer[8];
    Type::store(buffer, v);
    for (int64_t i = 0; i < tail.count; ++i) p[i] = buffer[i];
}

template <class Type>
inline F32x8 add_squares(F32x8 sum, const typename Type::Element *p, Full) {
    return Type::add_squares(sum, p);
}
template <class Type>
inline F32x8 add_squares(F32x8 sum, const typename Type::Element *p, Tail tail) {
    const F32x8 v = load<Type>(p, tail);
    return multiply_add(sum, v, v);
}

// body(column, Full or Tail) for columns begin, begin + 8, ... up to end.
template <class Body>
inline void for_columns(int64_t begin, int64_t end, Body body) {
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
        body(i, Full{});
        body(i + 8, Full{});
        body(i + 16, Full{});
        body(i + 24, Full{});
    }
    for (; i + 8 <= end; i += 8) body(i, Full{});
    if (i < end) body(i, Tail{end - i});
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// A thread's part of `total` units: contiguous, sizes differ by one at most.
struct Share {
    int64_t begin, end;
};
inline Share share_of(int64_t total, uint32_t thread_index, uint32_t thread_count) {
    if (thread_count <= 1) return {0, total};
    return {total * thread_index / thread_count, total * (thread_index + 1) / thread_count};
}

// body(row, column_begin, column_end) for a thread's part of a matrix. Pieces
// begin at multiples of 64 columns: whole cache lines of every data type.
template <class Body>
inline void for_row_pieces(int64_t num_rows, int64_t num_columns, uint32_t thread_index, uint32_t thread_count,
                           Body body) {
    constexpr int64_t kUnit = 64;
    const int64_t units = (num_columns + kUnit - 1) / kUnit;
    if (num_rows <= 0 || units <= 0) return;
    const Share share = share_of(num_rows * units, thread_index, thread_count);
    int64_t row = share.begin / units, unit = share.begin % units;
    for (int64_t left = share.end - share.begin; left > 0; ++row, unit = 0) {
        const int64_t taken = smaller(left, units - unit);
        body(row, unit * kUnit, smaller((unit + taken) * kUnit, num_columns));
        left -= taken;
    }
}

// Calls body(Type{}) for a value of enum vac_dtype; nothing for another value.
template <class Body>
inline void with_dtype(int32_t dtype, Body body) {
    if (dtype == VAC_F32) body(F32{});
    if (dtype == VAC_F16) body(F16{});
    if (dtype == VAC_BF16) body(BF16{});
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
