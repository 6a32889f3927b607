// Rows to 8 bits: the extremes of a row, from them scale and zero point, then the rounding, two rows at a time where
// there are two, since SMMLA wants them interleaved.
#include "common/simd.h"
#include "quant/int8_kernels.h"
#include "quant/int8_layout.h"

namespace vac::VAC_TIER_NS {
namespace {

// Bits of floats as integers. Signed, those of positive values are ordered as the values are and above those of
// negative ones; unsigned, those of negative values are ordered by magnitude and above those of positive ones.
struct Bits16 {
    uint16x8_t low = vdupq_n_u16(0);
    int16x8_t high = vdupq_n_s16(0);
    static constexpr size_t kLanes = 8;
    void add(const uint16_t *p) {
        const uint16x8_t v = vld1q_u16(p);
        low = vmaxq_u16(low, v);
        high = vmaxq_s16(high, vreinterpretq_s16_u16(v));
    }
    void add(const Bits16 &other) {
        low = vmaxq_u16(low, other.low);
        high = vmaxq_s16(high, other.high);
    }
    Int8Extremes result() const {
        const uint32_t lowest = vmaxvq_u16(low);
        return {static_cast<uint16_t>(vmaxvq_s16(high)), lowest & 0x8000 ? lowest : 0};
    }
};
struct Bits32 {
    uint32x4_t low = vdupq_n_u32(0);
    int32x4_t high = vdupq_n_s32(0);
    static constexpr size_t kLanes = 4;
    void add(const float *p) {
        const uint32x4_t v = vreinterpretq_u32_f32(vld1q_f32(p));
        low = vmaxq_u32(low, v);
        high = vmaxq_s32(high, vreinterpretq_s32_u32(v));
    }
    void add(const Bits32 &other) {
        low = vmaxq_u32(low, other.low);
        high = vmaxq_s32(high, other.high);
    }
    Int8Extremes result() const {
        const uint32_t lowest = vmaxvq_u32(low);
        return {static_cast<uint32_t>(vmaxvq_s32(high)), lowest & 0x80000000u ? lowest : 0};
    }
};

template <class Type>
struct Stored;
template <>
struct Stored<F32> {
    using Bits = Bits32;
    static constexpr uint32_t kInfinity = 0x7F800000u, kSign = 0x80000000u;
    static float value(uint32_t bits) { return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(bits)), 0); }
};
template <>
struct Stored<BF16> {
    using Bits = Bits16;
    static constexpr uint32_t kInfinity = 0x7F80, kSign = 0x8000;
    static float value(uint32_t bits) { return Stored<F32>::value(bits << 16); }
};
template <>
struct Stored<F16> {
    using Bits = Bits16;
    static constexpr uint32_t kInfinity = 0x7C00, kSign = 0x8000;
    static float value(uint32_t bits) {
        return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(static_cast<uint16_t>(bits)))), 0);
    }
};

template <class Type>
inline Int8Extremes extremes_of(const typename Type::Element *x, size_t begin, size_t end) {
    using Bits = typename Stored<Type>::Bits;
    constexpr size_t kLanes = Bits::kLanes;
    Bits bits[4];
    size_t i = begin;
    for (; i + 8 * kLanes <= end; i += 8 * kLanes) {
        for (size_t j = 0; j < 8; ++j) bits[j % 4].add(x + i + j * kLanes);
    }
    for (; i + kLanes <= end; i += kLanes) bits[0].add(x + i);
    if (i < end) {
        typename Type::Element buffer[kLanes] = {};
        for (size_t j = 0; i + j < end; ++j) buffer[j] = x[i + j];
        bits[1].add(buffer);
    }
    bits[0].add(bits[1]);
    bits[2].add(bits[3]);
    bits[0].add(bits[2]);
    return bits[0].result();
}

// What a row is quantized with.
struct RowScale {
    float scale, inverse;
    int32_t zero_point;
};

// A dynamic row's range is taken to be at least this, so that neither scale nor inverse leaves the normal floats.
constexpr float kLeastRange = 0x1p-110f;

