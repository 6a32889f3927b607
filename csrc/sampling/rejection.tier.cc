// Speculative decoding's rejection sampling (Leviathan et al., 2023). No distribution is written to memory: a draft's
// probability takes one logit and its row's statistics, and a token in the place of a rejected draft is the
// Gumbel-max of log weights that are made where they are looked at. Of the few tokens that noise can make the best,
// the logit tells before any exponential: what a residual has left is no more than the target's probability.
#include "vac/sampling.h"

#include "sampling/gumbel.h"
#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

bool accepts(const vac_rejection_sample_args &args, int64_t row, int32_t draft) {
    float target = args.target[row * args.target_row_stride + draft];
    if (args.stats != nullptr) {
        const vac_softmax_stat stat = args.stats[row];
        target = vgetq_lane_f32(exp_negative(vdupq_n_f32(target - stat.max)), 0) / stat.sum;
    }
    float ratio = target;
    if (args.draft_probs != nullptr) {
        const float probability = args.draft_probs[row * args.draft_row_stride + draft];
        if (!(probability > 0.0f)) return false;
        ratio = target / probability;
    }
    return target > 0.0f && static_cast<double>(ratio) >= args.uniform[row];
}

// Log weights of a row with one token taken out.
struct LogitsWithout {
    const float *logits;
    int64_t token;  // none if negative

    // Of the block with the token it may be too large, which costs time only.
    float bound(int64_t begin, int64_t end) const { return max_of<F32>(logits + begin, end - begin); }

    void load(int64_t group, int64_t count, float32x4_t v[4]) const {
        load_group(logits + group, count, -kInfinity, v);
        if (token < group || token >= group + 16) return;
        float x[16];
        for (int j = 0; j < 4; ++j) vst1q_f32(x + 4 * j, v[j]);
        x[token - group] = -kInfinity;
        for (int j = 0; j < 4; ++j) v[j] = vld1q_f32(x + 4 * j);
    }
};

// log(max(softmax(logits) - draft_probs, 0)).
struct Residual {
    const float *logits;
    const float *draft_probs;
    float max;
    float inverse;  // of the sum of exponentials
    float log_sum;  // a little less, so that rounding takes no weight above its bound

    Residual(const float *row, const float *draft, vac_softmax_stat stat)
        : logits(row),
          draft_probs(draft),
          max(stat.max),
          inverse(1.0f / stat.sum),
          log_sum(vgetq_lane_f32(log_normal(vdupq_n_f32(stat.sum)), 0) - 0.001f) {}

    float bound(int64_t begin, int64_t end) const { return max_of<F32>(logits + begin, end - begin) - max - log_sum; }

    void load(int64_t group, int64_t count, float32x4_t v[4]) const {
        float32x4_t draft[4];
        load_group(logits + group, count, -kInfinity, v);
        load_group(draft_probs + group, count, 0.0f, draft);
        for (int j = 0; j < 4; ++j) {
            const float32x4_t target = exp_negative(vsubq_f32(v[j], vdupq_n_f32(max)));
            const float32x4_t rest = vfmaq_n_f32(vnegq_f32(draft[j]), target, inverse);
            // Neither what is NaN nor what has no logarithm here.
            const uint32x4_t is_left = vcgeq_f32(rest, vdupq_n_f32(__FLT_MIN__));
            v[j] = vbslq_f32(is_left, log_normal(rest), vdupq_n_f32(-kInfinity));
        }
    }
};

}  // namespace

void rejection_sample(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_rejection_sample_args *>(untyped);
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    for (int64_t req = share.begin; req < share.end; ++req) {
        if (args.rejected != nullptr) args.rejected[req] = -1;
        const bool greedy = args.is_greedy == nullptr || args.is_greedy[req] != 0;
        if (greedy ? args.target_argmax == nullptr : args.target == nullptr) continue;
        const int64_t begin = req == 0 ? 0 : args.cu_num_draft_tokens[req - 1], end = args.cu_num_draft_tokens[req];
        int32_t *out = args.out + req * args.out_row_stride;
        int64_t row = begin;
        for (; row < end; ++row) {
            const int32_t draft = args.draft_token_ids[row];
            const bool exists = draft >= 0 && draft < args.vocab_size;
            bool accepted;
            if (args.synthetic_rates != nullptr)
                accepted = exists && args.uniform[row] < static_cast<double>(args.synthetic_rates[row - begin]);
            else if (greedy)
                accepted = draft == args.target_argmax[row];
            else
                accepted = exists && accepts(args, row, draft);
            if (!accepted) break;
            out[row - begin] = draft;
        }
        if (row == end) {
            out[end - begin] = args.bonus_token_ids[req];
        } else if (greedy) {
            out[row - begin] = static_cast<int32_t>(args.target_argmax[row]);
        } else {
            if (args.recovered_token_ids != nullptr) out[row - begin] = args.recovered_token_ids[row];
            if (args.rejected != nullptr) args.rejected[req] = static_cast<int32_t>(row);
        }
    }
}

void recovered_tokens_partial(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_recovered_tokens_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    // Every thread counts for itself which rows there are, so that they are shared evenly.
    int64_t num_rejected = 0;
    for (int64_t i = 0; i < args.num_reqs; ++i) num_rejected += args.rejected[i] >= 0;
    const Share share = share_of(num_rejected * pieces, thread_index, thread_count);
    int64_t req = -1, piece = share.begin % pieces;
    auto next = [&] {
        do ++req;
        while (args.rejected[req] < 0);
    };
    for (int64_t skipped = share.begin / pieces; share.begin < share.end && skipped >= 0; --skipped) next();
    float floor = -kInfinity;
    for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t row = args.rejected[req], begin = piece * kPieceSize;
        const int64_t end = smaller(begin + kPieceSize, args.vocab_size);
        const float *logits = args.logits + row * args.logits_row_stride;
        Best best;
        if (args.draft_probs == nullptr)
            best = best_of_piece(LogitsWithout{logits, args.draft_token_ids[row]}, begin, end, false, args.seed[req], 0,
                                 floor);
        else
            best = best_of_piece(Residual(logits, args.draft_probs + row * args.draft_row_stride, args.stats[row]),
                                 begin, end, false, args.seed[req], 0, floor);
        static_cast<Best *>(args.workspace)[req * pieces + piece] = best;
        if (beats(best.score, floor)) floor = best.score;
        if (++piece < pieces) continue;
        piece = 0;
        floor = -kInfinity;
        if (i + 1 < share.end) next();
    }
}

void recovered_tokens_merge(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_recovered_tokens_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    for (int64_t req = share.begin; req < share.end; ++req) {
        const int64_t row = args.rejected[req];
        if (row < 0) continue;
        Best best = best_of_entries(static_cast<const Best *>(args.workspace) + req * pieces, pieces);
        if (best.score == -kInfinity) {
            const float *logits = args.logits + row * args.logits_row_stride;
            const float largest = max_of<F32>(logits, args.vocab_size);
            best.token = static_cast<int32_t>(first_index_of<F32>(logits, args.vocab_size, largest));
        }
        const int64_t first = req == 0 ? 0 : args.cu_num_draft_tokens[req - 1];
        args.out[req * args.out_row_stride + row - first] = best.token;
    }
}

}  // namespace vac::VAC_TIER_NS
