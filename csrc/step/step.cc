// The model's inputs from the state of the requests, and sampled tokens back into it.
#include "vac/step.h"

#include "common/export.h"

namespace {

// Slots of consecutive positions: a division per block, not per token.
void map_slots(const vac_step_group &group, uint32_t request, int64_t position, int64_t count, int64_t *slots) {
    const int32_t *blocks = group.block_table + request * group.block_table_stride;
    int64_t block = position / group.block_size, offset = position % group.block_size;
    while (count > 0) {
        const int64_t left = group.block_size - offset, run = count < left ? count : left;
        const int64_t first = int64_t{blocks[block]} * group.block_size + offset;
        for (int64_t i = 0; i < run; ++i) slots[i] = first + i;
        slots += run;
        count -= run;
        offset = 0;
        ++block;
    }
}

}  // namespace

extern "C" {

VAC_EXPORT int vac_step_inputs(vac_step_inputs_args *args) {
    int64_t token = 0, longest_query = 0, longest_sequence = 0;
    uint32_t num_incomplete = 0;
    for (uint32_t r = 0; r < args->num_reqs; ++r) {
        const int64_t count = args->num_scheduled_tokens == nullptr ? 1 : args->num_scheduled_tokens[r];
        const int64_t computed = args->num_computed_tokens[r], end = computed + count;
        if (count < 1 || computed < 0 || end > args->token_ids_stride || token + count > args->max_tokens)
            return VAC_INVALID_ARGUMENT;
        const int32_t *ids = args->token_ids + r * args->token_ids_stride + computed;
        args->query_start_loc[r] = static_cast<int32_t>(token);
        args->seq_lens[r] = static_cast<int32_t>(end);
        args->incomplete[r] = end < args->num_known_tokens[r];
        num_incomplete += args->incomplete[r];
        for (int64_t i = 0; i < count; ++i) {
            args->input_ids[token + i] = ids[i];
            args->positions[token + i] = computed + i;
        }
        for (uint32_t g = 0; g < args->num_groups; ++g)
            map_slots(args->groups[g], r, computed, count, args->groups[g].slot_mapping + token);
        token += count;
        if (count > longest_query) longest_query = count;
        if (end > longest_sequence) longest_sequence = end;
    }
    args->query_start_loc[args->num_reqs] = static_cast<int32_t>(token);
    args->num_tokens = static_cast<uint32_t>(token);
    args->max_query_len = static_cast<uint32_t>(longest_query);
    args->max_seq_len = static_cast<uint32_t>(longest_sequence);
    args->num_incomplete = num_incomplete;
    return VAC_OK;
}

VAC_EXPORT int vac_step_append(const vac_step_append_args *args) {
    for (uint32_t r = 0; r < args->num_reqs; ++r)
        if (!args->incomplete[r] && args->num_known_tokens[r] >= args->token_ids_stride) return VAC_INVALID_ARGUMENT;
    for (uint32_t r = 0; r < args->num_reqs; ++r) {
        if (args->incomplete[r]) continue;
        const int64_t place = r * args->token_ids_stride + args->num_known_tokens[r]++;
        args->token_ids[place] = static_cast<int32_t>(args->sampled[r]);
        args->is_token_id[place] = 1;
    }
    return VAC_OK;
}

}  // extern "C"
