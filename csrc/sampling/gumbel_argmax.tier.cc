// Sampling from the softmax of logits with a temperature, by the Gumbel-max trick.
#include "vac/sampling.h"

#include "sampling/gumbel.h"
#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {

void gumbel_argmax_partial(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gumbel_argmax_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    const Share share = share_of(args.num_reqs * pieces, thread_index, thread_count);
    int64_t req = share.begin / pieces, piece = share.begin % pieces;
    float floor = -kInfinity;
    for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t begin = piece * kPieceSize;
        const float temperature = args.temperature == nullptr ? 1.0f : args.temperature[req];
        const bool greedy = temperature < kGreedyTemperature;
        const ScaledLogits weights{args.logits + req * args.row_stride, greedy ? 1.0f : 1.0f / temperature};
        const Best best = best_of_piece(weights, begin, smaller(begin + kPieceSize, args.vocab_size), greedy,
                                        args.seed[req], args.offset[req], floor);
        static_cast<Best *>(args.workspace)[i] = best;
        if (beats(best.score, floor)) floor = best.score;
        if (++piece == pieces) {
            piece = 0;
            ++req;
            floor = -kInfinity;
        }
    }
}

void gumbel_argmax_merge(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gumbel_argmax_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    for (int64_t req = share.begin; req < share.end; ++req) {
        args.out[req] = best_of_entries(static_cast<const Best *>(args.workspace) + req * pieces, pieces).token;
    }
}

}  // namespace vac::VAC_TIER_NS
