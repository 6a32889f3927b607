// Tiles on SDOT by lane: 4 columns x 4 k times 4 k of one row per instruction.
//
// A tile is R rows x P panels of 2 vectors of columns, R * 2P sums:
//   R = 4, P = 3    4 rows x 24 columns   24 registers of sums, 4 of lhs (16 k each), rhs streams
//   R = 1, P = 4    1 row  x 32 columns    8 sums, 1 of lhs, rhs streams
#pragma once

#include "quant/int8_epilogue.h"

namespace vac::VAC_TIER_NS {
namespace {

constexpr size_t kUnitRows = 1;    // a unit of lhs is a row
constexpr size_t kUnitKBytes = 1;  // of a unit, per k
constexpr size_t kFullPanels = 3;  // at a time for full tiles

template <int R, int P>
void run_tile(const Tile &tile) {
    int32x4_t sums[R][2 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 2 * P; ++c)
            sums[r][c] = tile.first ? vdupq_n_s32(0) : vld1q_s32(tile.partial + 4 * (2 * P * r + c));
    }
    const int8_t *lhs[R], *rhs[P];
    for (int r = 0; r < R; ++r) lhs[r] = tile.lhs[r] + tile.lhs_offset;
    for (int p = 0; p < P; ++p) rhs[p] = tile.rhs + p * tile.rhs_stride;
    for (size_t k = 0; k < tile.k; k += 16) {
        int8x16_t a[R];
        for (int r = 0; r < R; ++r) a[r] = vld1q_s8(lhs[r] + k);
        const auto quarter = [&](int q, auto dot) {
            for (int p = 0; p < P; ++p) {
                for (int c = 0; c < 2; ++c) {
                    const int8x16_t b = vld1q_s8(rhs[p] + 32 * q + 16 * c);
                    for (int r = 0; r < R; ++r) sums[r][2 * p + c] = dot(sums[r][2 * p + c], b, a[r]);
                }
            }
        };
        quarter(0, [](int32x4_t sum, int8x16_t b, int8x16_t x) { return vdotq_laneq_s32(sum, b, x, 0); });
        quarter(1, [](int32x4_t sum, int8x16_t b, int8x16_t x) { return vdotq_laneq_s32(sum, b, x, 1); });
        quarter(2, [](int32x4_t sum, int8x16_t b, int8x16_t x) { return vdotq_laneq_s32(sum, b, x, 2); });
        quarter(3, [](int32x4_t sum, int8x16_t b, int8x16_t x) { return vdotq_laneq_s32(sum, b, x, 3); });
        for (int p = 0; p < P; ++p) rhs[p] += 128;
    }
    if (!tile.last) {
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < 2 * P; ++c) vst1q_s32(tile.partial + 4 * (2 * P * r + c), sums[r][c]);
        }
        return;
    }
    int32_t rows[R][8 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 2 * P; ++c) vst1q_s32(rows[r] + 4 * c, sums[r][c]);
    }
    finish_rows(tile, 0, R, tile.column, rows[0], 8 * P);
}

using TileKernel = void (*)(const Tile &);
// By rows, then panels; the longest entry of a line is its tail_panels.
constexpr TileKernel kTiles[4][4] = {
    {run_tile<1, 1>, run_tile<1, 2>, run_tile<1, 3>, run_tile<1, 4>},
    {run_tile<2, 1>, run_tile<2, 2>, run_tile<2, 3>, run_tile<2, 4>},
    {run_tile<3, 1>, run_tile<3, 2>, run_tile<3, 3>},
    {run_tile<4, 1>, run_tile<4, 2>, run_tile<4, 3>},
};

inline size_t tail_panels(size_t rows) { return rows <= 2 ? 4 : 3; }

// `groups` groups of `panels` panels, and of each `count` tiles of tile.rows one below the other: 4 rows at a time, the
// last ones fewer, while the panels stay in L1.
inline void run(const Tile &tile, size_t panels, size_t count, size_t groups, bool) {
    Tile part = tile;
    for (size_t group = 0; group < groups; ++group) {
        for (size_t row = 0; row < count * tile.rows; row += part.rows) {
            part.rows = min_size(tile.rows - row % tile.rows, 4);
            part.row = tile.row + row;
            part.lhs = tile.lhs + row;
            part.row_scales = tile.row_scales + row;
            if (tile.zero_points) part.zero_points = tile.zero_points + row;
            part.partial = tile.partial + (group * count * kTileRows + row) * panels * kPanelColumns;
            kTiles[part.rows - 1][panels - 1](part);
        }
        part.rhs += panels * tile.rhs_stride;
        part.column += panels * kPanelColumns;
    }
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
