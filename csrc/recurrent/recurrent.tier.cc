// Gated delta nets: the convolution, what the recurrence is given, the recurrence.
#include "vac/recurrent.h"

#include "common/activation.h"
#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

constexpr int64_t kChannels = 64;
// Rows of a state that are worked on together: each key is read once for all of them.
constexpr size_t kRows = 8;
constexpr size_t kMaxKeySize = 256;

inline float sum(float32x4_t v) { return vaddvq_f32(v); }

// log(y) for y >= 1: an exponent, and log of what is left in [0.7, 1.5) as 2 atanh, by its series.
inline float32x4_t log_of(float32x4_t y) {
    const uint32x4_t bits = vsubq_u32(vreinterpretq_u32_f32(y), vdupq_n_u32(0x3F3504F3));  // sqrt(1/2)
    const float32x4_t exponent = vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(bits), 23));
    const float32x4_t m =
        vreinterpretq_f32_u32(vaddq_u32(vandq_u32(bits, vdupq_n_u32(0x7FFFFF)), vdupq_n_u32(0x3F3504F3)));
    const float32x4_t one = vdupq_n_f32(1.0f);
    const float32x4_t s = vdivq_f32(vsubq_f32(m, one), vaddq_f32(m, one)), s2 = vmulq_f32(s, s);
    float32x4_t p = fma(2.0f / 7, s2, vdupq_n_f32(2.0f / 9));
    p = fma(2.0f / 5, p, s2);
    p = fma(2.0f / 3, p, s2);
    p = fma(2.0f, p, s2);
    return vfmaq_f32(vmulq_f32(exponent, vdupq_n_f32(0.69314718f)), p, s);
}

// log(1 + exp(x)). Where exp(x) is small, 1 + exp(x) has lost it: there the series of log(1 + e) begins with e.
inline float32x4_t softplus(float32x4_t x) {
    const float32x4_t bounded = vmaxq_f32(vminq_f32(x, vdupq_n_f32(20.0f)), vdupq_n_f32(-87.0f));
    const float32x4_t e = exp_precise(bounded), one = vdupq_n_f32(1.0f);
    const float32x4_t small = vmulq_f32(e, vfmsq_f32(one, e, vdupq_n_f32(0.5f)));
    float32x4_t result = vbslq_f32(vcltq_f32(e, vdupq_n_f32(0x1p-11f)), small, log_of(vaddq_f32(one, e)));
    result = vbslq_f32(vcgtq_f32(x, vdupq_n_f32(20.0f)), x, result);
    // A NaN stays one.
    return vbslq_f32(vceqq_f32(x, x), result, x);
}

template <class Type, size_t kWidth>
void conv_channels(const vac_causal_conv_args &args, size_t request, int64_t begin, int64_t end) {
    using Element = typename Type::Element;
    const int32_t first = args.requests.query_start_loc[request], last = args.requests.query_start_loc[request + 1];
    Element *state =
        static_cast<Element *>(args.state) + static_cast<size_t>(args.requests.slots[request]) * args.state_slot_stride;
    const Element *x = static_cast<const Element *>(args.x);
    Element *out = static_cast<Element *>(args.out);
    for_columns(begin, end, [&](int64_t c, auto part) {
        const float32x4_t zero = vdupq_n_f32(0);
        F32x8 past[kWidth - 1], weight[kWidth], bias = {zero, zero};
        for (size_t j = 0; j + 1 < kWidth; ++j) {
            past[j] = F32x8{zero, zero};
            if (args.requests.has_state[request]) past[j] = load<Type>(state + j * args.state_row_stride + c, part);
        }
        for (size_t j = 0; j < kWidth; ++j)
            weight[j] = load<F32>(args.weight + j * args.channels + static_cast<size_t>(c), part);
        if (args.bias != nullptr) bias = load<F32>(args.bias + c, part);
        for (int32_t t = first; t < last; ++t) {
            const F32x8 now = load<Type>(x + static_cast<size_t>(t) * args.x_stride + c, part);
            F32x8 y = bias;
            for (size_t j = 0; j + 1 < kWidth; ++j) y = multiply_add(y, past[j], weight[j]);
            y = multiply_add(y, now, weight[kWidth - 1]);
            const F32x8 activated = {Silu::apply<Type::kPrecision>(y.lo), Silu::apply<Type::kPrecision>(y.hi)};
            store<Type>(out + static_cast<size_t>(t) * args.out_stride + c, activated, part);
            for (size_t j = 0; j + 2 < kWidth; ++j) past[j] = past[j + 1];
            past[kWidth - 2] = now;
        }
        for (size_t j = 0; j + 1 < kWidth; ++j) store<Type>(state + j * args.state_row_stride + c, past[j], part);
    });
}

