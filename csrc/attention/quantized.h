// Cache storage of one byte per element: INT8 with a scale per token and KV
// head, and FP8 E4M3.
//
// INT8 is multiplied as integers, exactly. Queries are quantized per row. A
// weight p of a token whose values have the scale v becomes round(p * v / unit),
// where the unit is a 2^-16th (tier dotprod: 2^-15th) of the largest v of the chunk,
// so that V's scales cost nothing in the product. It goes in as two operands, its
// low and its high byte. With one byte, all weights below 1/512 of a row's largest
// would be 0, which is most of a long context's where one token dominates: the output's
// error from this rounding alone, on random data with 4096 keys, is 0.5 to 2.2 % rms with
// one byte, 0.2 % with V converted and weights in BF16, 0.01 % (0.03 %) with two. INT8 keys
// and values themselves cost 0.8 %, INT8 queries raise that to 0.8 to 1.1 %.
//
// FP8 is converted, a panel at a time, to what the element type's format multiplies.
#pragma once

#include "attention/formats.h"

namespace vac::VAC_TIER_NS {
namespace {

// Symmetric: an element is scale * [-127, 127], and inverse is 1 / scale. Rows
// that are smaller than any that matter are 0.
struct Quantizer {
    float scale, inverse;
};

inline Quantizer quantizer(float largest) {
    if (largest < 0x1p-100f) return {0, 0};
    return {largest / 127.0f, 127.0f / largest};
}

// Magnitudes compare as integers do; a NaN is the largest.
template <class Store>
inline float largest_magnitude(const typename Store::Element *p, uint32_t size) {
    if constexpr (sizeof(typename Store::Element) == 2) {
        uint16x8_t most[2] = {vdupq_n_u16(0), vdupq_n_u16(0)};
        const auto *bits = reinterpret_cast<const uint16_t *>(p);
        for (uint32_t i = 0; i < size; i += 16)
            for (int j = 0; j < 2; ++j) most[j] = vmaxq_u16(most[j], vshlq_n_u16(vld1q_u16(bits + i + 8 * j), 1));
        const uint16_t first = static_cast<uint16_t>(vmaxvq_u16(vmaxq_u16(most[0], most[1])) >> 1);
        const uint16x4_t all = vdup_n_u16(first);
        if constexpr (Store::kDtype == VAC_BF16)
            return vgetq_lane_f32(vreinterpretq_f32_u32(vshll_n_u16(all, 16)), 0);
        else
            return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(all)), 0);
    } else {
        uint32x4_t most = vdupq_n_u32(0);
        for (uint32_t i = 0; i < size; i += 4)
            most = vmaxq_u32(most, vshlq_n_u32(vld1q_u32(reinterpret_cast<const uint32_t *>(p) + i), 1));
        return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(most) >> 1)), 0);
    }
}

