// Writes keys and values into the paged cache (the layout is described in
// vac/attention.h), and finds the slots to write to.
//
// Four tokens in four adjacent slots (eight for SMMLA), the case of a prefill, are
// transposed in registers and stored as whole vectors; a token alone goes in by itself.
#include <arm_neon.h>

#include <cstdint>

#include "attention/quantized.h"
#include "common/dispatch.h"
#include "vac/attention.h"

namespace vac::VAC_TIER_NS {
namespace {

// {t0 t1 t2 t3} of two dimensions per register, from four rows of eight.
inline void transpose_4x8(const uint16x8_t t[4], uint16x8_t out[4]) {
    const uint16x8_t a = vzip1q_u16(t[0], t[2]), b = vzip1q_u16(t[1], t[3]);
    const uint16x8_t c = vzip2q_u16(t[0], t[2]), d = vzip2q_u16(t[1], t[3]);
    out[0] = vzip1q_u16(a, b);
    out[1] = vzip2q_u16(a, b);
    out[2] = vzip1q_u16(c, d);
    out[3] = vzip2q_u16(c, d);
}

// [depth][16] panels of 2-byte elements.
struct PlainWriter16 {
    using Element = uint16_t;
    using Cache = Element;
    static constexpr uint32_t kRun = 4;
    uint32_t head_size, v_head_size, block_size;
    explicit PlainWriter16(const vac_kv_cache_write_args &args)
        : head_size(args.head_size), v_head_size(args.v_head_size), block_size(args.block_size) {}

    void one(Element *page, uint32_t slot, const Element *key, const Element *value) const {
        Element *k = page + (slot & ~15u) * head_size + (slot & 15);
        for (uint32_t d = 0; d < head_size; d += 8) {
            const uint16x8_t v = vld1q_u16(key + d);
            vst1q_lane_u16(k + 16 * d, v, 0);
            vst1q_lane_u16(k + 16 * d + 16, v, 1);
            vst1q_lane_u16(k + 16 * d + 32, v, 2);
            vst1q_lane_u16(k + 16 * d + 48, v, 3);
            vst1q_lane_u16(k + 16 * d + 64, v, 4);
            vst1q_lane_u16(k + 16 * d + 80, v, 5);
            vst1q_lane_u16(k + 16 * d + 96, v, 6);
            vst1q_lane_u16(k + 16 * d + 112, v, 7);
        }
        copy_value(page, slot, value);
    }

    void run(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
             int64_t value_stride) const {
        Element *k = page + (slot & ~15u) * head_size + (slot & 15);
        for (uint32_t d = 0; d < head_size; d += 8) {
            uint16x8_t t[4], out[4];
            for (int i = 0; i < 4; ++i) t[i] = vld1q_u16(key + i * key_stride + d);
            transpose_4x8(t, out);
            for (uint32_t i = 0; i < 4; ++i) {
                vst1_u16(k + 16 * (d + 2 * i), vget_low_u16(out[i]));
                vst1_u16(k + 16 * (d + 2 * i + 1), vget_high_u16(out[i]));
            }
        }
        for (uint32_t i = 0; i < 4; ++i) copy_value(page, slot + i, value + i * value_stride);
    }

    void copy_value(Element *page, uint32_t slot, const Element *value) const {
        Element *v = page + block_size * head_size + 16 * slot;
        for (uint32_t d = 0; d < v_head_size; d += 16, v += 16 * block_size) {
            vst1q_u16(v, vld1q_u16(value + d));
            vst1q_u16(v + 8, vld1q_u16(value + d + 8));
        }
    }
};

// [depth][16] panels of 4-byte elements.
struct PlainWriter32 {
    using Element = uint32_t;
    using Cache = Element;
    static constexpr uint32_t kRun = 4;
    uint32_t head_size, v_head_size, block_size;
    explicit PlainWriter32(const vac_kv_cache_write_args &args)
        : head_size(args.head_size), v_head_size(args.v_head_size), block_size(args.block_size) {}

    void one(Element *page, uint32_t slot, const Element *key, const Element *value) const {
        Element *k = page + (slot & ~15u) * head_size + (slot & 15);
        for (uint32_t d = 0; d < head_size; ++d) k[16 * d] = key[d];
        copy_value(page, slot, value);
    }

