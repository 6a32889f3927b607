// Repetition, frequency and presence penalties. Only the tokens that a request's prompt and
// output hold are touched: an open hash table, twice as large as the history, counts them.
#include "vac/sampling.h"

#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

struct Entry {
    int32_t token;
    int32_t count;  // occurrences in the output
};
constexpr int32_t kEmpty = -1;

struct Penalties {
    float repetition, frequency, presence;
};

class Table {
  public:
    // Room for `max_tokens` different ones in `workspace`, of which `capacity_of(max_tokens)` entries are cleared.
    Table(void *workspace, int64_t max_tokens) {
        const int64_t capacity = table_capacity_of(max_tokens);
        entries_ = static_cast<Entry *>(workspace);
        used_ = reinterpret_cast<int32_t *>(entries_ + capacity);
        mask_ = static_cast<uint32_t>(capacity - 1);
        auto *words = reinterpret_cast<int32_t *>(entries_);
        for (int64_t i = 0; i < 2 * capacity; i += 4) vst1q_s32(words + i, vdupq_n_s32(kEmpty));
    }

    // The token's entry; its count starts at zero.
    Entry &find(int32_t token) {
        // Consecutive ids, which BPE gives to related tokens, spread by Fibonacci hashing.
        uint32_t slot = ((static_cast<uint32_t>(token) * 0x9E3779B1u) >> 7) & mask_;
        while (entries_[slot].token != token) {
            if (entries_[slot].token == kEmpty) {
                entries_[slot] = {token, 0};
                used_[size_++] = static_cast<int32_t>(slot);
                break;
            }
            slot = (slot + 1) & mask_;
        }
        return entries_[slot];
    }

    int64_t size() const { return size_; }
    const Entry &operator[](int64_t i) const { return entries_[used_[i]]; }

  private:
    Entry *entries_;
    int32_t *used_;
    uint32_t mask_;
    int64_t size_ = 0;
};

// A product that is rounded before it is subtracted, as torch's two operations do.
inline float rounded(float v) {
    asm("" : "+w"(v));
    return v;
}

inline float penalized(float logit, const Entry &entry, const Penalties &p, float inverse) {
    logit = rounded(logit * (logit > 0.0f ? inverse : p.repetition));
    logit -= rounded(p.frequency * static_cast<float>(entry.count));
    return entry.count > 0 ? logit - p.presence : logit;
}

}  // namespace

void penalties(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_penalties_args *>(untyped);
    const auto slots = static_cast<uint32_t>(smaller(args.num_workspaces, thread_count));
    if (args.vocab_size <= 0 || args.max_tokens < 0 || thread_index >= slots) return;
    void *workspace =
        static_cast<char *>(args.workspace) +
        static_cast<size_t>(thread_index) * static_cast<size_t>(penalties_workspace_bytes(args.max_tokens));
    const auto vocab_size = static_cast<uint64_t>(args.vocab_size);
    const Share share = share_of(args.num_reqs, thread_index, slots);
    for (int64_t req = share.begin; req < share.end; ++req) {
        const Penalties p{args.repetition[req], args.frequency[req], args.presence[req]};
        // What the prompt holds is penalized by the repetition penalty only.
        const int64_t num_prompt = p.repetition == 1.0f ? 0 : args.num_prompt;
        const int32_t *output = args.output + args.output_start[req];
        const int64_t num_output = args.output_start[req + 1] - args.output_start[req];
        const int64_t num_tokens = num_prompt + num_output;
        if (num_tokens > args.max_tokens) continue;
        if (p.repetition == 1.0f && p.frequency == 0.0f && p.presence == 0.0f) continue;

        Table table(workspace, num_tokens);
        const int64_t *prompt = args.prompt + req * args.prompt_stride;
        for (int64_t i = 0; i < num_prompt; ++i)
            if (static_cast<uint64_t>(prompt[i]) < vocab_size) table.find(static_cast<int32_t>(prompt[i]));
        for (int64_t i = 0; i < num_output; ++i)
            if (output[i] >= 0 && static_cast<uint64_t>(output[i]) < vocab_size) ++table.find(output[i]).count;

        float *logits = args.logits + req * args.row_stride;
        const float inverse = 1.0f / p.repetition;
        for (int64_t i = 0; i < table.size(); ++i) {
            float &logit = logits[table[i].token];
            logit = penalized(logit, table[i], p, inverse);
        }
    }
}

}  // namespace vac::VAC_TIER_NS