// round(v * inverse), nearest even: the sum's low byte.
template <class Store>
VAC_INLINE int8x16_t quantize16(const typename Store::Element *p, float inverse) {
    float32x4_t v[4];
    Store::load8(p, v[0], v[1]);
    Store::load8(p + 8, v[2], v[3]);
    uint16x8_t w[4];
    for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_u16_f32(vfmaq_n_f32(vdupq_n_f32(12582912.0f), v[i], inverse));
    const uint16x8_t low = vuzp1q_u16(w[0], w[1]), high = vuzp1q_u16(w[2], w[3]);
    return vreinterpretq_s8_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
using Int8Order = PairOrder;
// Elements of depth that one lane of the matrix product takes: K panels are
// [head_size/group][16 tokens][group], V panels [tokens/group][16 dimensions][group].
constexpr int kInt8Group = 8;
#else
using Int8Order = FmlaOrder;
constexpr int kInt8Group = 4;
#endif

template <class StoreType>
struct Int8Base : Int8Order {
    using Store = StoreType;
    using Element = typename Store::Element;
    using Cache = int8_t;
    using Packed = int8_t;
    using Weight = uint16_t;
    using Wide = float;
    static constexpr Storage kStorage = Storage::kInt8;
    static constexpr bool kPadsDepth = false, kHalves = false, kWidens = false;
    static constexpr int kDegree = 4;
    static constexpr float kWeightBias = 1.0f;

    // 4 rows to [depth/group][4][group], and their scales. A row of zeros has a scale too.
    static void pack(const Element *const rows[4], uint32_t depth, Packed *out, float scales[4]) {
        for (int r = 0; r < 4; ++r) {
            const Quantizer q = quantizer(largest_magnitude<Store>(rows[r], depth));
            scales[r] = q.scale == 0.0f ? 1.0f : q.scale;
            for (uint32_t k = 0; k < depth; k += 16) {
                const int8x16_t v = quantize16<Store>(rows[r] + k, q.inverse);
                int8_t *to = out + 4 * k + kInt8Group * r;
                if constexpr (kInt8Group == 8) {
                    vst1_s8(to, vget_low_s8(v));
                    vst1_s8(to + 32, vget_high_s8(v));
                } else {
                    const int32x4_t lanes = vreinterpretq_s32_s8(v);
                    vst1q_lane_s32(reinterpret_cast<int32_t *>(to), lanes, 0);
                    vst1q_lane_s32(reinterpret_cast<int32_t *>(to + 16), lanes, 1);
                    vst1q_lane_s32(reinterpret_cast<int32_t *>(to + 32), lanes, 2);
                    vst1q_lane_s32(reinterpret_cast<int32_t *>(to + 48), lanes, 3);
                }
            }
        }
    }

    // Sums that start at the bits of 1.5 * 2^23 are, as floats, that number
    // plus the sum, while it stays below 2^22: up to a depth of 260. SCVTF has
    // a quarter of V2's pipes.
    static constexpr int32_t kMagicDepth = 256;
    static VAC_INLINE int32x4_t first_sum(int32_t depth) { return vdupq_n_s32(depth <= kMagicDepth ? 0x4B400000 : 0); }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// SMMLA: 2 rows x 8 of depth times 8 of depth x 2 columns.
//
// Scores: lhs [depth/8][2 row pairs][2 x 8], rhs [depth/8][8 column pairs][2 x 8], accumulators as BFMMLA's.
//
// Values: each row's low and high bytes are a pair of rows, lhs [tokens/8][4 rows][2 x 8]. The 16
// accumulators of 4 rows hold half a panel's columns, so that there are two passes over it:
//
//          b0   b1   b2   b3    one step of a half panel and 4 rows: 4 loads of rhs, 4 of lhs, 16 USMMLA
//   row 0  [0]  [1]  [2]  [3]   acc[4 r + c] = { low v0, low v1, high v0, high v1 }
//   ...                         of row r, column pair c
//   row 3 [12] [13] [14] [15]   (2 rows: all 8 pairs, acc[8 r + c])
template <class StoreType>
struct Int8Format : Int8Base<StoreType> {
    using Base = Int8Base<StoreType>;
    using typename Base::Element;
    using typename Base::Packed;
    using typename Base::Weight;
    static constexpr int32_t kStep = 8;
    // Units of the largest weight, which may come out 2^-13 above 1.
    static constexpr float kLargestWeight = 65280.0f;
    static constexpr int kScaleCopies = 2;

    static VAC_INLINE int32x4_t position(int i) {
        static constexpr int32_t lanes[4] = {0, 1, 0, 1};
        return vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(2 * (i % 8)));
    }

    template <int Rows>
    static VAC_INLINE void score_step(int32x4_t acc[16], const int8_t *lhs, const int8_t *rhs) {
        const int8x16_t a0 = vld1q_s8(lhs), a1 = Rows > 2 ? vld1q_s8(lhs + 16) : a0;
        for (int c = 0; c < 8; ++c) {
            const int8x16_t b = vld1q_s8(rhs + 16 * c);
            acc[c] = vmmlaq_s32(acc[c], a0, b);
            if (Rows > 2) acc[8 + c] = vmmlaq_s32(acc[8 + c], a1, b);
        }
    }

    // Scores of a panel times its tokens' scales; the rows' are left to the softmax.
    template <int Rows>
    static VAC_INLINE void score(float32x4_t out[16], const int8_t *lhs, const int8_t *rhs, int32_t depth,
                                 const float *scales) {
        int32x4_t acc[16];
        for (int i = 0; i < 16; ++i) acc[i] = Base::first_sum(depth);
        int32_t steps = depth / 8;
        for (; steps >= 4; steps -= 4, lhs += 128, rhs += 512)
            for (int i = 0; i < 4; ++i) score_step<Rows>(acc, lhs + 32 * i, rhs + 128 * i);
        for (; steps > 0; --steps, lhs += 32, rhs += 128) score_step<Rows>(acc, lhs, rhs);
        if (depth <= Base::kMagicDepth) {
            const float32x4_t magic = vdupq_n_f32(12582912.0f);
            for (int i = 0; i < 4 * Rows; ++i) out[i] = vsubq_f32(vreinterpretq_f32_s32(acc[i]), magic);
        } else {
            for (int i = 0; i < 4 * Rows; ++i) out[i] = vcvtq_f32_s32(acc[i]);
        }
        for (int c = 0; c < 8; c += 2) {
            const float32x4_t v = vld1q_f32(scales + 2 * c);
            const float32x4_t first = pair_low(v, v), second = pair_high(v, v);
            for (int p = 0; p < Rows / 2; ++p) {
                out[8 * p + c] = vmulq_f32(out[8 * p + c], first);
                out[8 * p + c + 1] = vmulq_f32(out[8 * p + c + 1], second);
            }
        }
    }

    // The scales of 16 tokens as `weights` reads them.
    static VAC_INLINE void store_scales(float *out, const float32x4_t v[4]) {
        for (int i = 0; i < 4; ++i) {
            vst1q_f32(out + 8 * i, pair_low(v[i], v[i]));
            vst1q_f32(out + 8 * i + 4, pair_high(v[i], v[i]));
        }
    }

    // Eight tokens of a row pair: four registers of 16-bit weights in 32, whose
    // halves, bytes and rows are unzipped in turn.
    template <int Rows>
    static VAC_INLINE void weights(const float *scores, Weight *out, int32_t tokens, float32x4_t factor,
                                   float32x4_t inverse, float32x4_t exponents, const float *scales, float32x4_t &sum) {
        float32x4_t sums[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
        const volatile float32x4_t magic = vdupq_n_f32(8388608.0f);
        const WeightExp exp[2] = {
            WeightExp(Base::spread(factor, 0), Base::spread(inverse, 0), Base::spread(exponents, 0)),
            WeightExp(Base::spread(factor, 8), Base::spread(inverse, 8), Base::spread(exponents, 8))};
        const auto half_panel = [&](int h) VAC_INLINE_LAMBDA {
            for (int p = 0; p < Rows / 2; ++p) {
                uint16x8_t w[4];
                for (int c = 0; c < 4; ++c) {
                    const float32x4_t e = exp[p](vld1q_f32(scores + 32 * p + 16 * h + 4 * c));
                    sums[p] = vaddq_f32(sums[p], e);
                    w[c] = vreinterpretq_u16_f32(vfmaq_f32(magic, e, vld1q_f32(scales + 16 * h + 4 * c)));
                }
                const uint8x16_t x = vreinterpretq_u8_u16(vuzp1q_u16(w[0], w[1]));
                const uint8x16_t y = vreinterpretq_u8_u16(vuzp1q_u16(w[2], w[3]));
                const uint16x8_t low = vreinterpretq_u16_u8(vuzp1q_u8(x, y));
                const uint16x8_t high = vreinterpretq_u16_u8(vuzp2q_u8(x, y));
                vst1q_u16(out + 32 * h + 16 * p, vuzp1q_u16(low, high));
                vst1q_u16(out + 32 * h + 16 * p + 8, vuzp2q_u16(low, high));
            }
        };
        for (; tokens > 8; tokens -= 16, scores += 64, scales += 32, out += 64) {
            half_panel(0);
            half_panel(1);
        }
        if (tokens > 0) half_panel(0);
        sum = vpaddq_f32(sums[0], sums[1]);
    }

    // A V panel is done in passes of so many columns.
    template <int Rows>
    static constexpr int kPassColumns = Rows > 2 ? 8 : 16;

    template <int Rows>
    static VAC_INLINE void value_step(int32x4_t acc[16], const Weight *lhs, const int8_t *rhs) {
        constexpr int kPairs = kPassColumns<Rows> / 2;
        uint8x16_t a[Rows];
        for (int r = 0; r < Rows; ++r) a[r] = vreinterpretq_u8_u16(vld1q_u16(lhs + 8 * r));
        for (int c = 0; c < kPairs; ++c) {
            const int8x16_t b = vld1q_s8(rhs + 16 * c);
            for (int r = 0; r < Rows; ++r) acc[kPairs * r + c] = vusmmlaq_s32(acc[kPairs * r + c], a[r], b);
        }
    }

    // rhs: the first of the pass's columns.
    template <int Rows>
    static VAC_INLINE void multiply_values(int32x4_t acc[16], const Weight *lhs, const int8_t *rhs, int32_t steps) {
        for (; steps >= 4; steps -= 4, lhs += 128, rhs += 512)
            for (int i = 0; i < 4; ++i) value_step<Rows>(acc, lhs + 32 * i, rhs + 128 * i);
        for (; steps > 0; --steps, lhs += 32, rhs += 128) value_step<Rows>(acc, lhs, rhs);
    }

    // The pass's part of the accumulators in their usual order: this one's index there,
    template <int Rows>
    static constexpr int index(int i, int pass) {
        return Rows > 2 ? 8 * (i / 4) + 4 * pass + i % 4 : i;
    }
    // and its value in units of 256. What the low bytes' sum loses is 1/508 of a step of V.
    template <int Rows>
    static VAC_INLINE float32x4_t combine(const int32x4_t acc[16], int i) {
        constexpr int kPairs = kPassColumns<Rows> / 2;
        const int32x4_t a = acc[2 * kPairs * (i / kPairs) + i % kPairs];
        const int32x4_t b = acc[2 * kPairs * (i / kPairs) + kPairs + i % kPairs];
        const int32x4_t low = vreinterpretq_s32_f32(pair_low(vreinterpretq_f32_s32(a), vreinterpretq_f32_s32(b)));
        const int32x4_t high = vreinterpretq_s32_f32(pair_high(vreinterpretq_f32_s32(a), vreinterpretq_f32_s32(b)));
        return vcvtq_f32_s32(vrsraq_n_s32(high, low, 8));
    }

    // Four registers of a row pair: eight columns of either row.
    template <class S>
    static VAC_INLINE void store_eight(const float32x4_t v[4], Element *const rows[4], int p, int num_rows,
                                       uint32_t column) {
        if constexpr (sizeof(Element) == 2 && S::kDtype == VAC_BF16) {
            const uint32x4_t x = BfmmlaFormat::narrow(v[0], v[1]), y = BfmmlaFormat::narrow(v[2], v[3]);
            vst1q_u16(rows[2 * p] + column, vreinterpretq_u16_u32(vuzp1q_u32(x, y)));
            if (2 * p + 1 < num_rows) vst1q_u16(rows[2 * p + 1] + column, vreinterpretq_u16_u32(vuzp2q_u32(x, y)));
        } else {
            S::store8(rows[2 * p] + column, pair_low(v[0], v[1]), pair_low(v[2], v[3]));
            if (2 * p + 1 < num_rows) S::store8(rows[2 * p + 1] + column, pair_high(v[0], v[1]), pair_high(v[2], v[3]));
        }
    }

    template <class S, int Rows>
    static VAC_INLINE void store_rows(const float32x4_t acc[16], Element *const rows[4], int num_rows,
                                      uint32_t column) {
        for (int p = 0; p < Rows / 2; ++p)
            for (int h = 0; h < 2; ++h) store_eight<S>(acc + 8 * p + 4 * h, rows, p, num_rows, column + 8 * h);
    }

    // A pass's registers as combine() numbers them.
    template <class S, int Rows>
    static VAC_INLINE void store_pass(const float32x4_t *v, Element *const rows[4], int num_rows, uint32_t column) {
        if constexpr (Rows > 2) {
            for (int p = 0; p < 2; ++p) store_eight<S>(v + 4 * p, rows, p, num_rows, column);
        } else {
            store_rows<S, 2>(v, rows, num_rows, column);
        }
    }
};
#else
// SDOT by element: 4 columns x 4 of depth times 4 of depth of one row.
//
// Scores: lhs [depth/4][4 rows][4], rhs [depth/4][16 tokens][4], accumulators as FMLA's.
//
// Values: lhs [tokens/16][4 rows][low, high][16], rhs [tokens/4][16 dimensions][4]. Bytes are signed, so
// that a weight has 15 bits; acc[columns/4 (2 r + byte) + j] holds row r, columns 4 j .. 4 j + 3.
template <class StoreType>
struct Int8Format : Int8Base<StoreType> {
    using Base = Int8Base<StoreType>;
    using typename Base::Element;
    using typename Base::Packed;
    using typename Base::Weight;
    static constexpr int32_t kStep = 16;
    static constexpr float kLargestWeight = 32512.0f;
    static constexpr int kScaleCopies = 1;

    template <int Rows>
    static VAC_INLINE void score(float32x4_t out[16], const int8_t *lhs, const int8_t *rhs, int32_t depth,
                                 const float *scales) {
        int32x4_t acc[16];
        for (int i = 0; i < 16; ++i) acc[i] = Base::first_sum(depth);
        for (int32_t k = 0; k < depth; k += 16, lhs += 64, rhs += 256)
            for (int i = 0; i < 4; ++i) {
                const int8x16_t a = vld1q_s8(lhs + 16 * i);
                for (int j = 0; j < 4; ++j) {
                    const int8x16_t b = vld1q_s8(rhs + 64 * i + 16 * j);
                    acc[j] = vdotq_laneq_s32(acc[j], b, a, 0);
                    if (Rows > 1) acc[4 + j] = vdotq_laneq_s32(acc[4 + j], b, a, 1);
                    if (Rows > 2) {
                        acc[8 + j] = vdotq_laneq_s32(acc[8 + j], b, a, 2);
                        acc[12 + j] = vdotq_laneq_s32(acc[12 + j], b, a, 3);
                    }
                }
            }
        if (depth <= Base::kMagicDepth) {
            const float32x4_t magic = vdupq_n_f32(12582912.0f);
            for (int i = 0; i < 4 * Rows; ++i) out[i] = vsubq_f32(vreinterpretq_f32_s32(acc[i]), magic);
        } else {
            for (int i = 0; i < 4 * Rows; ++i) out[i] = vcvtq_f32_s32(acc[i]);
        }
        for (int j = 0; j < 4; ++j) {
            const float32x4_t v = vld1q_f32(scales + 4 * j);
            for (int r = 0; r < Rows; ++r) out[4 * r + j] = vmulq_f32(out[4 * r + j], v);
        }
    }

    static VAC_INLINE void store_scales(float *out, const float32x4_t v[4]) {
        for (int i = 0; i < 4; ++i) vst1q_f32(out + 4 * i, v[i]);
    }

    template <int Rows>
    static VAC_INLINE void weights(const float *scores, Weight *out, int32_t tokens, float32x4_t factor,
                                   float32x4_t inverse, float32x4_t exponents, const float *scales, float32x4_t &sum) {
        float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
        // 128 more than the weight has the low byte, but for its highest bit, and carries into the high one.
        const volatile float32x4_t magic = vdupq_n_f32(8388608.0f + 128.0f);
        for (int r = 0; r < Rows; ++r) {
            const WeightExp exp(Base::spread(factor, 4 * r), Base::spread(inverse, 4 * r),
                                Base::spread(exponents, 4 * r));
            for (int32_t t = 0; t < tokens; t += 16) {
                uint16x8_t w[4];
                for (int j = 0; j < 4; ++j) {
                    const float32x4_t e = exp(vld1q_f32(scores + 4 * t + 16 * r + 4 * j));
                    sums[r] = vaddq_f32(sums[r], e);
                    w[j] = vreinterpretq_u16_f32(vfmaq_f32(magic, e, vld1q_f32(scales + t + 4 * j)));
                }
                const uint8x16_t x = vreinterpretq_u8_u16(vuzp1q_u16(w[0], w[1]));
                const uint8x16_t y = vreinterpretq_u8_u16(vuzp1q_u16(w[2], w[3]));
                Weight *to = out + 4 * t + 16 * r;
                vst1q_u16(to, vreinterpretq_u16_u8(veorq_u8(vuzp1q_u8(x, y), vdupq_n_u8(0x80))));
                vst1q_u16(to + 8, vreinterpretq_u16_u8(vuzp2q_u8(x, y)));
            }
        }
        sum = Base::reduce_sum(sums);
    }

    template <int Rows>
    static constexpr int kPassColumns = Rows > 2 ? 8 : 16;

    template <int Rows, int Group>
    static VAC_INLINE void value_group(int32x4_t acc[16], const int8x16_t *a, const int8_t *rhs) {
        constexpr int kVectors = kPassColumns<Rows> / 4;
        for (int j = 0; j < kVectors; ++j) {
            const int8x16_t b = vld1q_s8(rhs + 64 * Group + 16 * j);
            for (int i = 0; i < 2 * Rows; ++i)
                acc[kVectors * i + j] = vdotq_laneq_s32(acc[kVectors * i + j], b, a[i], Group);
        }
    }

    template <int Rows>
    static VAC_INLINE void multiply_values(int32x4_t acc[16], const Weight *lhs, const int8_t *rhs, int32_t steps) {
        for (; steps > 0; --steps, lhs += 64, rhs += 256) {
            int8x16_t a[2 * Rows];
            for (int i = 0; i < 2 * Rows; ++i) a[i] = vreinterpretq_s8_u16(vld1q_u16(lhs + 8 * i));
            value_group<Rows, 0>(acc, a, rhs);
            value_group<Rows, 1>(acc, a, rhs);
            value_group<Rows, 2>(acc, a, rhs);
            value_group<Rows, 3>(acc, a, rhs);
        }
    }

    template <int Rows>
    static constexpr int index(int i, int pass) {
        return Rows > 2 ? 4 * (i / 2) + 2 * pass + i % 2 : i;
    }
    template <int Rows>
    static VAC_INLINE float32x4_t combine(const int32x4_t acc[16], int i) {
        constexpr int kVectors = kPassColumns<Rows> / 4;
        const int first = 2 * kVectors * (i / kVectors) + i % kVectors;
        return vcvtq_f32_s32(vrsraq_n_s32(acc[first + kVectors], acc[first], 8));
    }

    template <class S, int Rows>
    static VAC_INLINE void store_pass(const float32x4_t *v, Element *const rows[4], int num_rows, uint32_t column) {
        if constexpr (Rows > 2) {
            for (int r = 0; r < Rows; ++r)
                if (r < num_rows) S::store8(rows[r] + column, v[2 * r], v[2 * r + 1]);
        } else {
            Base::template store_rows<S, Rows>(v, rows, num_rows, column);
        }
    }
};
#endif

// E4M3 without infinities: s eeee mmm, bias 7, NaN is s 1111 111.
VAC_INLINE float16x8_t f16_from_e4m3(uint8x8_t v) {
    const uint8x16_t bytes = vcombine_u8(v, vdup_n_u8(0));
    const int16x8_t x = vreinterpretq_s16_u8(vzip1q_u8(vdupq_n_u8(0), bytes));
    // FP16 has one exponent bit more; the product corrects the bias, and denormals come out normal.
    const uint16x8_t h = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(x, 1)), vdupq_n_u16(0xBFFF));
    const float16x8_t value = vmulq_f16(vreinterpretq_f16_u16(h), vreinterpretq_f16_u16(vdupq_n_u16(0x5C00)));
    const uint16x8_t nan = vceqq_u16(vshlq_n_u16(vreinterpretq_u16_s16(x), 1), vdupq_n_u16(0xFE00));
    return vreinterpretq_f16_u16(vorrq_u16(vreinterpretq_u16_f16(value), nan));
}

