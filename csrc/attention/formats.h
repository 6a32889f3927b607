// How each element type is multiplied: a row tile of 4 rows times a panel of
// 16 columns, the shape that both scores and outputs are made of.
//
// A format defines
//   Element, Cache           storage of queries and output; of the cache
//   Packed, Weight, Wide     queries and weights as the left operand; a panel converted for the product
//   kStorage                 what the cache holds: the element type itself, INT8 or E4M3 (quantized.h)
//   kStep                    depth of one step of the product
//   join_sums<Rows>          to be called behind multiply<Rows> and multiply_wide<Rows>: they may add up in parts
//   rows_used(n)             the row count, of those it has code for, that holds n rows
//   pack(rows, depth, out)   4 rows of queries -> [depth][4 rows] in its own order
//   multiply<Rows>(acc, lhs, rhs, steps)
//   position, spread, maximum<Rows>, weights<Rows>, store_rows<Store, Rows>: softmax in the order of accumulators;
//   Rows is rows_used() of the row count
// Accumulators: acc[16] of float32x4_t, all in registers; everything here is
// inlined and its loops unrolled for that.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "attention/exp.h"
#include "vac/base.h"

namespace vac::VAC_TIER_NS {
namespace {

#define VAC_INLINE inline __attribute__((always_inline))
#define VAC_INLINE_LAMBDA __attribute__((always_inline))

inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

VAC_INLINE float32x4_t pair_low(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
VAC_INLINE float32x4_t pair_high(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

VAC_INLINE void transpose4(float32x4_t v[4]) {
    const float32x4_t a = vtrn1q_f32(v[0], v[1]), b = vtrn2q_f32(v[0], v[1]);
    const float32x4_t c = vtrn1q_f32(v[2], v[3]), d = vtrn2q_f32(v[2], v[3]);
    v[0] = pair_low(a, c);
    v[1] = pair_low(b, d);
    v[2] = pair_high(a, c);
    v[3] = pair_high(b, d);
}

// FP32 to BF16, nearest even; NaN stays NaN.
VAC_INLINE uint16x8_t bf16_from_f32(float32x4_t low, float32x4_t high) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
#else
    uint32x4_t bits[2] = {vreinterpretq_u32_f32(low), vreinterpretq_u32_f32(high)};
    const uint32x4_t is_number[2] = {vceqq_f32(low, low), vceqq_f32(high, high)};
    for (int i = 0; i < 2; ++i) {
        const uint32x4_t odd = vandq_u32(bits[i], vdupq_n_u32(0x10000));
        const uint32x4_t rounded = vsraq_n_u32(vaddq_u32(bits[i], vdupq_n_u32(0x7FFF)), odd, 16);
        bits[i] = vbslq_u32(is_number[i], rounded, vdupq_n_u32(0x7FC00000));
    }
    return vuzp2q_u16(vreinterpretq_u16_u32(bits[0]), vreinterpretq_u16_u32(bits[1]));
#endif
}

enum class Storage { kSame, kInt8, kFp8 };

// Storage <-> FP32, for 4 or 8 elements.
struct StoreBf16 {
    using Element = uint16_t;
    static constexpr int32_t kDtype = VAC_BF16;
    static VAC_INLINE float32x4_t load4(const Element *p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
    }
    static VAC_INLINE void load8(const Element *p, float32x4_t &low, float32x4_t &high) {
        const uint16x8_t v = vld1q_u16(p);
        low = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16));
        high = vreinterpretq_f32_u32(vshll_high_n_u16(v, 16));
    }
    static VAC_INLINE void store8(Element *p, float32x4_t low, float32x4_t high) {
        vst1q_u16(p, bf16_from_f32(low, high));
    }
};

struct StoreF16 {
    using Element = float16_t;
    static constexpr int32_t kDtype = VAC_F16;
    static VAC_INLINE float32x4_t load4(const Element *p) { return vcvt_f32_f16(vld1_f16(p)); }
    static VAC_INLINE void load8(const Element *p, float32x4_t &low, float32x4_t &high) {
        const float16x8_t v = vld1q_f16(p);
        low = vcvt_f32_f16(vget_low_f16(v));
        high = vcvt_high_f32_f16(v);
    }
    static VAC_INLINE void store8(Element *p, float32x4_t low, float32x4_t high) {
        vst1q_f16(p, vcvt_high_f16_f32(vcvt_f16_f32(low), high));
    }
};

struct StoreF32 {
    using Element = float;
    static constexpr int32_t kDtype = VAC_F32;
    static VAC_INLINE float32x4_t load4(const Element *p) { return vld1q_f32(p); }
    static VAC_INLINE void load8(const Element *p, float32x4_t &low, float32x4_t &high) {
        low = vld1q_f32(p);
        high = vld1q_f32(p + 4);
    }
    static VAC_INLINE void store8(Element *p, float32x4_t low, float32x4_t high) {
        vst1q_f32(p, low);
        vst1q_f32(p + 4, high);
    }
};

// FP32 FMLA by element. lhs [depth][4 rows], rhs [depth][16].
// acc[4 r + j] holds row r, columns 4 j .. 4 j + 3.
struct FmlaOrder {
    static constexpr int32_t kStep = 1;
    static constexpr bool kPadsDepth = false, kHalves = false;
    static constexpr int kMaxima = 4;  // registers of maximum()
    static int rows_used(int n) { return n == 3 ? 4 : n; }

