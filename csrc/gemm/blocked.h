// The loops around a tile kernel for M > 4, the same for every instruction set.
// Included by the .tier.cc files only; all of it is local to each of them.
//
//   rows    blocks of <= 132 rows       each reads the thread's part of the weight once more
//   panels  blocks of <= 64             only where K needs more than one block: bounds the partial sums
//   K       blocks of <= Policy::kMaxK  lhs block packed into the workspace, stays in L2
//   panel by panel                      8 columns x K block, stays in L1; streams from memory
//   tile by tile                        12 rows x K block, streams from L2; 12 x 8 sums in registers
//
// The last tile of a block may have fewer rows; then it takes several panels at a time, for enough independent
// sums to fill the pipelines.
#pragma once

#include "gemm/blocking.h"

namespace {

// One call of a tile kernel: `rows` x (panels * 8) sums over one block of K.
struct Tile {
    const vac_gemm_args *args;
    const void *lhs;     // packed as the policy's kernel wants it
    const void *rhs;     // the first panel at the block's first k
    size_t rhs_stride;   // bytes from one panel to the next
    size_t k;            // of this block, as packed
    bool first, last;    // block of K: sums start at zero, are finished and written to out
    float *partial;      // where they wait between blocks; used unless first and last
    size_t row, column;  // of out
    size_t rows;         // 1 .. 12
};

struct Block {
    Range rows, panels, k;
};

// Policy:
//   kMaxK                                   longest block of K
//   tail_panels(rows)                       panels at a time for a tile of so many rows
//   lhs_tile_bytes(rows, k)                 of a packed tile
//   pack_lhs(args, row, rows, k0, k, to)    packs one tile
//   rhs(args, panel, count, k0, k, scratch, &stride)  where the kernel finds the panels: in the packed weight, or
//                                           widened into scratch
//   run(tile, panels)                       the kernel
template <class Policy>
void run_block(const vac_gemm_args &args, const Block &block, char *workspace, const Workspace &layout, bool pack) {
    const size_t rows = block.rows.end - block.rows.begin, k = block.k.end - block.k.begin;
    const size_t tiles = ceil_div(rows, kTileRows), full = rows / kTileRows;
    const size_t tile_bytes = Policy::lhs_tile_bytes(kTileRows, k);
    if (pack) {
        for (size_t t = 0; t < tiles; ++t)
            Policy::pack_lhs(args, block.rows.begin + t * kTileRows, min_size(rows - t * kTileRows, kTileRows),
                             block.k.begin, k, workspace + t * tile_bytes);
    }
    Tile tile;
    tile.args = &args;
    tile.k = k;
    tile.first = block.k.begin == 0;
    tile.last = block.k.end == args.k;
    const size_t group = tiles == full ? 1 : Policy::tail_panels(rows - full * kTileRows);
    // Partial sums: the full tiles of each panel, then the last tile of each, side by side for groups of panels.
    constexpr size_t kSums = kTileRows * kPanelColumns;
    float *partial = reinterpret_cast<float *>(workspace + layout.partial);
    float *tail_partial = partial + (block.panels.end - block.panels.begin) * full * kSums;
    for (size_t panel = block.panels.begin; panel < block.panels.end; panel += group) {
        const size_t count = min_size(group, block.panels.end - panel);
        const char *rhs =
            Policy::rhs(args, panel, count, block.k.begin, k, workspace + layout.widened, &tile.rhs_stride);
        for (size_t p = 0; p < count; ++p) {
            tile.rhs = rhs + p * tile.rhs_stride;
            tile.column = (panel + p) * kPanelColumns;
            tile.rows = kTileRows;
            for (size_t t = 0; t < full; ++t) {
                tile.lhs = workspace + t * tile_bytes;
                tile.row = block.rows.begin + t * kTileRows;
                tile.partial = partial + ((panel + p - block.panels.begin) * full + t) * kSums;
                Policy::run(tile, 1);
            }
        }
        if (full == tiles) continue;
        tile.rhs = rhs;
        tile.column = panel * kPanelColumns;
        tile.rows = rows - full * kTileRows;
        tile.lhs = workspace + full * tile_bytes;
        tile.row = block.rows.begin + full * kTileRows;
        tile.partial = tail_partial + (panel - block.panels.begin) * kSums;
        Policy::run(tile, count);
    }
}

template <class Policy>
void run_blocked(const vac_gemm_args &args, const Part &part, char *workspace) {
    const Workspace layout = workspace_layout(args.m, args.n, args.k);
    const size_t rows = part.rows.end - part.rows.begin, panels = part.panels.end - part.panels.begin;
    if (rows == 0 || panels == 0) return;
    const size_t tiles = ceil_div(rows, kTileRows);
    const size_t row_blocks = ceil_div(rows, kBlockRows), rows_step = ceil_div(tiles, row_blocks) * kTileRows;
    const size_t k_blocks = args.k ? ceil_div(args.k, Policy::kMaxK) : 1;
    // Whole unrolled loops in the tile kernels; K = 0 is one empty block.
    const size_t k_step = round_up(ceil_div(args.k ? args.k : 1, k_blocks), 32);
    const size_t panels_step = k_blocks == 1 ? panels : ceil_div(panels, ceil_div(panels, kBlockPanels));
    for (size_t row = part.rows.begin; row < part.rows.end; row += rows_step) {
        for (size_t panel = part.panels.begin; panel < part.panels.end; panel += panels_step) {
            for (size_t k = 0; k == 0 || k < args.k; k += k_step) {
                const Block block = {{row, min_size(row + rows_step, part.rows.end)},
                                     {panel, min_size(panel + panels_step, part.panels.end)},
                                     {k, min_size(k + k_step, args.k)}};
                run_block<Policy>(args, block, workspace, layout, k_blocks > 1 || panel == part.panels.begin);
            }
        }
    }
}

}  // namespace
