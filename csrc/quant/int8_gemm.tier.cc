// INT8 linears, dense and by expert: the loops around the tiles of the tier's instruction.
//
//   rows    blocks of <= 132 rows   each reads the thread's part of the weight once more
//   panels  blocks of <= 64         only where K needs more than one block: bounds the partial sums
//   K       blocks of <= 2048       only with more than one tile of rows; the lhs block stays in L2
//   panel by panel                  8 columns x K block, stays in L1; streams from memory
//   tile by tile                    12 rows x K block, streams from L2; 12 x 8 sums in registers
//
// The last tile of a block may have fewer rows; then it takes several panels at a time, for enough independent sums to
// fill the pipelines. Blocking after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#include "quant/int8_kernels.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "quant/int8_tile_smmla.h"
#else
#include "quant/int8_tile_sdot.h"
#endif

namespace vac::VAC_TIER_NS {
namespace {

// A block of rows: where they are and what goes with them.
struct RowBlock {
    size_t row, rows;            // of out
    const int8_t *const *units;  // one pointer per unit
    const float *scales;
    const float *pair_scales;    // Tile::pair_scales, filled in by run_block
    const int32_t *zero_points;  // NULL if all are zero
    // To be gathered first, a block of K at a time: from[rows] to the units. NULL: the units hold all of K.
    const int8_t *const *from;
    int8_t *gathered;
    size_t gathered_stride;
};

void run_panels(const Target &target, const RowBlock &block, const int8_t *weight, size_t panel_stride, Range panels,
                Range k, size_t lhs_offset, bool last, int32_t *partial) {
    const size_t full = block.rows / kTileRows;
    Tile tile;
    tile.target = &target;
    tile.rhs_stride = panel_stride;
    tile.lhs_offset = lhs_offset;
    tile.k = k.end - k.begin;
    tile.first = k.begin == 0;
    tile.last = last;
    // Partial sums: the full tiles of each panel, then the last tile of each, side by side for groups of panels.
    constexpr size_t kSums = kTileRows * kPanelColumns;
    int32_t *tail_partial = partial + (panels.end - panels.begin) * full * kSums;
    // Complete panels can end without a look at what there is to add.
    const size_t plain_panels = last && target.plain && !block.zero_points ? target.n / kPanelColumns : 0;
    // Tiles of `rows` rows from `first` on, `wide` panels at a time.
    const auto run_range = [&](Range range, size_t first, size_t rows, size_t count, size_t wide, int32_t *sums) {
        tile.rows = rows;
        tile.row = block.row + first;
        tile.lhs = block.units + first / kUnitRows;
        tile.row_scales = block.scales + first;
#if defined(__ARM_FEATURE_MATMUL_INT8)
        tile.pair_scales = block.pair_scales + 2 * first;
#endif
        tile.zero_points = block.zero_points ? block.zero_points + first : nullptr;
        const auto run_groups = [&](size_t taken, size_t groups, bool plain) {
            if (taken == 0 || groups == 0) return;
            tile.rhs = weight + range.begin * panel_stride + k.begin * kPanelColumns;
            tile.column = range.begin * kPanelColumns;
            tile.partial = sums + (range.begin - panels.begin) * count * kSums;
            run(tile, taken, count, groups, plain);
            range.begin += taken * groups;
        };
        // A division would cost as much as a step of the tile.
        const auto in_groups = [&](size_t number) { return wide == 3 ? number / 3 : number >> (wide >> 1); };
        const size_t plain_end = min_size(range.end, plain_panels);
        if (plain_end > range.begin) run_groups(wide, in_groups(plain_end - range.begin), true);
        if (range.begin == range.end) return;
        run_groups(wide, in_groups(range.end - range.begin), false);
        run_groups(range.end - range.begin, 1, range.end <= plain_panels);
    };
    // Panels are read for the full tiles and for the last one while they are in L1: 48 KiB of them at most.
    const size_t tail = block.rows - full * kTileRows, tail_wide = tail ? tail_panels(tail) : kFullPanels;
    const size_t wide = full && kFullPanels > 1 ? kFullPanels : tail_wide;
    const size_t step = full && tail ? (2 * wide * tile.k <= 6144 ? 2 * wide : wide) : panels.end - panels.begin;
    for (size_t panel = panels.begin; panel < panels.end; panel += step) {
        const Range range = {panel, min_size(panel + step, panels.end)};
        if (full) run_range(range, 0, kTileRows, full, kFullPanels, partial);
        if (tail) run_range(range, full * kTileRows, tail, 1, wide, tail_partial);
    }
}

void run_block(const Target &target, RowBlock block, const int8_t *weight, size_t k, Range panels, int32_t *partial) {
    const size_t depth = padded_k(k), count = panels.end - panels.begin;
    if (count == 0 || block.rows == 0) return;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    float pair_scales[2 * kBlockRows];
    if (block.rows > 1) scales_of_pairs(block.scales, block.rows, pair_scales);
    block.pair_scales = pair_scales;
#endif
    const size_t k_blocks = block.rows <= kTileRows ? 1 : ceil_div(depth, kBlockK);
    const size_t k_step = k_blocks == 1 ? depth : round_up(ceil_div(depth, k_blocks), kKAlign);
    const size_t panels_step = k_blocks == 1 ? count : ceil_div(count, ceil_div(count, kBlockPanels));
    for (size_t panel = panels.begin; panel < panels.end; panel += panels_step) {
        for (size_t k0 = 0; k0 < depth; k0 += k_step) {
            const Range part = {k0, min_size(k0 + k_step, depth)};
#if defined(__ARM_FEATURE_MATMUL_INT8)
            if (block.from)
                gather_lhs(block.from, block.rows, k0 * kUnitKBytes, part.end - k0, block.gathered,
                           block.gathered_stride);
#endif
            run_panels(target, block, weight, panel_bytes(k), {panel, min_size(panel + panels_step, panels.end)}, part,
                       block.from ? 0 : k0 * kUnitKBytes, part.end == depth, partial);
        }
    }
}

// First k of row `row`.
inline const int8_t *row_at(const int8_t *pairs, size_t stride, size_t row, size_t k) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    (void)k;
    return pairs + row / 2 * stride + row % 2 * kRowBytes;
#else
    return pairs + row / 2 * stride + row % 2 * padded_k(k);
#endif
}

bool any_nonzero(const int32_t *values, size_t count) {
    int32x4_t some = vdupq_n_s32(0);
    size_t i = 0;
    for (; i + 4 <= count; i += 4) some = vorrq_s32(some, vld1q_s32(values + i));
    int32_t found = static_cast<int32_t>(vmaxvq_u32(vreinterpretq_u32_s32(some)));
    for (; i < count; ++i) found |= values[i];
    return found != 0;
}

inline char *aligned(void *workspace) {
    return reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(workspace), kWorkspaceAlign));
}