    static VAC_INLINE int32x4_t position(int i) {
        static constexpr int32_t lanes[4] = {0, 1, 2, 3};
        return vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(4 * (i % 4)));
    }
    static VAC_INLINE float32x4_t spread(float32x4_t rows, int i) {
        switch (i / 4) {
            case 0:
                return vdupq_laneq_f32(rows, 0);
            case 1:
                return vdupq_laneq_f32(rows, 1);
            case 2:
                return vdupq_laneq_f32(rows, 2);
            default:
                return vdupq_laneq_f32(rows, 3);
        }
    }
    static VAC_INLINE int32x4_t spread(int32x4_t rows, int i) {
        return vreinterpretq_s32_f32(spread(vreinterpretq_f32_s32(rows), i));
    }
    template <int Rows>
    static VAC_INLINE void maximum(float32x4_t maximum[4], const float32x4_t acc[16]) {
        for (int r = 0; r < Rows; ++r)
            maximum[r] = vmaxq_f32(vmaxq_f32(acc[4 * r], acc[4 * r + 1]), vmaxq_f32(acc[4 * r + 2], acc[4 * r + 3]));
        for (int r = Rows; r < 4; ++r) maximum[r] = maximum[0];
    }
    static VAC_INLINE float32x4_t reduce_maximum(const float32x4_t v[4]) {
        return vpmaxq_f32(vpmaxq_f32(v[0], v[1]), vpmaxq_f32(v[2], v[3]));
    }
    static VAC_INLINE float32x4_t reduce_sum(const float32x4_t v[4]) {
        return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
    }
    template <class Store, int Rows>
    static VAC_INLINE void store_rows(const float32x4_t acc[16], typename Store::Element *const rows[4], int num_rows,
                                      uint32_t column) {
        for (int r = 0; r < Rows; ++r) {
            // No break: with a loop that stays a loop, acc would live in memory.
            if (r < num_rows) {
                Store::store8(rows[r] + column, acc[4 * r], acc[4 * r + 1]);
                Store::store8(rows[r] + column + 8, acc[4 * r + 2], acc[4 * r + 3]);
            }
        }
    }
};

// A single row's four accumulators would wait for the additions: four steps add up apart.
template <int Rows>
VAC_INLINE void join_quarters(float32x4_t acc[16]) {
    if (Rows > 1) return;
    for (int j = 0; j < 4; ++j) acc[j] = vaddq_f32(vaddq_f32(acc[j], acc[4 + j]), vaddq_f32(acc[8 + j], acc[12 + j]));
}

