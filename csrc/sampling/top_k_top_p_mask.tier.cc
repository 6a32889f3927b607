// Min-p, top-k and top-p without sorting the vocabulary.
//
// 1. The maximum of every block of 64 logits: one load and one FMAX for four logits.
// 2. A bound below the threshold. Min-p is one by itself. For top-k: k blocks have a maximum of at least the
//    k-th largest block maximum, so the k-th largest logit is no smaller. For
//    top-p alone: all logits below the bound together weigh less than 1 - p.
// 3. Candidates: the logits that reach the bound, from the blocks that reach it; in
//    practice tens to thousands. The threshold is searched among them by
//    partitioning (Hoare's quickselect, by rank or by accumulated weight).
// 4. Blocks below the threshold are filled with -inf unseen, the others compared.
#include "vac/sampling.h"

#include "sampling/blocks.h"
#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

// Below this many candidates, sorting them is cheaper than partitioning.
constexpr int64_t kSortSize = 32;

// What is masked: values below `threshold`, and the first `num_ties` that equal it.
struct Cut {
    float threshold;
    int64_t num_ties;
};

// Keys of the logits that are at least `bound` and not -inf; returns their number.
int64_t collect(const Row &row, float bound, int32_t *keys) {
    if (bound == -kInfinity) bound = -__FLT_MAX__;
    int64_t count = 0;
    for (int64_t b = 0; b < row.num_blocks; ++b) {
        if (row.maxima[b] < bound) continue;
        const int64_t end = smaller((b + 1) * kMaskBlock, row.size);
        int64_t i = b * kMaskBlock;
        for (; i + 8 <= end; i += 8) {
            const float32x4_t u = vld1q_f32(row.logits + i), v = vld1q_f32(row.logits + i + 4);
            if (vmaxvq_f32(max(u, v)) < bound) continue;
            if (vminvq_f32(vminq_f32(u, v)) >= bound) {
                vst1q_s32(keys + count, keys_of(u));
                vst1q_s32(keys + count + 4, keys_of(v));
                count += 8;
                continue;
            }
            for (int64_t j = i; j < i + 8; ++j) {
                keys[count] = key_of(row.logits[j]);
                count += row.logits[j] >= bound;
            }
        }
        for (; i < end; ++i) {
            keys[count] = key_of(row.logits[i]);
            count += row.logits[i] >= bound;
        }
    }
    return count;
}

struct Range {
    int32_t low, high;
};
Range range_of(const int32_t *keys, int64_t count) {
    Range range{keys[0], keys[0]};
    for (int64_t i = 1; i < count; ++i) {
        range.low = keys[i] < range.low ? keys[i] : range.low;
        range.high = keys[i] > range.high ? keys[i] : range.high;
    }
    return range;
}

// A pivot above range.low and at most range.high, so that both parts are smaller:
// the median of three on even steps; halving the range on odd ones bounds the steps.
int32_t choose_pivot(const int32_t *keys, int64_t count, Range range, int step) {
    const auto middle = static_cast<int32_t>(range.low + (static_cast<int64_t>(range.high) - range.low + 1) / 2);
    if (step % 2 != 0) return middle;
    const int32_t a = keys[count / 4], b = keys[count / 2], c = keys[count - 1 - count / 4];
    const int32_t low = a < b ? a : b, high = a < b ? b : a;
    const int32_t median = c < low ? low : c > high ? high : c;
    return median > range.low ? median : middle;
}

// Descending order.
void insertion_sort(int32_t *keys, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const int32_t key = keys[i];
        int64_t j = i;
        for (; j > 0 && keys[j - 1] < key; --j) keys[j] = keys[j - 1];
        keys[j] = key;
    }
}

int64_t keep(int32_t *keys, int64_t count, int32_t pivot, bool upper) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t key = keys[i];
        keys[kept] = key;
        kept += (key >= pivot) == upper;
    }
    return kept;
}

// The k-th largest of the keys, which are reordered and partly overwritten.
int32_t kth_largest(int32_t *keys, int64_t count, int64_t k) {
    for (int step = 0; count > kSortSize; ++step) {
        const Range range = range_of(keys, count);
        if (range.low == range.high) return range.low;
        const int32_t pivot = choose_pivot(keys, count, range, step);
        int64_t upper = 0;
        for (int64_t i = 0; i < count; ++i) upper += keys[i] >= pivot;
        const bool in_upper = upper >= k;
        if (!in_upper) k -= upper;
        count = keep(keys, count, pivot, in_upper);
    }
    insertion_sort(keys, count);
    return keys[k - 1];
}