// Rounded to nearest even, saturating at 448, in the low byte of each lane.
VAC_INLINE uint32x4_t e4m3_from_f32(float32x4_t x) {
    const float32x4_t a = vminq_f32(vabsq_f32(x), vdupq_n_f32(448.0f));
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 20), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFFF)), odd), 20);
    const uint32x4_t normal = vsubq_u32(rounded, vdupq_n_u32(120 << 3));
    // Below 2^-6 in steps of 2^-9, the last place of 2^14.
    const uint32x4_t small = vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(a, vdupq_n_f32(16384.0f))),
                                       vreinterpretq_u32_f32(vdupq_n_f32(16384.0f)));
    uint32x4_t code = vbslq_u32(vcltq_f32(a, vdupq_n_f32(0x1p-6f)), small, normal);
    code = vbslq_u32(vceqq_f32(x, x), code, vdupq_n_u32(0x7F));
    return vorrq_u32(code, vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 24), vdupq_n_u32(0x80)));
}

// Panels in the order of the element type's format, of bytes.
template <class F>
struct Fp8Storage : F {
    using Cache = uint8_t;
    static constexpr Storage kStorage = Storage::kFp8;
    static constexpr bool kWidens = true;
};

template <class StoreType, int Degree>
struct Fp8Fmla : Fp8Storage<FmlaFormat<StoreType, Degree>> {
    static void widen(const uint8_t *panel, float *out, int32_t depth) {
        for (; depth > 0; --depth, panel += 16, out += 16) {
            const uint8x16_t v = vld1q_u8(panel);
            const float16x8_t low = f16_from_e4m3(vget_low_u8(v)), high = f16_from_e4m3(vget_high_u8(v));
            vst1q_f32(out, vcvt_f32_f16(vget_low_f16(low)));
            vst1q_f32(out + 4, vcvt_high_f32_f16(low));
            vst1q_f32(out + 8, vcvt_f32_f16(vget_low_f16(high)));
            vst1q_f32(out + 12, vcvt_high_f32_f16(high));
        }
    }
};

