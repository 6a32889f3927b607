// How a dtype is stored: 4 elements at a time as FP32 and back.
// Included by .tier.cc files only; all of it is local to each of them.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "vac/base.h"

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

}  // namespace