template <class Type>
inline RowScale row_scale(const vac_int8_quantization &quantization, Int8Extremes extremes) {
    using Bits = Stored<Type>;
    const uint32_t largest_low = extremes.low & ~Bits::kSign;
    const uint32_t largest = extremes.high > largest_low ? extremes.high : largest_low;
    const float nan = __builtin_nanf("");
    if (quantization.mode == VAC_INT8_STATIC) {
        const float inverse = 1.0f / quantization.scale;
        return {largest > Bits::kInfinity ? nan : quantization.scale, inverse, quantization.zero_point};
    }
    if (largest >= Bits::kInfinity) return {nan, 0.0f, 0};
    if (quantization.mode == VAC_INT8_DYNAMIC_SYMMETRIC) {
        float range = Bits::value(largest);
        range = range > kLeastRange ? range : kLeastRange;
        return {range / 127.0f, 127.0f / range, 0};
    }
    const float high = Bits::value(extremes.high), low = extremes.low ? Bits::value(extremes.low) : 0.0f;
    float scale = high / 255.0f - low / 255.0f;
    scale = scale > kLeastRange / 255.0f ? scale : kLeastRange / 255.0f;
    return {scale, 1.0f / scale, -128 - static_cast<int32_t>(__builtin_rintf(low / scale))};
}

// Adding 1.5 * 2^23 rounds to an integer, nearest even, that the low bits hold in two's complement. Rounding by FRINT
// or FCVT would have half or a quarter of FMA's throughput.
constexpr float kRound = 12582912.0f;

// kSaturate: with a zero point and limits, which a dynamic symmetric scale needs not.
template <bool kSaturate>
struct Rounder {
    float32x4_t inverse, least, most;
    int8x16_t zero_point;
    // Overwritten by FMLA, and so read anew for each: a load takes the place of a register copy on a vector pipe.
    volatile float32x4_t round_operand = vdupq_n_f32(kRound);

    explicit Rounder(const RowScale &row) {
        inverse = vdupq_n_f32(row.inverse);
        // Before the zero point is added, and in the form with kRound added: exact integers.
        least = vdupq_n_f32(kRound + static_cast<float>(-128 - row.zero_point));
        most = vdupq_n_f32(kRound + static_cast<float>(127 - row.zero_point));
        zero_point = vdupq_n_s8(static_cast<int8_t>(row.zero_point));
    }
    float32x4_t round(float32x4_t v) const {
        v = vfmaq_f32(round_operand, v, inverse);
        return kSaturate ? vminnmq_f32(vmaxnmq_f32(v, least), most) : v;
    }
    // Eight integers in 16 bits, right in their lower 8.
    uint8x16_t operator()(F32x8 v) const {
        const uint16x8_t lo = vreinterpretq_u16_f32(round(v.lo)), hi = vreinterpretq_u16_f32(round(v.hi));
        return vreinterpretq_u8_u16(vuzp1q_u16(lo, hi));
    }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Elements k .. k + 7 of a row of a pair are 2 * k behind the row's first.
constexpr size_t kKStep = 2;
inline size_t row_in_pair(size_t row, size_t) { return row % 2 * 8; }
#else
constexpr size_t kKStep = 1;
inline size_t row_in_pair(size_t row, size_t k) { return row % 2 * padded_k(k); }
#endif

template <class Type, bool kSaturate>
inline void quantize_columns(const typename Type::Element *x, size_t begin, size_t end, const RowScale &scale,
                             int8_t *to) {
    const Rounder<kSaturate> rounder(scale);
    for_columns(static_cast<int64_t>(begin), static_cast<int64_t>(end), [&](int64_t i, auto part) {
        const uint8x16_t wide = rounder(load<Type>(x + i, part));
        int8x8_t q = vreinterpret_s8_u8(vget_low_u8(vuzp1q_u8(wide, wide)));
        if (kSaturate) q = vadd_s8(q, vget_low_s8(rounder.zero_point));
        vst1_s8(to + static_cast<size_t>(i) * kKStep, q);
    });
}

template <class Type, bool kSaturate>
inline void quantize_columns_of_pair(const typename Type::Element *a, const typename Type::Element *b, size_t k,
                                     const RowScale &scale_a, const RowScale &scale_b, int8_t *to) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    const Rounder<kSaturate> rounder_a(scale_a), rounder_b(scale_b);
    const int8x16_t zero_points = vcombine_s8(vget_low_s8(rounder_a.zero_point), vget_low_s8(rounder_b.zero_point));
    for_columns(0, static_cast<int64_t>(k), [&](int64_t i, auto part) {
        // The last step of narrowing interleaves the rows.
        int8x16_t q =
            vreinterpretq_s8_u8(vuzp1q_u8(rounder_a(load<Type>(a + i, part)), rounder_b(load<Type>(b + i, part))));
        if (kSaturate) q = vaddq_s8(q, zero_points);
        vst1q_s8(to + 2 * i, q);
    });
#else
    quantize_columns<Type, kSaturate>(a, 0, k, scale_a, to);
    quantize_columns<Type, kSaturate>(b, 0, k, scale_b, to + padded_k(k));
#endif
}

