// Sizes of packed int4 weights and of workspaces, and which thread does what.
// Shared by the kernels and by the functions that size their buffers.
#pragma once

#include "vac/quant_int4.h"

namespace {

constexpr size_t kPanelColumns = 8;
constexpr size_t kStep = 16;       // k of one 64-byte line of a panel
constexpr size_t kStepBytes = 64;  // 8 columns x 16 k x 4 bits
constexpr size_t kLine = 64;

inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

inline size_t element_size(int dtype) { return dtype == VAC_F32 ? 4 : 2; }

struct Range {
    size_t begin, end;
    size_t size() const { return end - begin; }
};

// Share `index` of `count` of 0 .. total, sizes differing by one at most.
inline Range share(size_t total, size_t index, size_t count) {
    return {total * index / count, total * (index + 1) / count};
}

// The first address from `base` on that is a multiple of 64.
inline char *align_line(void *base) {
    return reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(base), kLine));
}

// --- packed weights ----------------------------------------------------------

struct PackedInt4 {
    size_t panels, steps, groups;  // steps of 16 k
    size_t group;                  // k of a group; the last one may be shorter. K where groups = 1
    size_t scale_bytes;            // of one scale
    size_t values_panel, scales_panel, zero_points_panel;  // bytes of a panel in each region
    size_t scales, zero_points, size;                      // offsets of the regions, and the whole
};

inline PackedInt4 packed_int4(int scale_dtype, size_t n, size_t k, size_t group, bool zero_points) {
    PackedInt4 p;
    p.panels = ceil_div(n, kPanelColumns);
    p.steps = ceil_div(k, kStep);
    p.group = group == 0 || group >= k ? k : group;
    p.groups = p.group == k ? 1 : ceil_div(k, group);
    p.scale_bytes = scale_dtype == VAC_BF16 ? 2 : 4;
    p.values_panel = p.steps * kStepBytes;
    p.scales_panel = p.groups * kPanelColumns * p.scale_bytes;
    p.zero_points_panel = zero_points ? p.groups * kPanelColumns : 0;
    p.scales = p.panels * p.values_panel;
    p.zero_points = p.scales + p.panels * p.scales_panel;
    p.size = round_up(p.zero_points + p.panels * p.zero_points_panel, kLine);
    return p;
}