// x of `size` elements, divided by its length and by `scale`.
template <class Type>
void to_unit_length(float *out, const typename Type::Element *x, size_t size, float scale) {
    const float32x4_t zero = vdupq_n_f32(0);
    F32x8 squares = {zero, zero};
    for (size_t i = 0; i < size; i += 8) squares = Type::add_squares(squares, x + i);
    const float length = __builtin_sqrtf(sum(vaddq_f32(squares.lo, squares.hi)) + 1e-6f);
    const float32x4_t factor = vdupq_n_f32(scale / length);
    for (size_t i = 0; i < size; i += 8) F32::store(out + i, Type::load(x + i) * factor);
}

// kRows rows of a head's state through all tokens of a request.
template <class Type, class State>
void rows_of_state(const vac_gated_delta_args &args, size_t request, size_t head, size_t row) {
    using Element = typename Type::Element;
    const size_t k_dim = args.k_dim, first = static_cast<size_t>(args.requests.query_start_loc[request]),
                 last = static_cast<size_t>(args.requests.query_start_loc[request + 1]);
    auto *stored = static_cast<typename State::Element *>(args.state) +
                   static_cast<size_t>(args.requests.slots[request]) * args.state_slot_stride +
                   (head * args.v_dim + row) * k_dim;
    float state[kRows * kMaxKeySize];
    for (size_t i = 0; i < kRows * k_dim; i += 8) {
        const float32x4_t zero = vdupq_n_f32(0);
        F32::store(state + i, args.requests.has_state[request] ? State::load(stored + i) : F32x8{zero, zero});
    }
    const size_t key_head = head / (args.num_v_heads / args.num_k_heads);
    const float *direction = args.directions + (first * args.num_k_heads + key_head) * 2 * k_dim;
    const float *gates = args.gates + (first * args.num_v_heads + head) * 2;
    const Element *value =
        static_cast<const Element *>(args.value) + first * args.value_stride + head * args.v_dim + row;
    Element *out = static_cast<Element *>(args.out) + first * args.out_stride + head * args.v_dim + row;
    for (size_t t = first; t < last; ++t) {
        const float *query = direction, *key = direction + k_dim;
        const float32x4_t decay = vdupq_n_f32(gates[0]), zero = vdupq_n_f32(0);
        float32x4_t dot[kRows], read[kRows];
        for (size_t r = 0; r < kRows; ++r) dot[r] = read[r] = zero;
        for (size_t i = 0; i < k_dim; i += 4) {
            const float32x4_t k = vld1q_f32(key + i);
            for (size_t r = 0; r < kRows; ++r) dot[r] = vfmaq_f32(dot[r], vld1q_f32(state + r * k_dim + i), k);
        }
        // What the state is to be corrected by, for each row: step size * (value - decay * (S k)).
        const F32x8 known = {
            vpaddq_f32(vpaddq_f32(dot[0], dot[1]), vpaddq_f32(dot[2], dot[3])),
            vpaddq_f32(vpaddq_f32(dot[4], dot[5]), vpaddq_f32(dot[6], dot[7])),
        };
        const F32x8 correction = multiply_sub(Type::load(value), known, F32x8{decay, decay}) * vdupq_n_f32(gates[1]);
        float corrections[kRows];
        F32::store(corrections, correction);
        for (size_t i = 0; i < k_dim; i += 4) {
            const float32x4_t k = vld1q_f32(key + i), q = vld1q_f32(query + i);
            for (size_t r = 0; r < kRows; ++r) {
                float *at = state + r * k_dim + i;
                const float32x4_t s = vfmaq_n_f32(vmulq_f32(vld1q_f32(at), decay), k, corrections[r]);
                vst1q_f32(at, s);
                read[r] = vfmaq_f32(read[r], s, q);
            }
        }
        Type::store(out, F32x8{vpaddq_f32(vpaddq_f32(read[0], read[1]), vpaddq_f32(read[2], read[3])),
                               vpaddq_f32(vpaddq_f32(read[4], read[5]), vpaddq_f32(read[6], read[7]))});
        direction += args.num_k_heads * 2 * k_dim;
        gates += args.num_v_heads * 2;
        value += args.value_stride;
        out += args.out_stride;
    }
    for (size_t i = 0; i < kRows * k_dim; i += 8) State::store(stored + i, F32::load(state + i));
}

}  // namespace

