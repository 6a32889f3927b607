// Rows of quantized activations and the tiles that multiply them by a packed weight, up to 16 rows in one pass.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include "quant/int4_sdot.h"
#include "quant/int4_smmla.h"

namespace {

// What a call's tiles have in common.
struct Int4Layer {
    const vac_int4_gemm_args &args;
    PackedInt4 packed;
    int kind;  // Tiles::kind
};

// Rows of one expert (or of the layer), in pairs.
struct Int4Rows {
    Quantized lhs;
    size_t first, count;  // the first, even, of lhs
    size_t out;           // the first of out
    const char *rhs;
    const void *bias;
    size_t panel = 0;  // that column 0 of out is in
};

inline Int4Tile tile_at(const Int4Layer &layer, const Int4Rows &rows, size_t row, size_t panel, size_t step) {
    const PackedInt4 &packed = layer.packed;
    const size_t group_steps = packed.groups == 1 ? max_size(packed.steps, 1) : packed.group / kStep;
    const size_t pair = (rows.first + row) / 2, group = packed.groups == 1 ? 0 : step / group_steps;
    Int4Tile tile;
    tile.args = &layer.args;
    tile.lhs = rows.lhs.values + pair * rows.lhs.pair_stride + step * 32;
    tile.pair_stride = rows.lhs.pair_stride;
    tile.sums = rows.lhs.sums + pair * rows.lhs.sums_stride + group * 8;
    tile.sums_stride = rows.lhs.sums_stride;
    tile.values = reinterpret_cast<const uint8_t *>(rows.rhs) + panel * packed.values_panel + step * kStepBytes;
    tile.values_stride = packed.values_panel;
    tile.scales = rows.rhs + packed.scales + panel * packed.scales_panel + group * kPanelColumns * packed.scale_bytes;
    tile.scales_stride = packed.scales_panel;
    tile.zero_points = nullptr;
    tile.zero_points_stride = packed.zero_points_panel;
    if (packed.zero_points_panel)
        tile.zero_points = reinterpret_cast<const int8_t *>(rows.rhs) + packed.zero_points +
                           panel * packed.zero_points_panel + group * kPanelColumns;
    tile.bf16_scales = packed.scale_bytes == 2;
    tile.steps = packed.steps - step;
    tile.group_steps = group_steps;
    tile.first = tile.last = true;
    tile.partial = nullptr;
    tile.row = rows.out + row;
    tile.column = (panel - rows.panel) * kPanelColumns;
    tile.rows = rows.count - row;
    tile.row_scales = rows.lhs.scales + rows.first + row;
    tile.bias = rows.bias;
    return tile;
}

inline void run_parts(const Tiles::Choice &choice, const Int4Tile &tile) {
    for (size_t part = 0; part < choice.parts; ++part) choice.kernel(tile, part * (kPanelColumns / choice.parts));
}

// Tiles as even as can be: `most` rows at most.
inline size_t tile_rows_of(size_t rows, size_t most) { return round_up(ceil_div(rows, ceil_div(rows, most)), 2); }

void run_small(const Int4Layer &layer, const Int4Rows &rows, const Range &panels) {
    const size_t high = tile_rows_of(rows.count, Tiles::most_rows(layer.kind != 0, false));
    for (size_t panel = panels.begin; panel < panels.end;) {
        size_t taken = 1;
        for (size_t row = 0; row < rows.count; row += high) {
            const size_t count = min_size(high, rows.count - row);
            // Several panels at a time only where one tile has all rows.
            const Tiles::Choice choice = Tiles::narrow(layer.kind, count, rows.count <= high ? panels.end - panel : 1);
            Int4Tile tile = tile_at(layer, rows, row, panel, 0);
            tile.rows = count;
            run_parts(choice, tile);
            taken = choice.panels;
        }
        panel += taken;
    }
}

}  // namespace
