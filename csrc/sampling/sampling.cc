// Exports of the sampling kernels and the sizes of their workspaces; their code is in the .tier.cc files.
#include "vac/sampling.h"

#include "common/dispatch.h"
#include "sampling/pieces.h"

VAC_DEFINE_KERNEL(argmax_partial)
VAC_DEFINE_KERNEL(argmax_merge)
VAC_DEFINE_KERNEL(softmax_rows)
VAC_DEFINE_KERNEL(gumbel_argmax_partial)
VAC_DEFINE_KERNEL(gumbel_argmax_merge)
VAC_DEFINE_KERNEL(top_k_top_p_mask)
VAC_DEFINE_KERNEL(fill_masked)
VAC_DEFINE_KERNEL(penalties)
VAC_DEFINE_KERNEL(log_softmax_rows)
VAC_DEFINE_KERNEL(top_logprobs)
VAC_DEFINE_KERNEL(softmax_stats_partial)
VAC_DEFINE_KERNEL(softmax_stats_merge)
VAC_DEFINE_KERNEL(rejection_sample)
VAC_DEFINE_KERNEL(recovered_tokens_partial)
VAC_DEFINE_KERNEL(recovered_tokens_merge)

extern "C" {

VAC_EXPORT size_t vac_argmax_workspace_size(int64_t num_reqs, int64_t vocab_size) {
    return static_cast<size_t>(num_reqs * vac::pieces_of(vocab_size)) * sizeof(float);
}

VAC_EXPORT size_t vac_gumbel_argmax_workspace_size(int64_t num_reqs, int64_t vocab_size) {
    return static_cast<size_t>(num_reqs * vac::pieces_of(vocab_size)) * sizeof(vac::Best);
}

VAC_EXPORT size_t vac_top_k_top_p_mask_workspace_size(int64_t vocab_size, int64_t num_workspaces) {
    return static_cast<size_t>(num_workspaces * vac::mask_workspace_words(vocab_size)) * sizeof(float);
}

VAC_EXPORT size_t vac_top_logprobs_workspace_size(int64_t vocab_size, int64_t num_workspaces) {
    return static_cast<size_t>(num_workspaces * vac::top_logprobs_words(vocab_size)) * sizeof(float);
}

VAC_EXPORT size_t vac_penalties_workspace_size(int64_t max_tokens, int64_t num_workspaces) {
    return static_cast<size_t>(num_workspaces * vac::penalties_workspace_bytes(max_tokens));
}

VAC_EXPORT size_t vac_softmax_stats_workspace_size(int64_t num_rows, int64_t vocab_size) {
    return static_cast<size_t>(num_rows * vac::pieces_of(vocab_size)) * sizeof(vac_softmax_stat);
}

VAC_EXPORT size_t vac_recovered_tokens_workspace_size(int64_t num_reqs, int64_t vocab_size) {
    return static_cast<size_t>(num_reqs * vac::pieces_of(vocab_size)) * sizeof(vac::Best);
}

}  // extern "C"