// exp(value - largest) of each key; returns their sum.
double weigh(const int32_t *keys, int64_t count, float largest, float *weights) {
    double total = 0;
    int64_t i = 0;
    while (i + 4 <= count) {
        // FP32 sums stay short, so that their rounding does not grow with their length.
        const int64_t end = smaller(count, i + 1024);
        float32x4_t sum = vdupq_n_f32(0);
        for (; i + 4 <= end; i += 4) {
            const float32x4_t e = exp_negative(vsubq_f32(values_of(vld1q_s32(keys + i)), vdupq_n_f32(largest)));
            vst1q_f32(weights + i, e);
            sum = vaddq_f32(sum, e);
        }
        total += static_cast<double>(vaddvq_f32(sum));
    }
    for (; i < count; ++i) {
        weights[i] = vgetq_lane_f32(exp_negative(vdupq_n_f32(value_of(keys[i]) - largest)), 0);
        total += static_cast<double>(weights[i]);
    }
    return total;
}

// Sum of exp(logit - largest) over the row; each summand is left in `weights`.
double weigh_row(const Row &row, float *weights) {
    const float32x4_t largest = vdupq_n_f32(row.largest), zero = vdupq_n_f32(0);
    double total = 0;
    for (int64_t b = 0; b < row.num_blocks; ++b) {
        const int64_t end = smaller((b + 1) * kMaskBlock, row.size);
        int64_t i = b * kMaskBlock;
        // 2^31 logits so far below the largest weigh less than 2^-26 of it.
        if (row.maxima[b] < row.largest - 40.0f) {
            for (; i + 4 <= end; i += 4) vst1q_f32(weights + i, zero);
            for (; i < end; ++i) weights[i] = 0;
            continue;
        }
        float32x4_t sum[4];
        for (auto &v : sum) v = zero;
        for (; i + 16 <= end; i += 16)
            for (int j = 0; j < 4; ++j) {
                const float32x4_t e = exp_negative(vsubq_f32(vld1q_f32(row.logits + i + 4 * j), largest));
                vst1q_f32(weights + i + 4 * j, e);
                sum[j] = vaddq_f32(sum[j], e);
            }
        for (; i < end; ++i) {
            weights[i] = vgetq_lane_f32(exp_negative(vdupq_n_f32(row.logits[i] - row.largest)), 0);
            total += static_cast<double>(weights[i]);
        }
        total += static_cast<double>(vaddvq_f32(vaddq_f32(vaddq_f32(sum[0], sum[1]), vaddq_f32(sum[2], sum[3]))));
    }
    return total;
}

double weight_below(const int32_t *keys, const float *weights, int64_t count, int32_t pivot) {
    double total = 0;
    int64_t i = 0;
    while (i + 4 <= count) {
        const int64_t end = smaller(count, i + 1024);
        float32x4_t sum = vdupq_n_f32(0);
        for (; i + 4 <= end; i += 4) {
            const uint32x4_t below = vcltq_s32(vld1q_s32(keys + i), vdupq_n_s32(pivot));
            sum =
                vaddq_f32(sum, vreinterpretq_f32_u32(vandq_u32(below, vreinterpretq_u32_f32(vld1q_f32(weights + i)))));
        }
        total += static_cast<double>(vaddvq_f32(sum));
    }
    for (; i < count; ++i) total += keys[i] < pivot ? static_cast<double>(weights[i]) : 0.0;
    return total;
}

// Cuts the candidates in ascending order where `below` (the weight of what is masked
// already) plus the weights up to and including one would exceed `limit`. At
// least the last candidate stays. The arrays are reordered and partly overwritten.
Cut cut_by_weight(int32_t *keys, float *weights, int64_t count, double below, double limit) {
    bool some_kept = false;  // candidates above those still in question
    for (int step = 0; count > kSortSize; ++step) {
        const Range range = range_of(keys, count);
        if (range.low == range.high) break;
        const int32_t pivot = choose_pivot(keys, count, range, step);
        const double lower = weight_below(keys, weights, count, pivot);
        const bool in_upper = below + lower <= limit;
        if (in_upper)
            below += lower;
        else
            some_kept = true;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int32_t key = keys[i];
            const float weight = weights[i];
            keys[kept] = key;
            weights[kept] = weight;
            kept += (key >= pivot) == in_upper;
        }
        count = kept;
    }
    // Few are left, or all are equal and in order already.
    if (count <= kSortSize) {
        for (int64_t i = 1; i < count; ++i) {
            const int32_t key = keys[i];
            const float weight = weights[i];
            int64_t j = i;
            for (; j > 0 && keys[j - 1] > key; --j) {
                keys[j] = keys[j - 1];
                weights[j] = weights[j - 1];
            }
            keys[j] = key;
            weights[j] = weight;
        }
    }
    int64_t masked = 0;
    for (; masked < count; ++masked) {
        below += static_cast<double>(weights[masked]);
        if (!(below <= limit)) break;
    }
    if (masked == count) {
        // All in question are masked; a kept one is above them, or the last has to stay.
        if (some_kept) return {value_of(keys[count - 1]), count};
        masked = count - 1;
    }
    int64_t ties = 0;
    while (ties < masked && keys[masked - 1 - ties] == keys[masked]) ++ties;
    return {value_of(keys[masked]), ties};
}

