// Argmax of rows in two phases: the maximum of each piece of a row (no indices:
// one FMAX per load), then a search of the one piece that holds the row's maximum.
#include "vac/sampling.h"

#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {

void argmax_partial(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_argmax_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    if (pieces <= 0) return;
    auto *maxima = static_cast<float *>(args.workspace);
    const Share share = share_of(args.num_reqs * pieces, thread_index, thread_count);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *logits = static_cast<const typename Type::Element *>(args.logits);
        int64_t req = share.begin / pieces, piece = share.begin % pieces;
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t begin = piece * kPieceSize;
            maxima[i] =
                max_of<Type>(logits + req * args.row_stride + begin, smaller(kPieceSize, args.vocab_size - begin));
            if (++piece == pieces) {
                piece = 0;
                ++req;
            }
        }
    });
}

void argmax_merge(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_argmax_args *>(untyped);
    const int64_t pieces = pieces_of(args.vocab_size);
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        const auto *logits = static_cast<const typename Type::Element *>(args.logits);
        for (int64_t req = share.begin; req < share.end; ++req) {
            const float *maxima = static_cast<const float *>(args.workspace) + req * pieces;
            const float best = max_of<F32>(maxima, pieces);
            const int64_t begin = first_index_of<F32>(maxima, pieces, best) * kPieceSize;
            args.out[req] = begin + first_index_of<Type>(logits + req * args.row_stride + begin,
                                                         smaller(kPieceSize, args.vocab_size - begin), best);
        }
    });
}

}  // namespace vac::VAC_TIER_NS