template <class StoreType, int Degree>
struct FmlaFormat : FmlaOrder {
    using Store = StoreType;
    using Element = typename Store::Element;
    using Cache = Element;
    using Packed = float;
    using Weight = Packed;
    using Wide = float;
    static constexpr Storage kStorage = Storage::kSame;
    static constexpr int kDegree = Degree;
    // Mean of a stored weight over the computed one.
    static constexpr float kWeightBias = 1.0f;

    static void pack(const Element *const rows[4], uint32_t depth, Packed *out) {
        for (uint32_t k = 0; k < depth; k += 4) {
            float32x4_t v[4];
            for (int r = 0; r < 4; ++r) v[r] = Store::load4(rows[r] + k);
            transpose4(v);
            for (int i = 0; i < 4; ++i) vst1q_f32(out + 4 * (k + i), v[i]);
        }
    }

    template <class Source, int Rows>
    static VAC_INLINE void step(float32x4_t acc[16], const Packed *lhs, const typename Source::Element *rhs) {
        const float32x4_t a = vld1q_f32(lhs);
        float32x4_t b[4];
        Source::load8(rhs, b[0], b[1]);
        Source::load8(rhs + 8, b[2], b[3]);
        for (int j = 0; j < 4; ++j) {
            acc[j] = vfmaq_laneq_f32(acc[j], b[j], a, 0);
            if (Rows > 1) acc[4 + j] = vfmaq_laneq_f32(acc[4 + j], b[j], a, 1);
            if (Rows > 2) {
                acc[8 + j] = vfmaq_laneq_f32(acc[8 + j], b[j], a, 2);
                acc[12 + j] = vfmaq_laneq_f32(acc[12 + j], b[j], a, 3);
            }
        }
    }

    template <class Source, int Rows>
    static VAC_INLINE void multiply_from(float32x4_t acc[16], const Packed *lhs, const typename Source::Element *rhs,
                                         int32_t steps) {
        for (; steps >= 4; steps -= 4, lhs += 16, rhs += 64)
            for (int i = 0; i < 4; ++i) step<Source, Rows>(acc + (Rows > 1 ? 0 : 4 * i), lhs + 4 * i, rhs + 16 * i);
        for (; steps > 0; --steps, lhs += 4, rhs += 16) step<Source, Rows>(acc, lhs, rhs);
    }

    template <int Rows>
    static VAC_INLINE void multiply(float32x4_t acc[16], const Packed *lhs, const Element *rhs, int32_t steps) {
        multiply_from<Store, Rows>(acc, lhs, rhs, steps);
    }
    template <int Rows>
    static VAC_INLINE void join_sums(float32x4_t acc[16]) {
        join_quarters<Rows>(acc);
    }

    // For several row tiles, a panel is converted to FP32 once.
    static constexpr bool kWidens = sizeof(Element) == 2;

    static void widen(const Element *panel, float *out, int32_t depth) {
        for (; depth > 0; --depth, panel += 16, out += 16) {
            float32x4_t v[4];
            Store::load8(panel, v[0], v[1]);
            Store::load8(panel + 8, v[2], v[3]);
            for (int i = 0; i < 4; ++i) vst1q_f32(out + 4 * i, v[i]);
        }
    }

    template <int Rows>
    static VAC_INLINE void multiply_wide(float32x4_t acc[16], const Packed *lhs, const float *rhs, int32_t steps) {
        multiply_from<StoreF32, Rows>(acc, lhs, rhs, steps);
    }

