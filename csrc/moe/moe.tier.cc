// Choosing experts, sorting rows by expert, gpt-oss's activation, and adding the experts' outputs up by token.
#include "vac/moe.h"

#include "common/activation.h"
#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

inline int64_t expert_of(const vac_moe_sort_args &args, size_t token, size_t choice) {
    const size_t i = token * args.topk_ids_stride + choice;
    return args.ids_are_int64 ? static_cast<const int64_t *>(args.topk_ids)[i]
                              : static_cast<const int32_t *>(args.topk_ids)[i];
}

// (up + 1) * gate * sigmoid(alpha * gate) of four columns.
template <Precision kPrecision>
inline float32x4_t swiglu_oai(float32x4_t gate, float32x4_t up, float alpha, float limit) {
    const float32x4_t most = vdupq_n_f32(limit);
    gate = vminq_f32(gate, most);
    up = vmaxq_f32(vminq_f32(up, most), vdupq_n_f32(-limit));
    // Bounded before the product as well: -inf * 0 would be NaN.
    const float32x4_t least = vdupq_n_f32(kSigmoidMin<kPrecision>);
    gate = vmaxq_f32(gate, vdupq_n_f32(kSigmoidMin<kPrecision> / alpha));
    const float32x4_t s = sigmoid<kPrecision>(vmaxq_f32(vmulq_n_f32(gate, alpha), least));
    return vmulq_f32(vaddq_f32(up, vdupq_n_f32(1.0f)), vmulq_f32(gate, s));
}

// exp(x) for x <= 0; NaN stays NaN, what is below -87 is 0.
inline float32x4_t exp_of_difference(float32x4_t x) {
    const float32x4_t least = vdupq_n_f32(-87.0f);
    const float32x4_t y = exp_precise(vmaxq_f32(x, least));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, least)));
}

// The largest values of a row so far, in falling order, and where they were.
class Largest {
  public:
    explicit Largest(size_t count) : count_(count) {
        // An id that is higher than every other one: the least of what can be given out.
        for (size_t i = 0; i < count; ++i) {
            values_[i] = -__builtin_inff();
            ids_[i] = INT32_MAX;
        }
    }
    // What is not above this is not among them, once there are enough.
    float least() const { return values_[count_ - 1]; }
    bool is_full() const { return ids_[count_ - 1] != INT32_MAX; }
    // Ids come in rising order, so that of equal values the earlier one stays ahead.
    void insert(float value, int32_t id) {
        size_t i = count_ - 1;
        for (; i > 0 && (value > values_[i - 1] || ids_[i - 1] == INT32_MAX); --i) {
            values_[i] = values_[i - 1];
            ids_[i] = ids_[i - 1];
        }
        values_[i] = value;
        ids_[i] = id;
    }
    const float *values() const { return values_; }
    const int32_t *ids() const { return ids_; }

  private:
    size_t count_;
    float values_[VAC_MOE_MAX_TOP_K];
    int32_t ids_[VAC_MOE_MAX_TOP_K];
};

template <class Type>
inline void route_token(const vac_moe_route_args &args, size_t token) {
    const auto *logits = static_cast<const typename Type::Element *>(args.logits) + token * args.logits_stride;
    const auto experts = static_cast<int64_t>(args.num_experts);
    const auto top_k = static_cast<int64_t>(args.top_k);
    const float32x4_t least_of_all = vdupq_n_f32(-__builtin_inff());
    Largest largest(args.top_k);
    uint32x4_t numbers = vdupq_n_u32(~0u);
    for_columns(0, experts, [&](int64_t i, auto part) {
        F32x8 v = load<Type>(logits + i, part);
        const uint32x4_t lo = vceqq_f32(v.lo, v.lo), hi = vceqq_f32(v.hi, v.hi);
        numbers = vandq_u32(numbers, vandq_u32(lo, hi));
        v = {vbslq_f32(lo, v.lo, least_of_all), vbslq_f32(hi, v.hi, least_of_all)};
        const float32x4_t least = vdupq_n_f32(largest.least());
        const uint32x4_t above = vorrq_u32(vcgtq_f32(v.lo, least), vcgtq_f32(v.hi, least));
        if (largest.is_full() && vmaxvq_u32(above) == 0) return;
        float values[8];
        vst1q_f32(values, v.lo);
        vst1q_f32(values + 4, v.hi);
        for (int64_t j = 0, count = smaller(8, experts - i); j < count; ++j)
            if (!largest.is_full() || values[j] > largest.least())
                largest.insert(values[j], static_cast<int32_t>(i + j));
    });
    float *weights = args.topk_weights + token * args.top_k;
    const float32x4_t most = vdupq_n_f32(largest.values()[0]);
    F32x8 sums = {vdupq_n_f32(0), vdupq_n_f32(0)};
    const auto add = [&](F32x8 v, int64_t count) {
        v = {exp_of_difference(vsubq_f32(v.lo, most)), exp_of_difference(vsubq_f32(v.hi, most))};
        float values[8];
        vst1q_f32(values, v.lo);
        vst1q_f32(values + 4, v.hi);
        for (int64_t j = count; j < 8; ++j) values[j] = 0;
        sums = sums + F32x8{vld1q_f32(values), vld1q_f32(values + 4)};
        return F32x8{vld1q_f32(values), vld1q_f32(values + 4)};
    };
    F32x8 chosen[VAC_MOE_MAX_TOP_K / 8];
    const bool has_nan = vminvq_u32(numbers) == 0;
    for_columns(0, top_k, [&](int64_t i, auto part) {
        chosen[i / 8] = add(load<F32>(largest.values() + i, part), smaller(8, top_k - i));
    });
    if (!args.renormalize) {
        sums = {vdupq_n_f32(0), vdupq_n_f32(0)};
        for_columns(0, experts,
                    [&](int64_t i, auto part) { add(load<Type>(logits + i, part), smaller(8, experts - i)); });
    }
    const float sum = has_nan ? __builtin_nanf("") : vaddvq_f32(vaddq_f32(sums.lo, sums.hi));
    const float32x4_t divisor = vdupq_n_f32(sum);
    for_columns(0, top_k, [&](int64_t i, auto part) {
        const F32x8 v = chosen[i / 8];
        store<F32>(weights + i, {vdivq_f32(v.lo, divisor), vdivq_f32(v.hi, divisor)}, part);
    });
    for (int64_t i = 0; i < top_k; ++i) args.topk_ids[token * args.top_k + i] = largest.ids()[i];
}

}  // namespace