    void run(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
             int64_t value_stride) const {
        Element *k = page + (slot & ~15u) * head_size + (slot & 15);
        for (uint32_t d = 0; d < head_size; d += 4) {
            uint32x4_t t[4];
            for (int i = 0; i < 4; ++i) t[i] = vld1q_u32(key + i * key_stride + d);
            const uint32x4_t a = vzip1q_u32(t[0], t[2]), b = vzip1q_u32(t[1], t[3]);
            const uint32x4_t c = vzip2q_u32(t[0], t[2]), e = vzip2q_u32(t[1], t[3]);
            vst1q_u32(k + 16 * d, vzip1q_u32(a, b));
            vst1q_u32(k + 16 * d + 16, vzip2q_u32(a, b));
            vst1q_u32(k + 16 * d + 32, vzip1q_u32(c, e));
            vst1q_u32(k + 16 * d + 48, vzip2q_u32(c, e));
        }
        for (uint32_t i = 0; i < 4; ++i) copy_value(page, slot + i, value + i * value_stride);
    }

    void copy_value(Element *page, uint32_t slot, const Element *value) const {
        Element *v = page + block_size * head_size + 16 * slot;
        for (uint32_t d = 0; d < v_head_size; d += 16, v += 16 * block_size)
            for (uint32_t i = 0; i < 16; i += 4) vst1q_u32(v + i, vld1q_u32(value + d + i));
    }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// [depth/4][8][2 x 4] panels.
struct BfmmlaWriter {
    using Element = uint16_t;
    using Cache = Element;
    static constexpr uint32_t kRun = 4;
    uint32_t head_size, v_head_size, block_size;
    explicit BfmmlaWriter(const vac_kv_cache_write_args &args)
        : head_size(args.head_size), v_head_size(args.v_head_size), block_size(args.block_size) {}

    // Pairs of tokens lie in the order 0 2 1 3 4 6 5 7.
    static uint32_t column(uint32_t slot) {
        const uint32_t pair = slot / 2 & 7;
        return (pair & 4) | (pair & 1) << 1 | (pair & 2) >> 1;
    }

    void one(Element *page, uint32_t slot, const Element *key, const Element *value) const {
        Element *k = page + (slot & ~15u) * head_size + 8 * column(slot) + 4 * (slot & 1);
        for (uint32_t d = 0; d < head_size; d += 8) {
            const uint16x8_t v = vld1q_u16(key + d);
            vst1_u16(k + 16 * d, vget_low_u16(v));
            vst1_u16(k + 16 * d + 64, vget_high_u16(v));
        }
        // One lane of each half of V's vectors: dimensions 2 i and 2 i + 1 of
        // a register of eight go to byte offsets 2 lane and 8 + 2 lane.
        uint8_t select[4][16];
        for (uint32_t i = 0; i < 4; ++i)
            for (uint32_t b = 0; b < 16; ++b) {
                const bool mine = (b & 7) / 2 == (slot & 3);
                select[i][b] = mine ? static_cast<uint8_t>(4 * i + 2 * (b / 8) + (b & 1)) : 0xFF;
            }
        uint8x16_t index[4];
        for (int i = 0; i < 4; ++i) index[i] = vld1q_u8(select[i]);
        Element *v = page + block_size * head_size + 16 * (slot & ~3u);
        for (uint32_t d = 0; d < v_head_size; d += 16, v += 16 * block_size)
            for (uint32_t h = 0; h < 2; ++h) {
                const uint8x16_t from = vreinterpretq_u8_u16(vld1q_u16(value + d + 8 * h));
                for (uint32_t i = 0; i < 4; ++i) {
                    Element *to = v + 32 * h + 8 * i;
                    vst1q_u8(reinterpret_cast<uint8_t *>(to),
                             vqtbx1q_u8(vreinterpretq_u8_u16(vld1q_u16(to)), from, index[i]));
                }
            }
    }