    template <int Rows>
    static VAC_INLINE void weights(const float *scores, Packed *out, int32_t tokens, Factor scale,
                                   float32x4_t exponents, float32x4_t &sum) {
        ExpScale e[Rows];
        float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
        for (int r = 0; r < Rows; ++r) e[r] = exp_scale(scale, spread(exponents, 4 * r));
        for (; tokens > 0; tokens -= 16, scores += 64, out += 64)
            for (int j = 0; j < 4; ++j) {
                float32x4_t v[4];
                for (int r = 0; r < 4; ++r) {
                    v[r] = r < Rows ? exp2_scores<Degree>(vld1q_f32(scores + 16 * r + 4 * j), e[r < Rows ? r : 0])
                                    : vdupq_n_f32(0);
                    sums[r] = vaddq_f32(sums[r], v[r]);
                }
                transpose4(v);
                for (int i = 0; i < 4; ++i) vst1q_f32(out + 16 * j + 4 * i, v[i]);
            }
        sum = reduce_sum(sums);
    }
};

#if defined(__ARM_FEATURE_FP16_FML)
// FMLAL takes FP16 as it is stored and adds in FP32; weights are rounded to FP16.
struct FmlalFormat : FmlaOrder {
    using Store = StoreF16;
    using Element = float16_t;
    using Cache = Element;
    using Packed = float16_t;
    using Weight = Packed;
    using Wide = float;
    static constexpr Storage kStorage = Storage::kSame;
    static constexpr int kDegree = 4;
    static constexpr float kWeightBias = 1.0f;
    static constexpr bool kWidens = false;

    static void pack(const Element *const rows[4], uint32_t depth, Packed *out) {
        for (uint32_t k = 0; k < depth; k += 4) {
            float16x4x4_t quad;
            for (int r = 0; r < 4; ++r) quad.val[r] = vld1_f16(rows[r] + k);
            vst4_f16(out + 4 * k, quad);
        }
    }

    template <int Rows>
    static VAC_INLINE void step(float32x4_t acc[16], const Packed *lhs, const Element *rhs) {
        const float16x4_t a = vld1_f16(lhs);
        const float16x8_t b[2] = {vld1q_f16(rhs), vld1q_f16(rhs + 8)};
        for (int j = 0; j < 2; ++j) {
            acc[2 * j] = vfmlalq_lane_low_f16(acc[2 * j], b[j], a, 0);
            acc[2 * j + 1] = vfmlalq_lane_high_f16(acc[2 * j + 1], b[j], a, 0);
            if (Rows > 1) {
                acc[4 + 2 * j] = vfmlalq_lane_low_f16(acc[4 + 2 * j], b[j], a, 1);
                acc[4 + 2 * j + 1] = vfmlalq_lane_high_f16(acc[4 + 2 * j + 1], b[j], a, 1);
            }
            if (Rows > 2) {
                acc[8 + 2 * j] = vfmlalq_lane_low_f16(acc[8 + 2 * j], b[j], a, 2);
                acc[8 + 2 * j + 1] = vfmlalq_lane_high_f16(acc[8 + 2 * j + 1], b[j], a, 2);
                acc[12 + 2 * j] = vfmlalq_lane_low_f16(acc[12 + 2 * j], b[j], a, 3);
                acc[12 + 2 * j + 1] = vfmlalq_lane_high_f16(acc[12 + 2 * j + 1], b[j], a, 3);
            }
        }
    }

    template <int Rows>
    static VAC_INLINE void multiply(float32x4_t acc[16], const Packed *lhs, const Element *rhs, int32_t steps) {
        for (; steps >= 4; steps -= 4, lhs += 16, rhs += 64)
            for (int i = 0; i < 4; ++i) step<Rows>(acc + (Rows > 1 ? 0 : 4 * i), lhs + 4 * i, rhs + 16 * i);
        for (; steps > 0; --steps, lhs += 4, rhs += 16) step<Rows>(acc, lhs, rhs);
    }
    template <int Rows>
    static VAC_INLINE void join_sums(float32x4_t acc[16]) {
        join_quarters<Rows>(acc);
    }

