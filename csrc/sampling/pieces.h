// How argmax and Gumbel sampling cut a row; also sizes their workspaces.
#pragma once

#include <cstdint>

namespace vac {
namespace {  // a tier must not link to another's copy

// Logits of a row that one thread looks at: half a microsecond of work, and a
// vocabulary of 128 K tokens still has enough pieces for 64 threads.
constexpr int64_t kPieceSize = 2048;

constexpr int64_t pieces_of(int64_t vocab_size) { return (vocab_size + kPieceSize - 1) / kPieceSize; }

// Logits that share one maximum in top_k_top_p_mask and top_logprobs.
constexpr int64_t kMaskBlock = 64;

constexpr int64_t mask_blocks_of(int64_t vocab_size) { return (vocab_size + kMaskBlock - 1) / kMaskBlock; }

// One row's scratch in top_k_top_p_mask: a maximum per block, then a key and a
// probability per logit; each padded to whole cache lines.
constexpr int64_t padded_to_16(int64_t count) { return (count + 15) / 16 * 16; }
constexpr int64_t mask_workspace_words(int64_t vocab_size) {
    return padded_to_16(mask_blocks_of(vocab_size)) + 2 * padded_to_16(vocab_size);
}

// One row's scratch in top_logprobs: a maximum per block, then an entry of 8 bytes per token.
constexpr int64_t top_logprobs_words(int64_t vocab_size) {
    return padded_to_16(mask_blocks_of(vocab_size)) + 2 * padded_to_16(vocab_size);
}

// The hash table of penalties, a power of two and at least twice as large as what it holds, so that
// chains stay short; behind its entries of 8 bytes a list of those in use.
constexpr int64_t table_capacity_of(int64_t max_tokens) {
    int64_t capacity = 8;
    while (capacity < 2 * max_tokens) capacity *= 2;
    return capacity;
}
constexpr int64_t penalties_workspace_bytes(int64_t max_tokens) {
    return (8 * table_capacity_of(max_tokens) + 4 * max_tokens + 63) / 64 * 64;
}

// A piece's best score and the token that has it.
struct Best {
    float score;
    int32_t token;
};

}  // namespace
}  // namespace vac