    void run(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
             int64_t value_stride) const {
        Element *k = page + (slot & ~15u) * head_size;
        Element *first = k + 8 * column(slot), *second = k + 8 * column(slot + 2);
        for (uint32_t d = 0; d < head_size; d += 8) {
            uint64x2_t t[4];
            for (int i = 0; i < 4; ++i) t[i] = vreinterpretq_u64_u16(vld1q_u16(key + i * key_stride + d));
            vst1q_u16(first + 16 * d, vreinterpretq_u16_u64(vzip1q_u64(t[0], t[1])));
            vst1q_u16(first + 16 * d + 64, vreinterpretq_u16_u64(vzip2q_u64(t[0], t[1])));
            vst1q_u16(second + 16 * d, vreinterpretq_u16_u64(vzip1q_u64(t[2], t[3])));
            vst1q_u16(second + 16 * d + 64, vreinterpretq_u16_u64(vzip2q_u64(t[2], t[3])));
        }
        Element *v = page + block_size * head_size + 16 * slot;
        for (uint32_t d = 0; d < v_head_size; d += 16, v += 16 * block_size)
            for (uint32_t h = 0; h < 2; ++h) {
                uint16x8_t t[4], out[4];
                for (int i = 0; i < 4; ++i) t[i] = vld1q_u16(value + i * value_stride + d + 8 * h);
                transpose_4x8(t, out);
                for (int i = 0; i < 4; ++i) vst1q_u16(v + 32 * h + 8 * i, out[i]);
            }
    }
};
using WriterBf16 = BfmmlaWriter;
#else
using WriterBf16 = PlainWriter16;
#endif

// Where an element lies in a page whose K panels are [head_size/group][16][group]
// and V panels [tokens/group][16][group]; with group 1, [depth][16].
struct PanelOrder {
    uint32_t group;
    bool swaps_pairs;  // of tokens, in K: 0 2 1 3 4 6 5 7
    uint32_t head_size, block_size;

    uint32_t key(uint32_t slot, uint32_t dim) const {
        uint32_t column = slot & 15;
        if (swaps_pairs) column = (column & 9) | (column & 2) << 1 | (column & 4) >> 1;
        return (slot & ~15u) * head_size + dim / group * 16 * group + column * group + dim % group;
    }
    uint32_t value(uint32_t slot, uint32_t dim) const {
        const uint32_t panel = dim / 16 * 16 * block_size;
        return block_size * head_size + panel + slot / group * 16 * group + dim % 16 * group + slot % group;
    }
};

// Of elements, and of E4M3 bytes, which lie as those of the type.
PanelOrder panel_order(int32_t format, int32_t dtype, uint32_t head_size, uint32_t block_size) {
    if (format == VAC_KV_INT8) return {kInt8Group, false, head_size, block_size};
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (dtype == VAC_BF16) return {4, true, head_size, block_size};
#endif
    (void)dtype;
    return {1, false, head_size, block_size};
}

// Sixteen bytes, `step` bytes apart.
inline void scatter_bytes(uint8_t *to, uint32_t step, uint8x16_t v) {
    vst1q_lane_u8(to, v, 0);
    vst1q_lane_u8(to + step, v, 1);
    vst1q_lane_u8(to + 2 * step, v, 2);
    vst1q_lane_u8(to + 3 * step, v, 3);
    vst1q_lane_u8(to + 4 * step, v, 4);
    vst1q_lane_u8(to + 5 * step, v, 5);
    vst1q_lane_u8(to + 6 * step, v, 6);
    vst1q_lane_u8(to + 7 * step, v, 7);
    vst1q_lane_u8(to + 8 * step, v, 8);
    vst1q_lane_u8(to + 9 * step, v, 9);
    vst1q_lane_u8(to + 10 * step, v, 10);
    vst1q_lane_u8(to + 11 * step, v, 11);
    vst1q_lane_u8(to + 12 * step, v, 12);
    vst1q_lane_u8(to + 13 * step, v, 13);
    vst1q_lane_u8(to + 14 * step, v, 14);
    vst1q_lane_u8(to + 15 * step, v, 15);
}

// Four times four bytes, `step` bytes apart.
inline void scatter_words(uint8_t *to, uint32_t step, uint8x16_t v) {
    const uint32x4_t words = vreinterpretq_u32_u8(v);
    vst1q_lane_u32(reinterpret_cast<uint32_t *>(to), words, 0);
    vst1q_lane_u32(reinterpret_cast<uint32_t *>(to + step), words, 1);
    vst1q_lane_u32(reinterpret_cast<uint32_t *>(to + 2 * step), words, 2);
    vst1q_lane_u32(reinterpret_cast<uint32_t *>(to + 3 * step), words, 3);
}

template <class Store>
struct Int8Writer {
    using Element = typename Store::Element;
    using Cache = uint8_t;
    static constexpr uint32_t kRun = kInt8Group;
    PanelOrder order;
    uint32_t head_size, v_head_size, block_size;