    template <int Rows>
    static VAC_INLINE void weights(const float *scores, Packed *out, int32_t tokens, Factor scale,
                                   float32x4_t exponents, float32x4_t &sum) {
        ExpScale e[Rows];
        float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
        for (int r = 0; r < Rows; ++r) e[r] = exp_scale(scale, spread(exponents, 4 * r));
        for (; tokens > 0; tokens -= 16, scores += 64, out += 64)
            for (int j = 0; j < 4; ++j) {
                float32x4_t v[4];
                for (int r = 0; r < 4; ++r) {
                    v[r] = r < Rows ? exp2_scores<kDegree>(vld1q_f32(scores + 16 * r + 4 * j), e[r < Rows ? r : 0])
                                    : vdupq_n_f32(0);
                    sums[r] = vaddq_f32(sums[r], v[r]);
                }
                transpose4(v);
                for (int i = 0; i < 4; i += 2)
                    vst1q_f16(out + 16 * j + 4 * i, vcvt_high_f16_f32(vcvt_f16_f32(v[i]), v[i + 1]));
            }
        sum = reduce_sum(sums);
    }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// What BFMMLA and SMMLA give: acc[8 p + c] = { r0 c0, r0 c1, r1 c0, r1 c1 } of
// row pair p, column pair c.
struct PairOrder {
    static constexpr int kMaxima = 2;  // registers of maximum()
    static int rows_used(int n) { return n <= 2 ? 2 : 4; }

    static VAC_INLINE float32x4_t spread(float32x4_t rows, int i) {
        return i < 8 ? vzip1q_f32(rows, rows) : vzip2q_f32(rows, rows);
    }
    static VAC_INLINE int32x4_t spread(int32x4_t rows, int i) {
        return i < 8 ? vzip1q_s32(rows, rows) : vzip2q_s32(rows, rows);
    }

    template <int Rows>
    static VAC_INLINE void maximum(float32x4_t maximum[4], const float32x4_t acc[16]) {
        for (int p = 0; p < Rows / 2; ++p) {
            const float32x4_t *v = acc + 8 * p;
            const float32x4_t low = vmaxq_f32(vmaxq_f32(v[0], v[1]), vmaxq_f32(v[2], v[3]));
            const float32x4_t high = vmaxq_f32(vmaxq_f32(v[4], v[5]), vmaxq_f32(v[6], v[7]));
            maximum[p] = vmaxq_f32(low, high);
        }
        if (Rows == 2) maximum[1] = maximum[0];
    }
    static VAC_INLINE float32x4_t reduce_maximum(const float32x4_t v[4]) { return vpmaxq_f32(v[0], v[1]); }
};

// BFMMLA: 2 rows x 4 of depth times 4 of depth x 2 columns.
// lhs [depth/4][2 row pairs][2 x 4], rhs [depth/4][8 column pairs][2 x 4].
//
//          b0  b1  ...  b7      one step: 8 loads of rhs, 2 of lhs, 16 BFMMLA
//   a0    [0] [1]  ... [7]      acc[8 p + c] = { r0 c0, r0 c1, r1 c0, r1 c1 }
//   a1    [8] [9]  ... [15]     of row pair p, column pair c
struct BfmmlaFormat : PairOrder {
    using Store = StoreBf16;
    using Element = uint16_t;
    using Cache = Element;
    using Packed = uint16_t;
    using Weight = Packed;
    using Wide = uint16_t;
    static constexpr Storage kStorage = Storage::kSame;
    static constexpr int32_t kStep = 4;
    static constexpr bool kPadsDepth = true, kHalves = true, kWidens = false;
    static constexpr int kDegree = 3;
    // Weights are cut to BF16 rather than rounded; as the sum is over the cut
    // ones, the mean loss cancels. It is 2^-8 / ln 2 / 2 for a mantissa
    // distributed as 1 / m, which a sink's weight, never stored, has to share.
    static constexpr float kWeightBias = 1.0f - 0.00281777f;

