// What the planner and the kernels agree on: the plan buffer, the workspace
// and the tile sizes. Everything is local to the file that includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vac/attention.h"

namespace vac {
namespace {

// A KV head's rows are worked on in tiles of 32, each eight row tiles of 4.
constexpr int32_t kTileRows = 32;
constexpr int32_t kRows = 4;
constexpr int32_t kPanel = 16;
// KV ranges are divided at multiples of this many tokens.
constexpr uint32_t kSplitTokens = 128;

constexpr uint32_t kPlanHeader = 16;
constexpr uint32_t kMaxGroups = 4096;
constexpr uint32_t kPartialRowsPerThread = 96;

// Even, so that what follows the tasks is 8-byte aligned.
inline uint32_t plan_task_capacity(uint32_t num_reqs, uint32_t num_threads) {
    return (num_reqs + 16 * num_threads + 17) & ~1u;
}

inline size_t align_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Scores of all rows of a tile against one chunk of keys: 32 KB, half of L1,
// written once and read once per chunk.
constexpr uint32_t kScores = 8192;

struct Scratch {
    size_t query, scores, weights, output, wide, tail, size;

    Scratch(uint32_t head_size, uint32_t v_head_size) {
        query = 0;
        scores = query + sizeof(float) * kTileRows * head_size;
        weights = scores + sizeof(float) * kScores;
        output = weights + sizeof(float) * kScores;
        wide = output + sizeof(float) * kTileRows * v_head_size;
        // A panel in FP32: of a K panel's dimensions or a V panel's 512 tokens.
        tail = wide + sizeof(float) * kPanel * (head_size > 512 ? head_size : 512);
        size = align_up(tail + sizeof(float) * kRows * v_head_size, 4096) + 256;
    }
};

// The counters come first and take the same room whatever the shape, so that
// their zeros survive a workspace that serves several shapes.
struct Workspace {
    size_t counters, arrivals, partial_output, partial_state, scratch, size;

    Workspace(uint32_t head_size, uint32_t v_head_size, uint32_t num_threads) {
        const size_t partial_rows = static_cast<size_t>(kPartialRowsPerThread) * num_threads;
        counters = 0;
        arrivals = 128;
        partial_output = arrivals + sizeof(uint32_t) * kMaxGroups;
        partial_state = partial_output + sizeof(float) * partial_rows * v_head_size;
        scratch = align_up(partial_state + sizeof(float) * 2 * partial_rows, 64);
        size = scratch + Scratch(head_size, v_head_size).size * num_threads;
    }
};

}  // namespace
}  // namespace vac
