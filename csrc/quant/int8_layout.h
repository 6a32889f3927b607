// Where things are in quantized rows and in a packed INT8 weight, the sizes of blocks, and which thread does which.
// Shared by the kernels and by the functions that size their buffers.
#pragma once

#include "vac/quant_int8.h"

namespace {

constexpr size_t kPanelColumns = 8;
// What a tile kernel's loop takes at a time; K = 0 is one block of zeros.
constexpr size_t kKAlign = 64;
// Rows of a tile; also up to where a call has one tile of rows, so that K needs no blocks.
constexpr size_t kTileRows = 12;
// Blocks of lhs are at most 11 tiles x 2048 k, 264 KiB: a quarter of the L2 cache. A panel's block is 16 KiB of L1.
constexpr size_t kBlockRows = 11 * kTileRows;
constexpr size_t kBlockK = 2048;
// Where K takes more than one block, partial sums of a block wait as integers: rows x 512 columns, 264 KiB more.
constexpr size_t kBlockPanels = 64;
constexpr size_t kWorkspaceAlign = 64;
// |sum of (q - zero_point) * weight| <= k * 255 * 128 is below 2^31 up to here; beyond it the correction for zero
// points is done in 64 bits. The sum of q * weight itself always fits into 32 bits but for one value, see
// finish_wide().
constexpr size_t kNarrowK = 65536;
static_assert(kNarrowK * 255 * 128 < (size_t{1} << 31));

inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

inline size_t padded_k(size_t k) { return round_up(k ? k : 1, kKAlign); }
inline size_t panel_bytes(size_t k) { return padded_k(k) * kPanelColumns; }

inline size_t row_pair_stride(size_t k) {
    const size_t bytes = 2 * padded_k(k);
    return bytes % 512 == 0 ? bytes + 64 : bytes;
}

// Quantized rows: scales, zero points, pairs of rows.
inline size_t rows_size(size_t m, size_t k) {
    return 2 * round_up(m, 16) * sizeof(float) + ceil_div(m, 2) * row_pair_stride(k);
}

template <class Void, class Byte, class Float, class Int>
struct RowsView {
    Float *scales;
    Int *zero_points;
    Byte *pairs;
    RowsView(Void *rows, size_t m) {
        scales = static_cast<Float *>(rows);
        zero_points = reinterpret_cast<Int *>(scales + round_up(m, 16));
        pairs = reinterpret_cast<Byte *>(zero_points + round_up(m, 16));
    }
};
using Rows = RowsView<void, int8_t, float, int32_t>;
using ConstRows = RowsView<const void, const int8_t, const float, const int32_t>;

// A packed weight: panels, scales, sums of columns.
struct Packed {
    const int8_t *panels;
    const float *scales;
    const int32_t *sums;
};
inline size_t packed_scales_offset(size_t n, size_t k) { return ceil_div(n, kPanelColumns) * panel_bytes(k); }
inline size_t packed_sums_offset(size_t n, size_t k) {
    return packed_scales_offset(n, k) + round_up(n, kPanelColumns) * sizeof(float);
}
inline size_t packed_size(size_t n, size_t k) {
    return packed_sums_offset(n, k) + round_up(n, kPanelColumns) * sizeof(int32_t);
}
inline Packed packed_view(const void *packed, size_t n, size_t k) {
    const char *base = static_cast<const char *>(packed);
    return {reinterpret_cast<const int8_t *>(base), reinterpret_cast<const float *>(base + packed_scales_offset(n, k)),
            reinterpret_cast<const int32_t *>(base + packed_sums_offset(n, k))};
}

// Workspace of one thread: rows that it quantized or gathered | their scales and zero points | partial sums.
struct Workspace {
    size_t scales, partial, size;  // offsets and the whole, in bytes
};

inline size_t partial_bytes(size_t m, size_t n, size_t k) {
    if (m <= kTileRows || k <= kBlockK) return 0;
    const size_t rows = min_size(round_up(m, kTileRows), kBlockRows);
    return rows * min_size(ceil_div(n, kPanelColumns), kBlockPanels) * kPanelColumns * sizeof(int32_t);
}

inline Workspace gemm_workspace(size_t m, size_t n, size_t k) {
    Workspace w;
    w.scales = m <= VAC_INT8_GEMM_QUANTIZE_ROWS ? round_up(rows_size(m, k), kWorkspaceAlign) : 0;
    w.partial = w.scales;
    w.size = w.partial + partial_bytes(m, n, k);
    return w;
}

inline Workspace grouped_gemm_workspace(size_t num_rows, size_t n, size_t k) {
    const size_t rows = min_size(round_up(num_rows, kTileRows), kBlockRows);
    // One tile of rows takes all of K at once, more rows a block of it.
    const size_t one_tile = kTileRows * padded_k(k), blocks = rows * min_size(padded_k(k), kBlockK);
    Workspace w;
    w.scales = one_tile > blocks ? one_tile : blocks;
    w.partial = w.scales + 2 * round_up(kBlockRows, 16) * sizeof(float);
    w.size = round_up(w.partial + partial_bytes(num_rows, n, k), kWorkspaceAlign);
    return w;
}

struct Range {
    size_t begin, end;
};

// Share `index` of `count` of 0 .. total, sizes differing by one at most.
inline Range share(size_t total, size_t index, size_t count) {
    return {total * index / count, total * (index + 1) / count};
}

struct Part {
    Range rows, panels;  // empty for a thread without work
};

// Splits M x N over the team: few row parts, since every row part reads all of the weight again, and few panel
// parts, since every panel part fetches all of the lhs. Costs are in sixteenths of the cycles per k that a core with 4
// SMMLA a cycle takes, with lhs and weights fetched at 4 bytes a cycle.
inline Part part_of_thread(size_t m, size_t n, uint32_t thread_index, uint32_t thread_count) {
    const size_t panels = ceil_div(n, kPanelColumns), row_groups = ceil_div(m, 4);
    size_t row_parts = 1;
    if (m > 16 && thread_count > 1) {
        size_t best = ~size_t{0};
        const size_t most = min_size(thread_count, m / 16);
        for (size_t parts = 1; parts <= most; ++parts) {
            const size_t rows = ceil_div(row_groups, parts) * 4, wide = ceil_div(panels, thread_count / parts);
            const size_t cost = rows * wide + 4 * rows + 32 * wide;
            if (cost < best) best = cost, row_parts = parts;
        }
    }
    const size_t panel_parts = thread_count / row_parts;
    if (thread_index >= row_parts * panel_parts) return {{0, 0}, {0, 0}};
    const Range groups = share(row_groups, thread_index / panel_parts, row_parts);
    return {{groups.begin * 4, min_size(groups.end * 4, m)}, share(panels, thread_index % panel_parts, panel_parts)};
}

}  // namespace