    // Of a panel's 8 column pairs of scores: 0 2 1 3 4 6 5 7.
    static VAC_INLINE int32x4_t position(int i) {
        static constexpr int32_t lanes[4] = {0, 1, 0, 1};
        static constexpr int32_t first[8] = {0, 4, 2, 6, 8, 12, 10, 14};
        return vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(first[i % 8]));
    }
    static void pack(const Element *const rows[4], uint32_t depth, Packed *out) {
        for (uint32_t k = 0; k < depth; k += 16, out += 64)
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t p = i % 2, h = i / 2;
                const uint64x2_t a = vreinterpretq_u64_u16(vld1q_u16(rows[2 * p] + k + 8 * h));
                const uint64x2_t b = vreinterpretq_u64_u16(vld1q_u16(rows[2 * p + 1] + k + 8 * h));
                vst1q_u16(out + 32 * h + 8 * p, vreinterpretq_u16_u64(vzip1q_u64(a, b)));
                vst1q_u16(out + 32 * h + 16 + 8 * p, vreinterpretq_u16_u64(vzip2q_u64(a, b)));
            }
    }

    static VAC_INLINE bfloat16x8_t load(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

    template <int Rows>
    static VAC_INLINE void step(float32x4_t acc[16], const Packed *lhs, const Element *rhs) {
        const bfloat16x8_t a0 = load(lhs);
        const bfloat16x8_t a1 = Rows > 2 ? load(lhs + 8) : a0;
        for (int c = 0; c < 8; ++c) {
            const bfloat16x8_t b = load(rhs + 8 * c);
            acc[c] = vbfmmlaq_f32(acc[c], a0, b);
            if (Rows > 2) acc[8 + c] = vbfmmlaq_f32(acc[8 + c], a1, b);
        }
    }

    template <int Rows>
    static VAC_INLINE void multiply(float32x4_t acc[16], const Packed *lhs, const Element *rhs, int32_t steps) {
        for (; steps >= 4; steps -= 4, lhs += 64, rhs += 256)
            for (int i = 0; i < 4; ++i) step<Rows>(acc + (Rows > 2 ? 0 : i % 2 * 8), lhs + 16 * i, rhs + 64 * i);
        for (; steps > 0; --steps, lhs += 16, rhs += 64) step<Rows>(acc, lhs, rhs);
    }
    // Even and odd steps of a single row pair add up apart: eight accumulators alone would wait for BFMMLA.
    template <int Rows>
    static VAC_INLINE void join_sums(float32x4_t acc[16]) {
        if (Rows > 2) return;
        for (int c = 0; c < 8; ++c) acc[c] = vaddq_f32(acc[c], acc[8 + c]);
    }

    // The first half of a panel's columns only, for the diagonal of a causal
    // mask. Even and odd steps add up apart here, too.
    template <int Rows>
    static VAC_INLINE void multiply_half(float32x4_t acc[16], const Packed *lhs, const Element *rhs, int32_t steps) {
        float32x4_t odd[8];
        for (int i = 0; i < 8; ++i) odd[i] = vdupq_n_f32(0);
        for (; steps > 0; steps -= 4, lhs += 64, rhs += 256)
            for (int i = 0; i < 4; ++i) {
                const bfloat16x8_t a0 = load(lhs + 16 * i);
                const bfloat16x8_t a1 = Rows > 2 ? load(lhs + 16 * i + 8) : a0;
                for (int c = 0; c < 4; ++c) {
                    const bfloat16x8_t b = load(rhs + 64 * i + 8 * c);
                    float32x4_t &first = i % 2 != 0 ? odd[c] : acc[c];
                    float32x4_t &second = i % 2 != 0 ? odd[4 + c] : acc[8 + c];
                    first = vbfmmlaq_f32(first, a0, b);
                    if (Rows > 2) second = vbfmmlaq_f32(second, a1, b);
                }
            }
        for (int c = 0; c < 4; ++c) {
            acc[c] = vaddq_f32(acc[c], odd[c]);
            acc[8 + c] = vaddq_f32(acc[8 + c], odd[4 + c]);
        }
    }

    // Eight registers of scores of a row pair become four operands. The upper
    // halves of two registers are { r0 r1 r0' r1' } in 32-bit units; zipping
    // two such gives { r0 r0 r1 r1 }, of adjacent tokens in K's order of pairs.
    template <int Rows>
    static VAC_INLINE void weights(const float *scores, Packed *out, int32_t tokens, Factor scale,
                                   float32x4_t exponents, float32x4_t &sum) {
        const bfloat16x8_t ones = vreinterpretq_bf16_u16(vdupq_n_u16(0x3F80));
        float32x4_t sums[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
        const WeightExp exp[2] = {WeightExp(scale, spread(exponents, 0)), WeightExp(scale, spread(exponents, 8))};
        const auto half_panel = [&](int h) VAC_INLINE_LAMBDA {
            for (int p = 0; p < Rows / 2; ++p) {
                uint16x8_t w[4];
                for (int c = 0; c < 4; ++c)
                    w[c] = vreinterpretq_u16_f32(exp[p](vld1q_f32(scores + 32 * p + 16 * h + 4 * c)));
                const uint32x4_t x = vreinterpretq_u32_u16(vuzp2q_u16(w[0], w[1]));
                const uint32x4_t y = vreinterpretq_u32_u16(vuzp2q_u16(w[2], w[3]));
                const uint16x8_t first = vreinterpretq_u16_u32(vzip1q_u32(x, y));
                const uint16x8_t second = vreinterpretq_u16_u32(vzip2q_u32(x, y));
                vst1q_u16(out + 32 * h + 8 * p, first);
                vst1q_u16(out + 32 * h + 16 + 8 * p, second);
                sums[p] = vbfmmlaq_f32(sums[p], vreinterpretq_bf16_u16(first), ones);
                sums[p] = vbfmmlaq_f32(sums[p], vreinterpretq_bf16_u16(second), ones);
            }
        };
        for (; tokens > 8; tokens -= 16, scores += 64, out += 64) {
            half_panel(0);
            half_panel(1);
        }
        if (tokens > 0) half_panel(0);
        sum = vuzp1q_f32(sums[0], sums[1]);
    }

    // Rounds to nearest; a tie, away from 0. A NaN, of BFMMLA's the default one,
    // stays one. RSHRN has two pipes of V2's four, BFCVTN a half of two others
    // that the stores need as well.
    static VAC_INLINE uint32x4_t narrow(float32x4_t low, float32x4_t high) {
        const uint16x4_t first = vrshrn_n_u32(vreinterpretq_u32_f32(low), 16);
        return vreinterpretq_u32_u16(vrshrn_high_n_u32(first, vreinterpretq_u32_f32(high), 16));
    }

    // Four registers of a row pair, narrowed: { r0 r1 r0' r1' } in 32-bit
    // units twice, which unzip into eight dimensions of either row.
    template <class S, int Rows>
    static VAC_INLINE void store_rows(const float32x4_t acc[16], Element *const rows[4], int num_rows,
                                      uint32_t column) {
        for (int p = 0; p < Rows / 2; ++p) {
            const float32x4_t *v = acc + 8 * p;
            for (int h = 0; h < 8; h += 4) {
                const uint32x4_t x = narrow(v[h], v[h + 1]), y = narrow(v[h + 2], v[h + 3]);
                vst1q_u16(rows[2 * p] + column + 2 * h, vreinterpretq_u16_u32(vuzp1q_u32(x, y)));
                if (2 * p + 1 < num_rows)
                    vst1q_u16(rows[2 * p + 1] + column + 2 * h, vreinterpretq_u16_u32(vuzp2q_u32(x, y)));
            }
        }
    }
};
using FormatBf16 = BfmmlaFormat;
using FormatF16 = FmlalFormat;
#else
using FormatBf16 = FmlaFormat<StoreBf16, 3>;
using FormatF16 = FmlaFormat<StoreF16, 4>;
#endif
using FormatF32 = FmlaFormat<StoreF32, 6>;

}  // namespace
}  // namespace vac::VAC_TIER_NS