template <class Args>
inline Target target_of(const Args &args, const Packed &weight) {
    Target target = {};
    target.out_dtype = args.out_dtype, target.bias_dtype = args.bias_dtype;
    target.n = args.n;
    target.wide = args.k > kNarrowK;
    target.scales = weight.scales, target.column_sums = weight.sums;
    target.bias = args.bias;
    target.plain = args.out_dtype == VAC_BF16 && !args.bias && !target.wide;
    target.out = args.out, target.out_stride = args.out_stride;
    return target;
}

inline size_t bytes_of(int dtype) { return dtype == VAC_F32 ? 4 : 2; }

}  // namespace

void int8_gemm(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int8_gemm_args *>(opaque);
    const size_t m = args.m, k = args.k;
    if (m == 0 || args.n == 0) return;
    const Part part = part_of_thread(m, args.n, thread_index, thread_count);
    if (part.rows.begin == part.rows.end || part.panels.begin == part.panels.end) return;
    const Workspace layout = gemm_workspace(m, args.n, k);
    char *workspace = aligned(args.workspace) + thread_index * layout.size;
    const void *quantized = args.rows;
    if (args.quantize) {
        int8_quantize_to(*args.quantize, workspace, 0, 1);
        quantized = workspace;
    }
    const ConstRows rows(quantized, m);
    const Packed weight = packed_view(args.rhs, args.n, k);
    Target target = target_of(args, weight);
    target.residual = args.residual, target.residual_stride = args.residual_stride;
    target.plain = target.plain && !args.residual;
    const size_t stride = row_pair_stride(k), count = part.rows.end - part.rows.begin;
    const size_t step = ceil_div(ceil_div(count, kTileRows), ceil_div(count, kBlockRows)) * kTileRows;
    RowBlock block = {};
    const bool shifted = any_nonzero(rows.zero_points + part.rows.begin, count);
    for (size_t row = part.rows.begin; row < part.rows.end; row += step) {
        const int8_t *units[kBlockRows / kUnitRows];
        block.row = row, block.rows = min_size(step, part.rows.end - row);
        for (size_t u = 0; u < ceil_div(block.rows, kUnitRows); ++u)
            units[u] = row_at(rows.pairs, stride, row + u * kUnitRows, k);
        block.units = units;
        block.scales = rows.scales + row;
        block.zero_points = shifted ? rows.zero_points + row : nullptr;
        run_block(target, block, weight.panels, k, part.panels,
                  reinterpret_cast<int32_t *>(workspace + layout.partial));
    }
}