void moe_route(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_moe_route_args *>(untyped);
    const Share share = share_of(static_cast<int64_t>(args.num_tokens), thread_index, thread_count);
    with_dtype(args.dtype, [&](auto type) {
        for (int64_t token = share.begin; token < share.end; ++token)
            route_token<decltype(type)>(args, static_cast<size_t>(token));
    });
}

void moe_sort(const void *untyped, uint32_t thread_index, uint32_t) {
    if (thread_index != 0) return;
    const auto &args = *static_cast<const vac_moe_sort_args *>(untyped);
    const auto experts = static_cast<int64_t>(args.num_experts);
    int32_t *start = args.expert_start;
    for (int64_t e = 0; e <= experts; ++e) start[e] = 0;
    // Counts, each one place further: summed up they are where the next expert begins.
    for (size_t token = 0; token < args.num_tokens; ++token)
        for (size_t j = 0; j < args.top_k; ++j) {
            const int64_t e = expert_of(args, token, j);
            if (e >= 0 && e < experts) ++start[e + 1];
        }
    for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
    // Each expert's beginning counts up to its end, which is the next one's beginning: all move by one place.
    for (size_t token = 0; token < args.num_tokens; ++token)
        for (size_t j = 0; j < args.top_k; ++j) {
            const int64_t e = expert_of(args, token, j);
            const bool has_row = e >= 0 && e < experts;
            const int32_t row = has_row ? start[e]++ : -1;
            if (has_row) args.row_index[row] = static_cast<int32_t>(token);
            args.position[token * args.top_k + j] = row;
        }
    for (int64_t e = experts; e > 0; --e) start[e] = start[e - 1];
    start[0] = 0;
}

void moe_combine(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_moe_combine_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        with_dtype(args.out_dtype, [&](auto out_type) {
            using Out = decltype(out_type);
            for_row_pieces(static_cast<int64_t>(args.num_tokens), static_cast<int64_t>(args.hidden_size), thread_index,
                           thread_count, [&](int64_t token, int64_t begin, int64_t end) {
                               const float *weights =
                                   args.topk_weights + static_cast<size_t>(token) * args.topk_weights_stride;
                               const int32_t *position = args.position + static_cast<size_t>(token) * args.top_k;
                               auto *out = static_cast<typename Out::Element *>(args.out) +
                                           static_cast<size_t>(token) * args.out_stride;
                               for_columns(begin, end, [&](int64_t i, auto part) {
                                   F32x8 sum = {vdupq_n_f32(0), vdupq_n_f32(0)};
                                   for (size_t j = 0; j < args.top_k; ++j) {
                                       if (position[j] < 0) continue;
                                       const auto *row = static_cast<const typename Type::Element *>(args.rows) +
                                                         static_cast<size_t>(position[j]) * args.rows_stride;
                                       const float32x4_t weight = vdupq_n_f32(weights[j]);
                                       sum = multiply_add(sum, load<Type>(row + i, part), F32x8{weight, weight});
                                   }
                                   store<Out>(out + i, sum, part);
                               });
                           });
        });
    });
}

void moe_swiglu_oai(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_moe_swiglu_oai_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        for_row_pieces(static_cast<int64_t>(args.num_rows), static_cast<int64_t>(args.d), thread_index, thread_count,
                       [&](int64_t row, int64_t begin, int64_t end) {
                           const Element *gate =
                               static_cast<const Element *>(args.x) + static_cast<size_t>(row) * args.x_stride;
                           const Element *up = gate + args.d;
                           Element *out = static_cast<Element *>(args.out) + static_cast<size_t>(row) * args.out_stride;
                           for_columns(begin, end, [&](int64_t i, auto part) {
                               const F32x8 g = load<Type>(gate + i, part), u = load<Type>(up + i, part);
                               store<Type>(out + i,
                                           F32x8{swiglu_oai<Type::kPrecision>(g.lo, u.lo, args.alpha, args.limit),
                                                 swiglu_oai<Type::kPrecision>(g.hi, u.hi, args.alpha, args.limit)},
                                           part);
                           });
                       });
    });
}

}  // namespace vac::VAC_TIER_NS