void causal_conv(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_causal_conv_args *>(untyped);
    const auto channels = static_cast<int64_t>(args.channels);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        static_assert(kChannels == 64, "for_row_pieces cuts at multiples of 64");
        for_row_pieces(static_cast<int64_t>(args.requests.num_requests), channels, thread_index, thread_count,
                       [&](int64_t row, int64_t begin, int64_t end) {
                           const auto request = static_cast<size_t>(row);
                           if (args.requests.slots[request] < 0) return;
                           if (args.width == 2) conv_channels<Type, 2>(args, request, begin, end);
                           if (args.width == 3) conv_channels<Type, 3>(args, request, begin, end);
                           if (args.width == 4) conv_channels<Type, 4>(args, request, begin, end);
                       });
    });
}

void delta_inputs(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_delta_inputs_args *>(untyped);
    const Share share = share_of(static_cast<int64_t>(args.num_tokens), thread_index, thread_count);
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(args.k_dim));
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        for (auto token = static_cast<size_t>(share.begin); token < static_cast<size_t>(share.end); ++token) {
            const Element *queries = static_cast<const Element *>(args.x) + token * args.x_stride;
            const Element *keys = queries + args.num_k_heads * args.k_dim;
            float *directions = args.directions + token * args.num_k_heads * 2 * args.k_dim;
            for (size_t head = 0; head < args.num_k_heads; ++head) {
                to_unit_length<Type>(directions + head * 2 * args.k_dim, queries + head * args.k_dim, args.k_dim,
                                     scale);
                to_unit_length<Type>(directions + (head * 2 + 1) * args.k_dim, keys + head * args.k_dim, args.k_dim,
                                     1.0f);
            }
            const Element *a = static_cast<const Element *>(args.a) + token * args.a_stride;
            const Element *b = static_cast<const Element *>(args.b) + token * args.b_stride;
            float *gates = args.gates + token * args.num_v_heads * 2;
            for_columns(0, static_cast<int64_t>(args.num_v_heads), [&](int64_t head, auto part) {
                const F32x8 time = load<Type>(a + head, part) + load<F32>(args.dt_bias + head, part);
                const F32x8 rate = load<F32>(args.rate + head, part), step = load<Type>(b + head, part);
                const float32x4_t least = vdupq_n_f32(-87.0f);
                const F32x8 decay = {exp_precise(vmaxq_f32(vmulq_f32(rate.lo, softplus(time.lo)), least)),
                                     exp_precise(vmaxq_f32(vmulq_f32(rate.hi, softplus(time.hi)), least))};
                const F32x8 size = {sigmoid<Precision::kF32>(vmaxq_f32(step.lo, least)),
                                    sigmoid<Precision::kF32>(vmaxq_f32(step.hi, least))};
                float both[16];
                F32::store(both, decay);
                F32::store(both + 8, size);
                const int64_t count = smaller(8, static_cast<int64_t>(args.num_v_heads) - head);
                for (int64_t i = 0; i < count; ++i) {
                    gates[2 * (head + i)] = both[i];
                    gates[2 * (head + i) + 1] = both[8 + i];
                }
            });
        }
    });
}

void gated_delta(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gated_delta_args *>(untyped);
    const auto pieces = static_cast<int64_t>(args.num_v_heads * (args.v_dim / kRows));
    if (pieces == 0) return;
    const Share share = share_of(static_cast<int64_t>(args.requests.num_requests) * pieces, thread_index, thread_count);
    with_dtype(args.dtype, [&](auto type) {
        with_dtype(args.state_dtype, [&](auto state_type) {
            for (int64_t i = share.begin; i < share.end; ++i) {
                const auto request = static_cast<size_t>(i / pieces), piece = static_cast<size_t>(i % pieces);
                if (args.requests.slots[request] < 0) continue;
                const size_t head = piece / (args.v_dim / kRows), row = piece % (args.v_dim / kRows) * kRows;
                rows_of_state<decltype(type), decltype(state_type)>(args, request, head, row);
            }
        });
    });
}

}  // namespace vac::VAC_TIER_NS