    explicit Int8Writer(const vac_kv_cache_write_args &args)
        : order(panel_order(VAC_KV_INT8, args.dtype, args.head_size, args.block_size)),
          head_size(args.head_size),
          v_head_size(args.v_head_size),
          block_size(args.block_size) {}

    float *scales(Cache *page) const {
        return reinterpret_cast<float *>(page + static_cast<size_t>(block_size) * (head_size + v_head_size));
    }

    void write_key(Cache *page, uint32_t slot, const Element *key) const {
        const Quantizer q = quantizer(largest_magnitude<Store>(key, head_size));
        scales(page)[slot] = q.scale;
        Cache *k = page + order.key(slot, 0);
        for (uint32_t d = 0; d < head_size; d += 16) {
            const uint8x16_t v = vreinterpretq_u8_s8(quantize16<Store>(key + d, q.inverse));
            if constexpr (kInt8Group == 8) {
                vst1_u8(k + 16 * d, vget_low_u8(v));
                vst1_u8(k + 16 * d + 128, vget_high_u8(v));
            } else {
                scatter_words(k + 16 * d, 64, v);
            }
        }
    }

    void one(Cache *page, uint32_t slot, const Element *key, const Element *value) const {
        write_key(page, slot, key);
        const Quantizer q = quantizer(largest_magnitude<Store>(value, v_head_size));
        scales(page)[block_size + slot] = q.scale;
        for (uint32_t d = 0; d < v_head_size; d += 16)
            scatter_bytes(page + order.value(slot, d), kInt8Group,
                          vreinterpretq_u8_s8(quantize16<Store>(value + d, q.inverse)));
    }

    void run(Cache *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
             int64_t value_stride) const {
        constexpr int kTokens = kInt8Group;
        for (int i = 0; i < kTokens; ++i) write_key(page, slot + i, key + i * key_stride);
        float inverse[kTokens];
        for (int i = 0; i < kTokens; ++i) {
            const Quantizer q = quantizer(largest_magnitude<Store>(value + i * value_stride, v_head_size));
            scales(page)[block_size + slot + i] = q.scale;
            inverse[i] = q.inverse;
        }
        for (uint32_t d = 0; d < v_head_size; d += 16) {
            uint8x16_t v[kTokens];
            for (int i = 0; i < kTokens; ++i)
                v[i] = vreinterpretq_u8_s8(quantize16<Store>(value + i * value_stride + d, inverse[i]));
            // Zipping tokens i and i + half of them: after log2 of them, each dimension has all tokens in order.
            for (int round = 1; round < kTokens; round *= 2) {
                uint8x16_t z[kTokens];
                for (int i = 0; i < kTokens / 2; ++i) {
                    z[2 * i] = vzip1q_u8(v[i], v[i + kTokens / 2]);
                    z[2 * i + 1] = vzip2q_u8(v[i], v[i + kTokens / 2]);
                }
                for (int i = 0; i < kTokens; ++i) v[i] = z[i];
            }
            Cache *to = page + order.value(slot, d);
            for (int i = 0; i < kTokens; ++i) vst1q_u8(to + 16 * i, v[i]);
        }
    }
};

template <class Store>
struct Fp8Writer {
    using Element = typename Store::Element;
    using Cache = uint8_t;
    static constexpr uint32_t kRun = 1;
    PanelOrder order;
    uint32_t head_size, v_head_size;
    float key_factor, value_factor;

    explicit Fp8Writer(const vac_kv_cache_write_args &args)
        : order(panel_order(VAC_KV_FP8_E4M3, args.dtype, args.head_size, args.block_size)),
          head_size(args.head_size),
          v_head_size(args.v_head_size),
          key_factor(args.k_scale != 0.0f ? 1.0f / args.k_scale : 1.0f),
          value_factor(args.v_scale != 0.0f ? 1.0f / args.v_scale : 1.0f) {}

    static uint8x16_t encode16(const Element *p, float factor) {
        float32x4_t v[4];
        Store::load8(p, v[0], v[1]);
        Store::load8(p + 8, v[2], v[3]);
        uint16x8_t w[4];
        for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_u16_u32(e4m3_from_f32(vmulq_n_f32(v[i], factor)));
        const uint16x8_t low = vuzp1q_u16(w[0], w[1]), high = vuzp1q_u16(w[2], w[3]);
        return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    }