namespace {

// Rows first .. first + count of the sorted list, at most kBlockRows, times panels of their expert's weight.
void run_grouped(const vac_int8_grouped_gemm_args &args, const Target &target, const int8_t *weight, size_t first,
                 size_t count, Range panels, char *workspace, const Workspace &layout) {
    const size_t k = args.k, stride = row_pair_stride(k);
    const ConstRows rows(args.rows, args.num_rows_read);
    const int8_t *units[kBlockRows], *from[kBlockRows];
    auto *scales = reinterpret_cast<float *>(workspace + layout.scales);
    auto *zero_points = reinterpret_cast<int32_t *>(scales + round_up(kBlockRows, 16));
    // An even row and the next one are a pair as they lie.
    bool paired = true;
    size_t before = 0;
    for (size_t r = 0; r < count; ++r) {
        const size_t row = args.row_index ? static_cast<size_t>(args.row_index[first + r]) : first + r;
        from[r] = row_at(rows.pairs, stride, row, k);
        scales[r] = rows.scales[row];
        zero_points[r] = rows.zero_points[row];
        paired = paired && (r % 2 ? row == before + 1 : row % 2 == 0);
        before = row;
    }
    if (count % 2) scales[count] = 0;
    RowBlock block = {};
    block.row = first, block.rows = count;
    block.scales = scales;
    block.zero_points = any_nonzero(zero_points, count) ? zero_points : nullptr;
    block.units = units;
    const bool in_place = kUnitRows == 1 || count == 1 || paired;
    if (!in_place) {
        block.from = from;
        block.gathered = reinterpret_cast<int8_t *>(workspace);
        block.gathered_stride = kUnitKBytes * (count <= kTileRows ? padded_k(k) : min_size(padded_k(k), kBlockK));
    }
    for (size_t u = 0; u < ceil_div(count, kUnitRows); ++u)
        units[u] = in_place ? from[u * kUnitRows] : block.gathered + u * block.gathered_stride;
    run_block(target, block, weight, k, panels, reinterpret_cast<int32_t *>(workspace + layout.partial));
}

// Calls body(expert, first row, rows, cost of a panel) for every block of rows of every expert. A panel costs its
// products, or at least the time in which it comes from memory, both in sixteenths of the cycles per k that a core
// with 4 SMMLA a cycle takes.
template <class Body>
inline void for_row_blocks(const vac_int8_grouped_gemm_args &args, Body body) {
    for (size_t expert = 0; expert < args.num_experts; ++expert) {
        const auto begin = static_cast<size_t>(args.expert_start[expert]);
        const auto end = static_cast<size_t>(args.expert_start[expert + 1]);
        if (begin >= end) continue;
        const size_t tiles = ceil_div(end - begin, kTileRows);
        const size_t step = ceil_div(tiles, ceil_div(end - begin, kBlockRows)) * kTileRows;
        for (size_t row = begin; row < end; row += step) {
            const size_t rows = min_size(step, end - row);
            body(expert, row, rows, rows < 32 ? 32 : rows);
        }
    }
}

}  // namespace

void int8_grouped_gemm(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int8_grouped_gemm_args *>(opaque);
    if (args.num_rows == 0 || args.n == 0) return;
    const size_t panels = ceil_div(args.n, kPanelColumns);
    size_t total = 0;
    for_row_blocks(args, [&](size_t, size_t, size_t, size_t cost) { total += panels * cost; });
    // A panel is the thread's whose share of the total it begins in.
    const Range mine = share(total, thread_index, thread_count);
    const Workspace layout = grouped_gemm_workspace(args.num_rows, args.n, args.k);
    char *workspace = aligned(args.workspace) + thread_index * layout.size;
    size_t at = 0;
    for_row_blocks(args, [&](size_t expert, size_t first, size_t rows, size_t cost) {
        const auto panel_from = [&](size_t place) {
            return place <= at ? 0 : min_size(ceil_div(place - at, cost), panels);
        };
        const Range range = {panel_from(mine.begin), panel_from(mine.end)};
        at += panels * cost;
        if (range.begin >= range.end) return;
        const char *packed = static_cast<const char *>(args.rhs) + expert * args.rhs_expert_stride;
        const Packed weight = packed_view(packed, args.n, args.k);
        Target target = target_of(args, weight);
        if (args.bias)
            target.bias = static_cast<const char *>(args.bias) + expert * args.bias_stride * bytes_of(args.bias_dtype);
        run_grouped(args, target, weight.panels, first, rows, range, workspace, layout);
    });
}

}  // namespace vac::VAC_TIER_NS
