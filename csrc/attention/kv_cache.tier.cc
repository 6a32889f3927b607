// Writes keys and values into the paged cache (the layout is described in
// vac/attention.h), and finds the slots to write to.
//
// Four tokens in four adjacent slots, the case of a prefill, are transposed in
// registers and stored as whole vectors; a token alone goes in by itself.
#include <arm_neon.h>

#include <cstdint>

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
    uint32_t head_size, v_head_size, block_size;

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

    void four(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
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
    uint32_t head_size, v_head_size, block_size;

    void one(Element *page, uint32_t slot, const Element *key, const Element *value) const {
        Element *k = page + (slot & ~15u) * head_size + (slot & 15);
        for (uint32_t d = 0; d < head_size; ++d) k[16 * d] = key[d];
        copy_value(page, slot, value);
    }

    void four(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
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
    uint32_t head_size, v_head_size, block_size;

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

    void four(Element *page, uint32_t slot, const Element *key, int64_t key_stride, const Element *value,
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
    const Writer writer{args.head_size, args.v_head_size, args.block_size};
    const uint32_t heads = args.num_kv_heads;
    uint32_t parts = thread_count / greatest_common_divisor(heads, thread_count);
    if (parts > args.num_tokens) parts = args.num_tokens;
    const uint64_t items = static_cast<uint64_t>(heads) * parts;
    const uint64_t first = items * thread_index / thread_count, last = items * (thread_index + 1) / thread_count;
    using Element = typename Writer::Element;
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
            bool run = (slot & 3) == 0 && token + 4 <= args.num_tokens;
            for (uint32_t i = 1; run && i < 4; ++i) run = args.slot_mapping[token + i] == slot + i;
            Element *page = static_cast<Element *>(args.kv_cache) +
                            static_cast<int64_t>(block) * args.cache_block_stride + head_begin * args.cache_head_stride;
            const Element *key = static_cast<const Element *>(args.key) + token * args.key_token_stride +
                                 head_begin * args.key_head_stride;
            const Element *value = static_cast<const Element *>(args.value) + token * args.value_token_stride +
                                   head_begin * args.value_head_stride;
            for (uint32_t head = head_begin; head < head_end; ++head) {
                if (run)
                    writer.four(page, offset, key, args.key_token_stride, value, args.value_token_stride);
                else
                    writer.one(page, offset, key, value);
                page += args.cache_head_stride;
                key += args.key_head_stride;
                value += args.value_head_stride;
            }
            token += run ? 4 : 1;
        }
    }
}

}  // namespace

void kv_cache_write(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_kv_cache_write_args *>(args);
    switch (a.dtype) {
        case VAC_BF16:
            return write<WriterBf16>(a, thread_index, thread_count);
        case VAC_F16:
            return write<PlainWriter16>(a, thread_index, thread_count);
        default:
            return write<PlainWriter32>(a, thread_index, thread_count);
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