    void one(Cache *page, uint32_t slot, const Element *key, const Element *value) const {
        for (uint32_t d = 0; d < head_size; d += 16) {
            const uint8x16_t v = encode16(key + d, key_factor);
            Cache *to = page + order.key(slot, d);
            if (order.group == 4)
                scatter_words(to, 64, v);
            else
                scatter_bytes(to, 16, v);
        }
        for (uint32_t d = 0; d < v_head_size; d += 16) {
            const uint8x16_t v = encode16(value + d, value_factor);
            Cache *to = page + order.value(slot, d);
            if (order.group == 4)
                scatter_bytes(to, 4, v);
            else
                vst1q_u8(to, v);
        }
    }

    void run(Cache *page, uint32_t slot, const Element *key, int64_t, const Element *value, int64_t) const {
        one(page, slot, key, value);
    }
};

uint32_t greatest_common_divisor(uint32_t a, uint32_t b) {
    while (b != 0) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// Threads own (KV head, class of 16-slot groups) pairs, so that no two write
// the same vector whatever the order of slots.
template <class Writer>
void write(const vac_kv_cache_write_args &args, uint32_t thread_index, uint32_t thread_count) {
    const Writer writer(args);
    const uint32_t heads = args.num_kv_heads;
    uint32_t parts = thread_count / greatest_common_divisor(heads, thread_count);
    if (parts > args.num_tokens) parts = args.num_tokens;
    const uint64_t items = static_cast<uint64_t>(heads) * parts;
    const uint64_t first = items * thread_index / thread_count, last = items * (thread_index + 1) / thread_count;
    using Element = typename Writer::Element;
    using Cache = typename Writer::Cache;
    constexpr uint32_t kRun = Writer::kRun;
    for (uint64_t item = first; item < last;) {
        const auto part = static_cast<uint32_t>(item / heads), head_begin = static_cast<uint32_t>(item % heads);
        const uint64_t left = last - item;
        const uint32_t head_end = left < heads - head_begin ? head_begin + static_cast<uint32_t>(left) : heads;
        item += head_end - head_begin;
        for (uint32_t token = 0; token < args.num_tokens;) {
            const int64_t slot = args.slot_mapping[token];
            if (slot < 0 || (parts > 1 && (static_cast<uint64_t>(slot) >> 4) % parts != part)) {
                ++token;
                continue;
            }
            const auto block = static_cast<uint64_t>(slot) / args.block_size;
            const auto offset = static_cast<uint32_t>(static_cast<uint64_t>(slot) - block * args.block_size);
            bool run = slot % kRun == 0 && token + kRun <= args.num_tokens;
            for (uint32_t i = 1; run && i < kRun; ++i) run = args.slot_mapping[token + i] == slot + i;
            Cache *page = static_cast<Cache *>(args.kv_cache) + static_cast<int64_t>(block) * args.cache_block_stride +
                          head_begin * args.cache_head_stride;
            const Element *key = static_cast<const Element *>(args.key) + token * args.key_token_stride +
                                 head_begin * args.key_head_stride;
            const Element *value = static_cast<const Element *>(args.value) + token * args.value_token_stride +
                                   head_begin * args.value_head_stride;
            for (uint32_t head = head_begin; head < head_end; ++head) {
                if (run)
                    writer.run(page, offset, key, args.key_token_stride, value, args.value_token_stride);
                else
                    writer.one(page, offset, key, value);
                page += args.cache_head_stride;
                key += args.key_head_stride;
                value += args.value_head_stride;
            }
            token += run ? kRun : 1;
        }
    }
}

template <class Bf16, class F16, class F32>
void write_type(const vac_kv_cache_write_args &args, uint32_t thread_index, uint32_t thread_count) {
    switch (args.dtype) {
        case VAC_BF16:
            return write<Bf16>(args, thread_index, thread_count);
        case VAC_F16:
            return write<F16>(args, thread_index, thread_count);
        default:
            return write<F32>(args, thread_index, thread_count);
    }
}

float load_element(const uint8_t *page, size_t index, int32_t format, int32_t dtype) {
    if (format == VAC_KV_INT8) return reinterpret_cast<const int8_t *>(page)[index];
    if (format == VAC_KV_FP8_E4M3)
        return vgetq_lane_f32(vcvt_f32_f16(vget_low_f16(f16_from_e4m3(vdup_n_u8(page[index])))), 0);
    switch (dtype) {
        case VAC_BF16: {
            const uint16x4_t v = vld1_dup_u16(reinterpret_cast<const uint16_t *>(page) + index);
            return vgetq_lane_f32(vreinterpretq_f32_u32(vshll_n_u16(v, 16)), 0);
        }
        case VAC_F16:
            return vgetq_lane_f32(vcvt_f32_f16(vld1_dup_f16(reinterpret_cast<const float16_t *>(page) + index)), 0);
        default:
            return reinterpret_cast<const float *>(page)[index];
    }
}

}  // namespace

void kv_cache_write(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_kv_cache_write_args *>(args);
    switch (a.cache_format) {
        case VAC_KV_INT8:
            return write_type<Int8Writer<StoreBf16>, Int8Writer<StoreF16>, Int8Writer<StoreF32>>(a, thread_index,
                                                                                                 thread_count);
        case VAC_KV_FP8_E4M3:
            return write_type<Fp8Writer<StoreBf16>, Fp8Writer<StoreF16>, Fp8Writer<StoreF32>>(a, thread_index,
                                                                                              thread_count);
        default:
            return write_type<WriterBf16, PlainWriter16, PlainWriter32>(a, thread_index, thread_count);
    }
}

void kv_cache_read(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_kv_cache_read_args *>(args);
    const auto begin = static_cast<uint32_t>(static_cast<uint64_t>(a.num_tokens) * thread_index / thread_count);
    const auto end = static_cast<uint32_t>(static_cast<uint64_t>(a.num_tokens) * (thread_index + 1) / thread_count);
    const PanelOrder order = panel_order(a.cache_format, a.dtype, a.head_size, a.block_size);
    const size_t element = a.cache_format != VAC_KV_SAME ? 1 : a.dtype == VAC_F32 ? 4 : 2;
    const bool fp8 = a.cache_format == VAC_KV_FP8_E4M3;
    for (uint32_t token = begin; token < end; ++token) {
        if (a.slot_mapping[token] < 0) continue;
        const auto slot = static_cast<uint64_t>(a.slot_mapping[token]);
        const auto block = static_cast<int64_t>(slot / a.block_size);
        const auto offset = static_cast<uint32_t>(slot % a.block_size);
        for (uint32_t head = 0; head < a.num_kv_heads; ++head) {
            const int64_t at = block * a.cache_block_stride + head * a.cache_head_stride;
            const uint8_t *page = static_cast<const uint8_t *>(a.kv_cache) + at * static_cast<int64_t>(element);
            float k_scale = fp8 && a.k_scale != 0.0f ? a.k_scale : 1.0f;
            float v_scale = fp8 && a.v_scale != 0.0f ? a.v_scale : 1.0f;
            if (a.cache_format == VAC_KV_INT8) {
                const size_t elements = static_cast<size_t>(a.block_size) * (a.head_size + a.v_head_size);
                const auto *scales = reinterpret_cast<const float *>(page + elements);
                k_scale = scales[offset];
                v_scale = scales[a.block_size + offset];
            }
            const size_t row = static_cast<size_t>(token) * a.num_kv_heads + head;
            if (a.key != nullptr)
                for (uint32_t d = 0; d < a.head_size; ++d)
                    a.key[row * a.head_size + d] =
                        k_scale * load_element(page, order.key(offset, d), a.cache_format, a.dtype);
            if (a.value != nullptr)
                for (uint32_t d = 0; d < a.v_head_size; ++d)
                    a.value[row * a.v_head_size + d] =
                        v_scale * load_element(page, order.value(offset, d), a.cache_format, a.dtype);
        }
    }
}

void slot_mapping(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_slot_mapping_args *>(args);
    const auto begin = static_cast<uint32_t>(static_cast<uint64_t>(a.num_tokens) * thread_index / thread_count);
    const auto end = static_cast<uint32_t>(static_cast<uint64_t>(a.num_tokens) * (thread_index + 1) / thread_count);
    uint32_t request = 0;
    for (uint32_t token = begin; token < end; ++token) {
        while (request < a.num_reqs && static_cast<uint32_t>(a.query_start_loc[request + 1]) <= token) ++request;
        if (request == a.num_reqs) {
            a.slot_mapping[token] = -1;
            continue;
        }
        const auto position = static_cast<uint64_t>(a.positions[token]);
        const uint64_t index = position / a.block_size;
        const int64_t block = a.block_table[request * a.block_table_stride + static_cast<int64_t>(index)];
        a.slot_mapping[token] = block * a.block_size + static_cast<int64_t>(position - index * a.block_size);
    }
}

}  // namespace vac::VAC_TIER_NS