inline bool saturates(const vac_int8_quantization &quantization) {
    return quantization.mode != VAC_INT8_DYNAMIC_SYMMETRIC;
}

}  // namespace

Int8Extremes int8_extremes(int32_t dtype, const void *x, size_t begin, size_t end) {
    Int8Extremes found = {0, 0};
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        found = extremes_of<Type>(static_cast<const typename Type::Element *>(x), begin, end);
    });
    return found;
}

void int8_quantize_part(const vac_int8_quantization &quantization, int32_t dtype, const void *x, size_t begin,
                        size_t end, Int8Extremes extremes, void *rows, size_t m, size_t k, size_t row) {
    const Rows to(rows, m);
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *from = static_cast<const typename Type::Element *>(x);
        const RowScale scale = row_scale<Type>(quantization, extremes);
        int8_t *q = to.pairs + row / 2 * row_pair_stride(k) + row_in_pair(row, k);
        if (begin == 0) to.scales[row] = scale.scale, to.zero_points[row] = scale.zero_point;
        if (saturates(quantization))
            quantize_columns<Type, true>(from, begin, end, scale, q);
        else
            quantize_columns<Type, false>(from, begin, end, scale, q);
    });
}

void int8_quantize_pair(const vac_int8_quantization &quantization, int32_t dtype, const void *a, const void *b,
                        void *rows, size_t m, size_t k, size_t row) {
    const Rows to(rows, m);
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *from_a = static_cast<const typename Type::Element *>(a);
        const auto *from_b = static_cast<const typename Type::Element *>(b);
        const RowScale scale_a = row_scale<Type>(quantization, extremes_of<Type>(from_a, 0, k));
        const RowScale scale_b = row_scale<Type>(quantization, extremes_of<Type>(from_b, 0, k));
        int8_t *q = to.pairs + row / 2 * row_pair_stride(k);
        to.scales[row] = scale_a.scale, to.zero_points[row] = scale_a.zero_point;
        to.scales[row + 1] = scale_b.scale, to.zero_points[row + 1] = scale_b.zero_point;
        if (saturates(quantization))
            quantize_columns_of_pair<Type, true>(from_a, from_b, k, scale_a, scale_b, q);
        else
            quantize_columns_of_pair<Type, false>(from_a, from_b, k, scale_a, scale_b, q);
    });
}

void int8_quantize_to(const vac_int8_quantize_rows_args &args, void *rows, uint32_t thread_index,
                      uint32_t thread_count) {
    const size_t m = args.m, k = args.k, bytes = args.dtype == VAC_F32 ? 4 : 2;
    const char *x = static_cast<const char *>(args.x);
    const size_t stride = args.x_stride * bytes;
    if (m >= 2 * size_t{thread_count}) {
        const Range pairs = share(ceil_div(m, 2), thread_index, thread_count);
        for (size_t row = 2 * pairs.begin; row < min_size(2 * pairs.end, m); row += 2) {
            const char *a = x + row * stride;
            if (row + 1 < m)
                int8_quantize_pair(args.quantization, args.dtype, a, a + stride, rows, m, k, row);
            else
                int8_quantize_part(args.quantization, args.dtype, a, 0, k, int8_extremes(args.dtype, a, 0, k), rows, m,
                                   k, row);
        }
        return;
    }
    // K = 0 has scales all the same.
    if (k == 0) {
        for (size_t row = thread_index; row < m; row += thread_count)
            int8_quantize_part(args.quantization, args.dtype, x, 0, 0, {0, 0}, rows, m, k, row);
        return;
    }
    for_row_pieces(static_cast<int64_t>(m), static_cast<int64_t>(k), thread_index, thread_count,
                   [&](int64_t row, int64_t begin, int64_t end) {
                       const char *a = x + static_cast<size_t>(row) * stride;
                       int8_quantize_part(args.quantization, args.dtype, a, static_cast<size_t>(begin),
                                          static_cast<size_t>(end), int8_extremes(args.dtype, a, 0, k), rows, m, k,
                                          static_cast<size_t>(row));
                   });
}

void int8_quantize_rows(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_int8_quantize_rows_args *>(args);
    int8_quantize_to(a, a.rows, thread_index, thread_count);
}

}  // namespace vac::VAC_TIER_NS
