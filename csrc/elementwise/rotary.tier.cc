// Rotary embedding in place. A column's cosines and sines are loaded once per
// token and stay in registers while the heads go by.
#include "vac/elementwise.h"

#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

// One pair of vectors: (a, b) -> (a*c - b*s, b*c + a*s).
struct Pair {
    F32x8 a, b;
};
inline Pair rotate(Pair x, F32x8 cosine, F32x8 sine) {
    return {multiply_sub(x.a * cosine, x.b, sine), multiply_add(x.b * cosine, x.a, sine)};
}

// The first and the second eight of sixteen interleaved elements, of which a tail has 2 * count.
inline Full first_part(Full) { return {}; }
inline Full second_part(Full) { return {}; }
inline Tail first_part(Tail tail) { return {smaller(2 * tail.count, 8)}; }
inline Tail second_part(Tail tail) { return {larger(2 * tail.count - 8, 0)}; }

template <class Type, class Part>
inline Pair load_interleaved(const typename Type::Element *p, Part part) {
    const F32x8 u = load<Type>(p, first_part(part)), v = load<Type>(p + 8, second_part(part));
    return {{vuzp1q_f32(u.lo, u.hi), vuzp1q_f32(v.lo, v.hi)}, {vuzp2q_f32(u.lo, u.hi), vuzp2q_f32(v.lo, v.hi)}};
}

template <class Type, class Part>
inline void store_interleaved(typename Type::Element *p, Pair x, Part part) {
    store<Type>(p, {vzip1q_f32(x.a.lo, x.b.lo), vzip2q_f32(x.a.lo, x.b.lo)}, first_part(part));
    store<Type>(p + 8, {vzip1q_f32(x.a.hi, x.b.hi), vzip2q_f32(x.a.hi, x.b.hi)}, second_part(part));
}

template <class Type, class CacheType>
void rotate_heads(typename Type::Element *head, int64_t head_stride, int64_t num_heads,
                  const typename CacheType::Element *cos_sin, int64_t half, bool is_neox_style) {
    for_columns(0, half, [&](int64_t i, auto part) {
        const F32x8 cosine = load<CacheType>(cos_sin + i, part), sine = load<CacheType>(cos_sin + half + i, part);
        auto *p = head;
        if (is_neox_style) {
            for (int64_t h = 0; h < num_heads; ++h, p += head_stride) {
                const Pair x = rotate({load<Type>(p + i, part), load<Type>(p + half + i, part)}, cosine, sine);
                store<Type>(p + i, x.a, part);
                store<Type>(p + half + i, x.b, part);
            }
        } else {
            for (int64_t h = 0; h < num_heads; ++h, p += head_stride)
                store_interleaved<Type>(p + 2 * i, rotate(load_interleaved<Type>(p + 2 * i, part), cosine, sine), part);
        }
    });
}

template <class Type, class CacheType>
void rotate_tokens(const vac_rotary_args &args, uint32_t thread_index, uint32_t thread_count) {
    using Element = typename Type::Element;
    const int64_t num_kv_heads = args.key == nullptr ? 0 : args.num_kv_heads;
    // A token's query heads, then its key heads, are numbered through.
    const int64_t heads = args.num_heads + num_kv_heads;
    if (heads <= 0) return;
    const Share share = share_of(args.num_tokens * heads, thread_index, thread_count);
    int64_t token = share.begin / heads, first = share.begin % heads;
    for (int64_t left = share.end - share.begin; left > 0; ++token, first = 0) {
        const int64_t last = smaller(first + left, heads);
        left -= last - first;
        const int64_t position = args.positions[token];
        if (position < 0 || position >= args.max_position) continue;
        const auto *cos_sin =
            static_cast<const typename CacheType::Element *>(args.cos_sin_cache) + position * args.rot_dim;
        const int64_t query_end = smaller(last, args.num_heads);
        if (first < query_end)
            rotate_heads<Type, CacheType>(
                static_cast<Element *>(args.query) + token * args.query_token_stride + first * args.query_head_stride,
                args.query_head_stride, query_end - first, cos_sin, args.rot_dim / 2, args.is_neox_style != 0);
        const int64_t key_begin = larger(first, args.num_heads) - args.num_heads;
        const int64_t key_end = last - args.num_heads;
        if (key_begin < key_end)
            rotate_heads<Type, CacheType>(
                static_cast<Element *>(args.key) + token * args.key_token_stride + key_begin * args.key_head_stride,
                args.key_head_stride, key_end - key_begin, cos_sin, args.rot_dim / 2, args.is_neox_style != 0);
    }
}

}  // namespace

void rotary(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_rotary_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        if (args.cache_dtype == args.dtype)
            rotate_tokens<Type, Type>(args, thread_index, thread_count);
        else if (args.cache_dtype == VAC_F32)
            rotate_tokens<Type, F32>(args, thread_index, thread_count);
    });
}

}  // namespace vac::VAC_TIER_NS