// The logits in [low, high] become candidates: their keys and weights are moved to the front
// of the arrays (a weight's new place is never behind its old one). What is below `low`
// is summed up in `below`.
int64_t collect_between(const Row &row, float low, float high, int32_t *keys, float *weights, double &below) {
    int64_t count = 0;
    below = 0;
    for (int64_t b = 0; b < row.num_blocks; ++b) {
        const int64_t end = smaller((b + 1) * kMaskBlock, row.size);
        int64_t i = b * kMaskBlock;
        float32x4_t sum = vdupq_n_f32(0);
        for (; i + 4 <= end; i += 4) {
            const float32x4_t x = vld1q_f32(row.logits + i), w = vld1q_f32(weights + i);
            const uint32x4_t is_below = vcltq_f32(x, vdupq_n_f32(low));
            const uint32x4_t is_outside = vorrq_u32(is_below, vcgtq_f32(x, vdupq_n_f32(high)));
            sum = vaddq_f32(sum, vreinterpretq_f32_u32(vandq_u32(is_below, vreinterpretq_u32_f32(w))));
            const uint64_t outside = vget_lane_u64(vreinterpret_u64_u16(vmovn_u32(is_outside)), 0);
            if (outside == UINT64_MAX) continue;
            int32_t key[4];
            float weight[4];
            vst1q_s32(key, keys_of(x));
            vst1q_f32(weight, w);
            for (int j = 0; j < 4; ++j) {
                keys[count] = key[j];
                weights[count] = weight[j];
                count += ((outside >> (16 * j)) & 1) == 0;
            }
        }
        below += static_cast<double>(vaddvq_f32(sum));
        for (; i < end; ++i) {
            const float x = row.logits[i], w = weights[i];
            if (x < low) below += static_cast<double>(w);
            keys[count] = key_of(x);
            weights[count] = w;
            count += x >= low && x <= high;
        }
    }
    return count;
}

// The cut of a row by top-p alone.
Cut cut_row(const Row &row, float one_minus_p, int32_t *keys, float *weights) {
    const double total = weigh_row(row, weights);
    const double limit = static_cast<double>(one_minus_p) * total;
    // `size` logits of weight 2^exponent weigh at most half the limit.
    const auto weight = static_cast<float>(limit * 0.5 / static_cast<double>(row.size));
    int32_t bits;
    __builtin_memcpy(&bits, &weight, sizeof(bits));
    const int32_t exponent = (bits >> 23) - 127;
    const float bound = exponent < 0 ? row.largest + static_cast<float>(exponent) * 0.69314718f : row.largest;

    // Where that leaves many candidates, a sample of the row guesses an interval around
    // the threshold. The guess is checked: it only costs time where it is wrong.
    constexpr int64_t kSampleSize = 1024;
    if (row.size >= 16 * kSampleSize) {
        int32_t sample_keys[kSampleSize];
        float sample_weights[kSampleSize], cuts[2];
        const int64_t step = row.size / kSampleSize;
        for (int side = 0; side < 2; ++side) {
            for (int64_t i = 0; i < kSampleSize; ++i) {
                sample_keys[i] = key_of(row.logits[i * step]);
                sample_weights[i] = weights[i * step];
            }
            const double share = limit / static_cast<double>(step) * (side == 0 ? 0.85 : 1.18);
            cuts[side] = cut_by_weight(sample_keys, sample_weights, kSampleSize, 0.0, share).threshold;
        }
        const float low = cuts[0] > bound ? cuts[0] : bound;
        const float high = cuts[1] > low ? cuts[1] : low;
        double below;
        const int64_t count = collect_between(row, low, high, keys, weights, below);
        double candidates = 0;
        for (int64_t i = 0; i < count; ++i) candidates += static_cast<double>(weights[i]);
        if (below <= limit && below + candidates > limit) return cut_by_weight(keys, weights, count, below, limit);
    }
    const int64_t count = collect(row, bound, keys);
    const double candidates = weigh(keys, count, row.largest, weights);
    const double below = total > candidates ? total - candidates : 0.0;
    return cut_by_weight(keys, weights, count, below, limit);
}

