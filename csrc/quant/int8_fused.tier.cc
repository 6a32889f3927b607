// Producers of quantized rows: RMSNorm and gated activations. Their results are rounded to the dtype as the separate
// kernels round them, stay in L1 and are quantized from there.
#include "common/activation.h"
#include "common/rms_norm.h"
#include "quant/int8_kernels.h"
#include "quant/int8_layout.h"

namespace vac::VAC_TIER_NS {
namespace {

// Room for a row of any dtype.
inline size_t scratch_row(size_t k) { return round_up(k * sizeof(float), kWorkspaceAlign); }

inline char *aligned(void *workspace) {
    return reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(workspace), kWorkspaceAlign));
}

}  // namespace

void rms_norm_int8(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_rms_norm_int8_args *>(untyped);
    const auto m = static_cast<size_t>(args.num_tokens), k = static_cast<size_t>(args.hidden_size);
    char *scratch = aligned(args.workspace) + thread_index * 2 * scratch_row(k);
    with_norm_types(args, [&](auto type, auto weight_type, auto factor) {
        using Type = decltype(type);
        using WeightType = decltype(weight_type);
        using Element = typename Type::Element;
        const auto *weight = static_cast<const typename WeightType::Element *>(args.weight);
        const auto norm = [&](size_t token) {
            const auto t = static_cast<int64_t>(token);
            const Element *x = static_cast<const Element *>(args.x) + t * args.x_token_stride;
            Element *out = args.normed ? static_cast<Element *>(args.normed) + t * args.normed_token_stride
                                       : reinterpret_cast<Element *>(scratch + token % 2 * scratch_row(k));
            if (args.residual)
                add_norm_row<Type, WeightType, factor.value>(
                    out, x, static_cast<Element *>(args.residual) + t * args.residual_token_stride, weight,
                    args.hidden_size, args.eps);
            else
                norm_row<Type, WeightType, factor.value>(out, x, weight, args.hidden_size, args.eps);
            return out;
        };
        // A pair of rows a thread, or a row a thread if there are fewer than two each.
        const bool pairs = m >= 2 * size_t{thread_count};
        const Range mine = share(pairs ? ceil_div(m, 2) : m, thread_index, thread_count);
        const size_t rows = pairs ? 2 : 1;
        for (size_t token = rows * mine.begin; token < min_size(rows * mine.end, m); token += rows) {
            const Element *a = norm(token);
            if (pairs && token + 1 < m)
                int8_quantize_pair(args.quantization, args.dtype, a, norm(token + 1), args.rows, m, k, token);
            else
                int8_quantize_part(args.quantization, args.dtype, a, 0, k, int8_extremes(args.dtype, a, 0, k),
                                   args.rows, m, k, token);
        }
    });
}

namespace {

// How a row that is split over threads is put together: each thread has at most two parts of rows, its first and its
// last, and leaves their extremes in that order.
struct SplitRows {
    size_t units;  // of 64 columns, in a row
    size_t total;
    uint32_t thread_count;

    SplitRows(size_t num_tokens, size_t d, uint32_t count)
        : units(ceil_div(d, 64)), total(num_tokens * units), thread_count(count) {}

    Range units_of(uint32_t thread) const { return share(total, thread, thread_count); }
    size_t slot(uint32_t thread, size_t token) const { return token == units_of(thread).begin / units ? 0 : 1; }
};

// Of a thread: extremes of two parts, then two rows.
constexpr size_t kPartHeader = 64;
inline size_t thread_scratch(size_t d) { return kPartHeader + 2 * scratch_row(d); }

inline Int8Extremes *part_extremes(const vac_silu_and_mul_int8_args &args, uint32_t thread) {
    const auto d = static_cast<size_t>(args.d);
    return reinterpret_cast<Int8Extremes *>(aligned(args.workspace) + thread * thread_scratch(d));
}
inline char *part_row(const vac_silu_and_mul_int8_args &args, uint32_t thread, size_t slot) {
    const auto d = static_cast<size_t>(args.d);
    return aligned(args.workspace) + thread * thread_scratch(d) + kPartHeader + slot * scratch_row(d);
}

inline bool splits_rows(const vac_silu_and_mul_int8_args &args, uint32_t thread_count) {
    return static_cast<size_t>(args.num_tokens) < thread_count;
}

inline void quantize_row(const vac_silu_and_mul_int8_args &args, const void *row, size_t token) {
    const auto m = static_cast<size_t>(args.num_tokens), d = static_cast<size_t>(args.d);
    int8_quantize_part(args.quantization, args.dtype, row, 0, d, int8_extremes(args.dtype, row, 0, d), args.rows, m, d,
                       token);
}

}  // namespace

