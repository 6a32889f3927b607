// Sizes of the blocks a linear layer is cut into, and which thread does which.
// Shared by the kernels and by the functions that size their buffers.
#pragma once

#include "vac/gemm.h"

namespace {

constexpr size_t kPanelColumns = 8;
constexpr size_t kTileRows = 12;
// Up to here the packed lhs is kept whole and every weight is read straight from its panel.
constexpr size_t kSmallRows = 4;
// Blocks of lhs are at most 11 tiles x 1024 k (bf16) or x 512 k (f32): about 264 KiB, a quarter of the L2 cache.
constexpr size_t kBlockRows = 11 * kTileRows;
constexpr size_t kBlockLhsRowBytes = 2048;
// Where K takes more than one block, partial sums of a block wait in FP32: rows x 512 columns, 264 KiB more.
constexpr size_t kBlockPanels = 64;
constexpr size_t kWorkspaceAlign = 64;

inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

inline size_t element_size(int dtype) { return dtype == VAC_F32 ? 4 : 2; }

// K of a panel as stored: BFMMLA wants groups of 4. The same under every tier, so that sizes are.
inline size_t packed_k(int dtype, size_t k) { return dtype == VAC_BF16 ? round_up(k, 4) : k; }
inline size_t panel_bytes(int dtype, size_t k) { return packed_k(dtype, k) * kPanelColumns * element_size(dtype); }

struct Range {
    size_t begin, end;
};

// Share `index` of `count` of 0 .. total, sizes differing by one at most.
inline Range share(size_t total, size_t index, size_t count) {
    return {total * index / count, total * (index + 1) / count};
}

// Workspace of one thread: packed lhs | widened panels | partial sums.
struct Workspace {
    size_t widened, partial, size;  // offsets and the whole, in bytes
};

inline Workspace workspace_layout(size_t m, size_t n, size_t k) {
    if (m <= kSmallRows) {
        const size_t size = round_up(kSmallRows * round_up(k, 4) * sizeof(float), kWorkspaceAlign);
        return {size, size, size};
    }
    const size_t rows = min_size(round_up(m, kTileRows), kBlockRows);
    Workspace w;
    w.widened = round_up(rows * min_size(round_up(k, 4) * sizeof(float), kBlockLhsRowBytes), kWorkspaceAlign);
    w.partial = w.widened + 2 * kPanelColumns * kBlockLhsRowBytes;
    w.size = w.partial;
    if (k * sizeof(float) > kBlockLhsRowBytes)
        w.size += rows * min_size(ceil_div(n, kPanelColumns), kBlockPanels) * kPanelColumns * sizeof(float);
    return w;
}

// Bytes that one thread wants for any number of rows up to m: a smaller batch may take the other path.
inline size_t workspace_up_to(size_t m, size_t n, size_t k) {
    const size_t small = workspace_layout(min_size(m, kSmallRows), n, k).size;
    const size_t whole = workspace_layout(m, n, k).size;
    return small > whole ? small : whole;
}

struct Part {
    Range rows, panels;  // empty for a thread without work
};

// Splits M x N over the team: few row parts, since every row part reads all of the weight again, and few panel
// parts, since every panel part packs all of the lhs again. Costs are in eighths of the cycles per k that a core
// with 4 BFMMLA a cycle takes, with packing at 8 elements and memory at 4 bytes a cycle.
inline Part part_of_thread(size_t m, size_t n, uint32_t thread_index, uint32_t thread_count) {
    const size_t panels = ceil_div(n, kPanelColumns), row_groups = ceil_div(m, 4);
    size_t row_parts = 1;
    if (m > 16 && thread_count > 1) {
        size_t best = ~size_t{0};
        const size_t most = min_size(thread_count, m / 16);
        for (size_t parts = 1; parts <= most; ++parts) {
            const size_t rows = ceil_div(row_groups, parts) * 4, wide = ceil_div(panels, thread_count / parts);
            const size_t cost = rows * wide + rows + 32 * wide;
            if (cost < best) best = cost, row_parts = parts;
        }
    }
    const size_t panel_parts = thread_count / row_parts;
    if (thread_index >= row_parts * panel_parts) return {{0, 0}, {0, 0}};
    const Range groups = share(row_groups, thread_index / panel_parts, row_parts);
    return {{groups.begin * 4, min_size(groups.end * 4, m)}, share(panels, thread_index % panel_parts, panel_parts)};
}

}  // namespace