void mask_elements(float *x, int64_t count, Cut &cut) {
    const float32x4_t threshold = vdupq_n_f32(cut.threshold), lowest = vdupq_n_f32(-kInfinity);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        vst1q_f32(x + i, vbslq_f32(vcltq_f32(v, threshold), lowest, v));
    }
    for (; i < count; ++i)
        if (x[i] < cut.threshold) x[i] = -kInfinity;
    for (i = 0; i < count && cut.num_ties > 0; ++i)
        if (x[i] == cut.threshold) {
            x[i] = -kInfinity;
            --cut.num_ties;
        }
}

void mask(const Row &row, Cut cut) {
    const int64_t full_blocks = row.size / kMaskBlock;
    const float32x4_t lowest = vdupq_n_f32(-kInfinity);
    float *x = row.logits;
    for (int64_t b = 0; b < full_blocks; ++b, x += kMaskBlock) {
        if (row.maxima[b] < cut.threshold)
            for (int j = 0; j < kMaskBlock; j += 4) vst1q_f32(x + j, lowest);
        else
            mask_elements(x, kMaskBlock, cut);
    }
    mask_elements(x, row.size - full_blocks * kMaskBlock, cut);
}

// The lowest logit that min-p keeps. Compared are logits instead of probabilities: no sum over the row is needed.
float bound_of_min_p(float largest, float min_p) {
    return largest + vgetq_lane_f32(log_normal(vdupq_n_f32(min_p < 1.0f ? min_p : 1.0f)), 0);
}

void mask_row(float *logits, int64_t size, int64_t k, float p, float min_p, float *workspace) {
    Row row{logits, size, mask_blocks_of(size), workspace, 0};
    auto *keys = reinterpret_cast<int32_t *>(workspace + padded_to_16(row.num_blocks));
    float *weights = workspace + padded_to_16(row.num_blocks) + padded_to_16(size);
    const bool use_k = k > 0 && k < size;
    bool use_p = p < 1.0f, use_min_p = min_p >= __FLT_MIN__;
    if (!use_k && !use_p && !use_min_p) return;
    find_maxima(row);
    // A NaN, or nothing but -inf: see the header.
    if (!(row.largest > -kInfinity)) return;
    use_p = use_p && row.largest < kInfinity;
    use_min_p = use_min_p && row.largest < kInfinity;
    // In FP32, as vLLM computes it.
    const float one_minus_p = 1.0f - p;
    const float least = use_min_p ? bound_of_min_p(row.largest, min_p) : -kInfinity;

    if (!use_k && use_p && !use_min_p) {
        mask(row, cut_row(row, one_minus_p, keys, weights));
        return;
    }
    Cut cut{least, 0};
    if (use_k || use_p) {
        const float bound = use_k ? bound_of_top_k(row, k) : -kInfinity;
        int64_t count = collect(row, bound > least ? bound : least, keys);
        // With min-p fewer than k may be left.
        if (use_k && count >= k) {
            auto *scratch = reinterpret_cast<int32_t *>(weights);
            for (int64_t i = 0; i < count; ++i) scratch[i] = keys[i];
            const int32_t kth = kth_largest(scratch, count, k);
            count = keep(keys, count, kth, true);
            cut.threshold = value_of(kth);
        }
        if (use_p) {
            const double total = weigh(keys, count, row.largest, weights);
            cut = cut_by_weight(keys, weights, count, 0.0, static_cast<double>(one_minus_p) * total);
        }
    }
    if (cut.threshold > -kInfinity) mask(row, cut);
}

}  // namespace

void top_k_top_p_mask(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_top_k_top_p_mask_args *>(untyped);
    const auto slots = static_cast<uint32_t>(smaller(args.num_workspaces, thread_count));
    if (args.vocab_size <= 0 || thread_index >= slots) return;
    float *workspace = static_cast<float *>(args.workspace) + thread_index * mask_workspace_words(args.vocab_size);
    const Share share = share_of(args.num_reqs, thread_index, slots);
    for (int64_t req = share.begin; req < share.end; ++req)
        mask_row(args.logits + req * args.row_stride, args.vocab_size, args.k == nullptr ? 0 : args.k[req],
                 args.p == nullptr ? 1.0f : args.p[req], args.min_p == nullptr ? 0.0f : args.min_p[req], workspace);
}

}  // namespace vac::VAC_TIER_NS