void silu_and_mul_int8(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_silu_and_mul_int8_args *>(untyped);
    const auto m = static_cast<size_t>(args.num_tokens), d = static_cast<size_t>(args.d);
    if (m == 0 || d == 0) return;
    with_activation(args.dtype, args.activation, [&](auto type, auto activation) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        const auto activate = [&](size_t token, int64_t begin, int64_t end, size_t slot) {
            const Element *gate =
                static_cast<const Element *>(args.x) + static_cast<int64_t>(token) * args.x_token_stride;
            auto *out = reinterpret_cast<Element *>(part_row(args, thread_index, slot));
            act_and_mul_columns<Type, decltype(activation)>(out, gate, gate + args.d, begin, end);
            return out;
        };
        if (!splits_rows(args, thread_count)) {
            const bool pairs = m >= 2 * size_t{thread_count};
            const Range mine = share(pairs ? ceil_div(m, 2) : m, thread_index, thread_count);
            const size_t rows = pairs ? 2 : 1;
            for (size_t token = rows * mine.begin; token < min_size(rows * mine.end, m); token += rows) {
                const Element *a = activate(token, 0, args.d, 0);
                if (pairs && token + 1 < m)
                    int8_quantize_pair(args.quantization, args.dtype, a, activate(token + 1, 0, args.d, 1), args.rows,
                                       m, d, token);
                else
                    quantize_row(args, a, token);
            }
            return;
        }
        const SplitRows split(m, d, thread_count);
        for_row_pieces(args.num_tokens, args.d, thread_index, thread_count,
                       [&](int64_t token, int64_t begin, int64_t end) {
                           const size_t slot = split.slot(thread_index, static_cast<size_t>(token));
                           const Element *out = activate(static_cast<size_t>(token), begin, end, slot);
                           part_extremes(args, thread_index)[slot] =
                               int8_extremes(args.dtype, out, static_cast<size_t>(begin), static_cast<size_t>(end));
                       });
    });
}

void silu_and_mul_int8_finish(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_silu_and_mul_int8_args *>(untyped);
    const auto m = static_cast<size_t>(args.num_tokens), d = static_cast<size_t>(args.d);
    if (m == 0 || d == 0 || !splits_rows(args, thread_count)) return;
    const SplitRows split(m, d, thread_count);
    for_row_pieces(args.num_tokens, args.d, thread_index, thread_count, [&](int64_t token, int64_t begin, int64_t end) {
        const auto row = static_cast<size_t>(token);
        Int8Extremes extremes = {0, 0};
        for (uint32_t t = 0; t < thread_count; ++t) {
            const Range units = split.units_of(t);
            if (units.begin == units.end || units.end <= row * split.units || units.begin >= (row + 1) * split.units)
                continue;
            const Int8Extremes part = part_extremes(args, t)[split.slot(t, row)];
            if (part.high > extremes.high) extremes.high = part.high;
            if (part.low > extremes.low) extremes.low = part.low;
        }
        int8_quantize_part(args.quantization, args.dtype, part_row(args, thread_index, split.slot(thread_index, row)),
                           static_cast<size_t>(begin), static_cast<size_t>(end), extremes, args.rows, m, d, row);
    });
}

}  // namespace vac::VAC_TIER_NS