#if defined(__ARM_FEATURE_FP16_FML)
struct Fp8Fmlal : Fp8Storage<FmlalFormat> {
    using Wide = float16_t;
    static void widen(const uint8_t *panel, Wide *out, int32_t depth) {
        for (; depth > 0; --depth, panel += 16, out += 16) {
            const uint8x16_t v = vld1q_u8(panel);
            vst1q_f16(out, f16_from_e4m3(vget_low_u8(v)));
            vst1q_f16(out + 8, f16_from_e4m3(vget_high_u8(v)));
        }
    }
    template <int Rows>
    static VAC_INLINE void multiply_wide(float32x4_t acc[16], const Packed *lhs, const Wide *rhs, int32_t steps) {
        multiply<Rows>(acc, lhs, rhs, steps);
    }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct Fp8Bfmmla : Fp8Storage<BfmmlaFormat> {
    // The bits of BF16 are E4M3's, 4 further left and with 120 added to the exponent. What has the
    // exponent 0, which BFMMLA would take for 0, comes from a table.
    static void widen(const uint8_t *panel, Wide *out, int32_t depth) {
        static constexpr uint8_t low_table[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x20, 0x40, 0x60,
                                                  0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0};
        static constexpr uint8_t high_table[16] = {0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C,
                                                   0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C};
        const uint8x16_t lows = vld1q_u8(low_table), highs = vld1q_u8(high_table);
        const uint8x16_t magnitude = vdupq_n_u8(0x7F), bias = vdupq_n_u8(0x3C);
        for (; depth > 0; --depth, panel += 16, out += 16) {
            const uint8x16_t v = vld1q_u8(panel), t = vandq_u8(v, magnitude);
            const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(v, 4), lows, t);
            uint8x16_t high = vqtbx1q_u8(vsraq_n_u8(bias, t, 4), highs, t);
            high = vorrq_u8(high, vceqq_u8(t, magnitude));
            high = vbslq_u8(magnitude, high, v);
            vst1q_u16(out, vreinterpretq_u16_u8(vzip1q_u8(low, high)));
            vst1q_u16(out + 8, vreinterpretq_u16_u8(vzip2q_u8(low, high)));
        }
    }
    template <int Rows>
    static VAC_INLINE void multiply_wide(float32x4_t acc[16], const Packed *lhs, const Wide *rhs, int32_t steps) {
        multiply<Rows>(acc, lhs, rhs, steps);
    }
};
using Fp8Bf16 = Fp8Bfmmla;
using Fp8F16 = Fp8Fmlal;
#else
using Fp8Bf16 = Fp8Fmla<StoreBf16, 3>;
using Fp8F16 = Fp8Fmla<StoreF16, 4>;
#endif
using Fp8F32 = Fp8Fmla<StoreF32, 6>;

}  // namespace
}  // namespace vac::VAC_TIER_NS
