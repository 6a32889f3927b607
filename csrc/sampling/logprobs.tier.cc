// Logprobs of all tokens, and the likeliest few with a token's rank. The few are found as top-k's
// are: by a bound from the maxima of blocks, then a selection among what reaches it.
#include "vac/sampling.h"

#include "sampling/blocks.h"
#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

template <class Type>
void log_softmax_row(float *out, const typename Type::Element *logits, int64_t size) {
    const float largest = max_of<Type>(logits, size);
    if (!(__builtin_fabsf(largest) < kInfinity)) {
        for (int64_t i = 0; i < size; ++i) out[i] = __builtin_nanf("");
        return;
    }
    const float32x4_t shift = vdupq_n_f32(largest);
    double total = 0;
    for (int64_t begin = 0; begin < size;) {
        // FP32 sums stay short, so that their rounding does not grow with the vocabulary.
        const int64_t end = smaller(size, begin + 2048);
        float32x4_t sum[4];
        for (auto &v : sum) v = vdupq_n_f32(0);
        int64_t i = begin;
        for (; i + 16 <= end; i += 16)
            for (int j = 0; j < 2; ++j) {
                const F32x8 v = Type::load(logits + i + 8 * j);
                sum[2 * j] = vaddq_f32(sum[2 * j], exp_negative(vsubq_f32(v.lo, shift)));
                sum[2 * j + 1] = vaddq_f32(sum[2 * j + 1], exp_negative(vsubq_f32(v.hi, shift)));
            }
        for (; i < end; ++i)
            total +=
                static_cast<double>(vgetq_lane_f32(exp_negative(vdupq_n_f32(Type::value(logits[i]) - largest)), 0));
        total += static_cast<double>(vaddvq_f32(vaddq_f32(vaddq_f32(sum[0], sum[1]), vaddq_f32(sum[2], sum[3]))));
        begin = end;
    }
    const float32x4_t log_total = log_normal(vdupq_n_f32(static_cast<float>(total)));
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const F32x8 v = Type::load(logits + i);
        vst1q_f32(out + i, vsubq_f32(vsubq_f32(v.lo, shift), log_total));
        vst1q_f32(out + i + 4, vsubq_f32(vsubq_f32(v.hi, shift), log_total));
    }
    for (; i < size; ++i) out[i] = Type::value(logits[i]) - largest - vgetq_lane_f32(log_total, 0);
}

// A logprob and its token in one integer: larger ones first, of equal ones the lower token.
int64_t entry_of(float value, int64_t token) {
    return static_cast<int64_t>(key_of(value)) * (int64_t{1} << 32) + (INT32_MAX - token);
}
float value_of_entry(int64_t entry) { return value_of(static_cast<int32_t>(entry >> 32)); }
int64_t token_of_entry(int64_t entry) { return INT32_MAX - (entry & INT32_MAX); }

// Entries of what is not below `bound`; returns their number.
int64_t collect_entries(const Row &row, float bound, int64_t *entries) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.num_blocks; ++b) {
        if (row.maxima[b] < bound) continue;
        const int64_t end = smaller((b + 1) * kMaskBlock, row.size);
        for (int64_t i = b * kMaskBlock; i < end; ++i) {
            entries[count] = entry_of(row.logits[i], i);
            count += !(row.logits[i] < bound);
        }
    }
    return count;
}

// Moves the n largest of the entries, all different, to the front: partitions around a median of three.
void select_largest(int64_t *entries, int64_t count, int64_t n) {
    int64_t begin = 0, end = count;
    while (end - begin > 1) {
        const int64_t a = entries[begin], b = entries[begin + (end - begin) / 2], c = entries[end - 1];
        const int64_t low = a < b ? a : b, high = a < b ? b : a;
        const int64_t pivot = c < low ? low : c > high ? high : c;
        int64_t i = begin, j = end - 1;
        while (i <= j) {
            while (entries[i] > pivot) ++i;
            while (entries[j] < pivot) --j;
            if (i > j) break;
            const int64_t entry = entries[i];
            entries[i++] = entries[j];
            entries[j--] = entry;
        }
        // What is in front of i is no smaller than what is behind j.
        if (n <= j)
            end = j + 1;
        else if (n > i)
            begin = i;
        else
            return;
    }
}

void sift_down(int64_t *heap, int64_t size, int64_t i) {
    const int64_t entry = heap[i];
    for (int64_t child; (child = 2 * i + 1) < size; i = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
        if (!(heap[child] < entry)) break;
        heap[i] = heap[child];
    }
    heap[i] = entry;
}

// Descending: a heap with the smallest on top gives them away from the end on.
void sort_descending(int64_t *entries, int64_t count) {
    for (int64_t i = count / 2 - 1; i >= 0; --i) sift_down(entries, count, i);
    for (int64_t i = count - 1; i > 0; --i) {
        const int64_t least = entries[0];
        entries[0] = entries[i];
        entries[i] = least;
        sift_down(entries, i, 0);
    }
}

void top_row(const vac_top_logprobs_args &args, int64_t req, float *workspace) {
    Row row{const_cast<float *>(args.logprobs) + req * args.row_stride, args.vocab_size,
            mask_blocks_of(args.vocab_size), workspace, 0};
    auto *entries = reinterpret_cast<int64_t *>(workspace + padded_to_16(row.num_blocks));
    int32_t *out_tokens = args.out_tokens + req * (args.num_top + 1);
    float *out_logprobs = args.out_logprobs + req * (args.num_top + 1);

    const int64_t token = args.tokens[req];
    const bool exists = token >= 0 && token < row.size;
    const float own = exists ? row.logits[token] : __builtin_nanf("");
    out_tokens[0] = static_cast<int32_t>(token);
    out_logprobs[0] = own;
    args.out_ranks[req] = count_from(row.logits, row.size, own);
    const int64_t n = args.num_top;
    if (n <= 0) return;

    find_maxima(row);
    const float bound = row.largest == row.largest ? bound_of_top_k(row, n) : -kInfinity;
    const int64_t count = collect_entries(row, bound, entries);
    if (count > n) select_largest(entries, count, n);
    sort_descending(entries, n);
    for (int64_t i = 0; i < n; ++i) {
        out_tokens[1 + i] = static_cast<int32_t>(token_of_entry(entries[i]));
        out_logprobs[1 + i] = value_of_entry(entries[i]);
    }
}

}  // namespace

void log_softmax_rows(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_log_softmax_rows_args *>(untyped);
    if (args.vocab_size <= 0) return;
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *logits = static_cast<const typename Type::Element *>(args.logits);
        for (int64_t req = share.begin; req < share.end; ++req)
            log_softmax_row<Type>(args.out + req * args.out_row_stride, logits + req * args.logits_row_stride,
                                  args.vocab_size);
    });
}

void top_logprobs(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_top_logprobs_args *>(untyped);
    const auto slots = static_cast<uint32_t>(smaller(args.num_workspaces, thread_count));
    if (args.vocab_size <= 0 || args.num_top > args.vocab_size || thread_index >= slots) return;
    float *workspace = static_cast<float *>(args.workspace) + thread_index * top_logprobs_words(args.vocab_size);
    const Share share = share_of(args.num_reqs, thread_index, slots);
    for (int64_t req = share.begin; req < share.end; ++req) top_row(args, req, workspace);
}

}  // namespace vac::VAC_TIER_NS