inline bool known_dtype(int dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

inline bool valid_group(size_t k, size_t group) {
    return group == 0 || group >= k || (group % 32 == 0 && group <= VAC_INT4_MAX_GROUP);
}

// --- who does what ------------------------------------------------------------

struct Part {
    Range rows, panels;  // empty for a thread without work
};

// Splits M x N over the team: few row parts, since every row part reads all of the weight again, and few panel parts,
// since every panel part reads all of the activations again. Costs in eighths of a cycle per 8 k of a core with
// 4 SMMLA a cycle; memory gives it 4 bytes a cycle.
inline Part part_of_thread(size_t m, size_t n, uint32_t thread_index, uint32_t thread_count) {
    constexpr size_t kRowGroup = 16;
    const size_t panels = ceil_div(n, kPanelColumns), row_groups = ceil_div(m, kRowGroup);
    size_t row_parts = 1;
    if (m > kRowGroup && thread_count > 1) {
        size_t best = ~size_t{0};
        const size_t most = min_size(thread_count, row_groups);
        for (size_t parts = 1; parts <= most; ++parts) {
            const size_t rows = ceil_div(row_groups, parts) * kRowGroup, wide = ceil_div(panels, thread_count / parts);
            const size_t cost = 4 * rows * wide + 2 * rows + 64 * wide;
            if (cost < best) best = cost, row_parts = parts;
        }
    }
    const size_t panel_parts = thread_count / row_parts;
    if (thread_index >= row_parts * panel_parts) return {{0, 0}, {0, 0}};
    const Range groups = share(row_groups, thread_index / panel_parts, row_parts);
    return {{groups.begin * kRowGroup, min_size(groups.end * kRowGroup, m)},
            share(panels, thread_index % panel_parts, panel_parts)};
}

// Shares out (expert, panel) by what they cost: reading a panel is worth about 8 rows of products. Calls
// run(expert, panels) for those of a thread.
template <class Run>
inline void share_experts(const vac_int4_gemm_args &args, size_t panels, uint32_t thread_index, uint32_t thread_count,
                          Run run) {
    const auto cost_of = [&](size_t e) {
        const size_t rows = static_cast<size_t>(args.expert_start[e + 1] - args.expert_start[e]);
        return rows == 0 ? size_t{0} : rows + 8;
    };
    size_t total = 0;
    for (size_t e = 0; e < args.num_experts; ++e) total += cost_of(e);
    const Range mine = share(total * panels, thread_index, thread_count);
    size_t at = 0;
    for (size_t e = 0; e < args.num_experts && at < mine.end; ++e) {
        const size_t cost = cost_of(e), end = at + cost * panels;
        if (cost != 0 && end > mine.begin) {
            // A panel belongs to the thread in whose share it begins.
            const size_t first = at >= mine.begin ? 0 : ceil_div(mine.begin - at, cost);
            const size_t last = min_size(ceil_div(mine.end - at, cost), panels);
            if (first < last) run(e, Range{first, last});
        }
        at = end;
    }
}

// --- W4A8 ----------------------------------------------------------------------

// Activations as int8 with a scale per row, in pairs of rows:
//   values  [pair][K / 8][2 rows][8 k], pairs `pair_stride` bytes apart: 16 bytes are an operand of SMMLA
//   sums    [pair][group][x0 x0 x1 x1 | y0 y0 y1 y1], int32: where the sums of rows 0 and 1 start, and minus the sum of
//           the row's values, for the zero points
//   scales  [row], FP32
struct QuantizedLayout {
    size_t pairs, pair_stride, sums_stride;  // of a pair: bytes, and int32 elements
    size_t sums, scales, size;               // offsets of the regions, and the whole, in bytes
};

inline QuantizedLayout quantized_layout(size_t m, size_t k, size_t groups) {
    QuantizedLayout q;
    q.pairs = ceil_div(m, 2);
    // An odd number of cache lines: rows a power of two apart would share a few sets of the L1 cache.
    q.pair_stride = (round_up(2 * round_up(k, kStep), kLine) / kLine | 1) * kLine;
    q.sums_stride = groups * 8;
    q.sums = q.pairs * q.pair_stride;
    q.scales = q.sums + q.pairs * q.sums_stride * sizeof(int32_t);
    q.size = round_up(q.scales + 2 * q.pairs * sizeof(float), kLine);
    return q;
}

// Blocks of many rows: kBlockRows x kBlockK activations stay in L2, a panel of kBlockK widened to int8 in L1, partial
// sums of kBlockPanels panels wait in FP32 or int32 where K takes more than one block.
constexpr size_t kBlockRows = 96, kBlockK = 4096, kBlockPanels = 32;
// Up to so many rows the weights are widened in registers, all of K in one go.
constexpr size_t kSmallRows = 16;

inline size_t groups_of(size_t k, size_t group) { return group == 0 || group >= k ? 1 : ceil_div(k, group); }

// Rows of an expert that are gathered at a time.
inline size_t gather_rows_of(size_t k) { return min_size(max_size((512 << 10) / (k + 1) / 16, 1) * 16, kBlockRows); }

// Workspace: quantized lhs of all rows | per thread: quantized lhs of 2 rows, a lone row, gathered rows, a widened
// panel, partial sums.
struct W4a8Workspace {
    size_t lone, gathered, widened, partial, thread;  // offsets in a thread's part, and its size
    size_t lhs;                                       // bytes of the shared part
};

inline W4a8Workspace w4a8_workspace(size_t m, size_t k, size_t group, size_t num_experts) {
    const size_t groups = groups_of(k, group), k16 = round_up(k, kStep);
    W4a8Workspace w;
    w.lhs = quantized_layout(m, k, groups).size;
    w.lone = quantized_layout(VAC_INT4_SELF_QUANTIZED_ROWS, k, groups).size;
    w.gathered = w.lone + round_up(2 * k16, kLine);
    w.widened = w.gathered + (num_experts ? quantized_layout(gather_rows_of(k), k, groups).size : 0);
    w.partial = w.widened + kPanelColumns * min_size(k16, kBlockK);
    w.thread = w.partial + (k > kBlockK ? kBlockRows * kBlockPanels * kPanelColumns * sizeof(float) : 0);
    return w;
}

// --- W4A16 ---------------------------------------------------------------------

// Blocks: 96 rows x about 1024 k of lhs packed in L2, a panel widened to BF16 or FP32 in L1, partial sums of 32 panels.
constexpr size_t kWideK = 1024;

// Steps of a block of K: whole groups.
inline size_t wide_steps(size_t group_steps) {
    return group_steps >= kWideK / kStep ? group_steps : kWideK / kStep / group_steps * group_steps;
}

// Rows that are split into digits (int4_digits.h): of BF16 where there is BFMMLA, and elsewhere, in 512 KiB at most.
constexpr size_t kDigitRowsOfBf16 = 8, kMostDigitRows = 16;
inline size_t digit_rows_of(size_t k) { return min_size(max_size((512 << 10) / (3 * (k + 1)), 1), kMostDigitRows); }

// Workspace of a thread: packed lhs, or its digits | a widened panel | partial sums.
struct W4a16Workspace {
    size_t widened, partial, thread;
};

inline W4a16Workspace w4a16_workspace(size_t rows, size_t k, size_t group) {
    const size_t block = groups_of(k, group) == 1 ? kWideK : max_size(group, kWideK);
    const size_t block_k = min_size(round_up(k, kStep), block), block_rows = min_size(round_up(rows, 2), kBlockRows);
    W4a16Workspace w;
    // A cache line more per row: rows a power of two apart would share a few sets of the L1 cache.
    w.widened = round_up(block_rows * (block_k * sizeof(float) + kLine), kLine);
    const size_t digits = 3 * min_size(rows, digit_rows_of(k));
    w.widened = max_size(w.widened, quantized_layout(digits, k, groups_of(k, group)).size);
    w.partial = w.widened + kPanelColumns * (block_k * sizeof(float) + kLine);
    w.thread = w.partial + max_size(block_rows, digits) * kBlockPanels * kPanelColumns * sizeof(float);
    return w;
}

// --- KleidiAI -----------------------------------------------------------------

// What all six kernels share; asked again when they are bound.
constexpr size_t kKaiNr = 8, kKaiKr = 16, kKaiSr = 2, kKaiMr = 4;
constexpr size_t kKaiTileFloats = 8192;  // 32 KiB of FP32 results before they are rounded

inline bool kai_valid_shape(size_t n, size_t k, size_t group) {
    return n != 0 && k != 0 && (group == 0 ? k % 2 == 0 : group % 32 == 0 && k % group == 0);
}

inline size_t kai_panel_bytes(size_t k, size_t group) {
    if (group == 0) return kKaiNr * (round_up(k, 32) / 2 + 12);
    return kKaiNr * ((group / 2 + 2) * (k / group) + 8);
}

inline size_t kai_mr(size_t m, bool i8mm) { return m == 1 || !i8mm ? 1 : kKaiMr; }
// int8 values, a zero point and a scale per row, for tiles of mr rows.
inline size_t kai_lhs_tile_bytes(size_t k, size_t mr) { return mr * (round_up(k, 32) + 8); }

// Workspace: packed lhs of all rows | per thread: packed lhs of a few rows, a row in FP32, a tile of results.
struct KaiWorkspace {
    size_t own_lhs, row, thread;  // bytes of a thread's parts and of all of them
    size_t lhs;                   // bytes of the shared part
};

inline KaiWorkspace kai_workspace(size_t m, size_t k) {
    KaiWorkspace w;
    w.lhs = round_up(round_up(m, kKaiMr) * kai_lhs_tile_bytes(k, 1), kLine);
    w.own_lhs = round_up(kai_lhs_tile_bytes(k, kKaiMr), kLine);
    w.row = round_up(k * sizeof(float), kLine);
    w.thread = w.own_lhs + w.row + kKaiTileFloats * sizeof(float);
    return w;
}

}  // namespace
