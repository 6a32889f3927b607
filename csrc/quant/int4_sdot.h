// Tiles of vac_int4_w4a8 on SDOT: 4 k of a row times 4 k x 4 columns per instruction.
//
// A tile is R rows x Q vectors of 4 columns; Q = 1 is half a panel, Q = 4 two panels. Registers: R * Q of int32 sums,
// and with groups as many FP32 sums; see int4_smmla.h for how the one become the other.
#pragma once

#include "quant/int4_tile.h"

#if !defined(__ARM_FEATURE_MATMUL_INT8)
namespace {

template <int R, int Q>
struct Sdot {
    static constexpr int kPairs = (R + 1) / 2, kPanels = Q <= 2 ? 1 : Q / 2;
    const int8_t *lhs[kPairs];
    const uint8_t *values[kPanels];

    Sdot(const Int4Tile &tile, size_t offset) {
        for (int r = 0; r < kPairs; ++r) lhs[r] = tile.lhs + static_cast<size_t>(r) * tile.pair_stride;
        for (int p = 0; p < kPanels; ++p)
            values[p] = tile.values + static_cast<size_t>(p) * tile.values_stride + offset * 4;
    }

    // Both rows of a pair: 4 k of the first are lanes 0 and 1, of the second 2 and 3.
    template <int kWord>
    [[gnu::always_inline]] static void multiply(const int8x16_t (&a)[kPairs], int8x16_t w, int q,
                                                int32x4_t (&sums)[R][Q]) {
        for (int r = 0; r < R; ++r) {
            if (r % 2 == 0)
                sums[r][q] = vdotq_laneq_s32(sums[r][q], w, a[r / 2], kWord);
            else
                sums[r][q] = vdotq_laneq_s32(sums[r][q], w, a[r / 2], 2 + kWord);
        }
    }

    [[gnu::always_inline]] void step(int32x4_t (&sums)[R][Q]) {
        int8x16_t high[kPairs], low[kPairs];
        for (int r = 0; r < kPairs; ++r) {
            high[r] = vld1q_s8(lhs[r]);
            low[r] = vld1q_s8(lhs[r] + 16);
            lhs[r] += 32;
        }
        for (int q = 0; q < Q; ++q) {
            const uint8_t *p = values[q / 2] + q % 2 * 16;
            const uint8x16_t first = vld1q_u8(p), second = vld1q_u8(p + 32);
            multiply<0>(high, vshrq_n_s8(vreinterpretq_s8_u8(first), 4), q, sums);
            multiply<0>(low, vreinterpretq_s8_u8(vandq_u8(first, vdupq_n_u8(15))), q, sums);
            multiply<1>(high, vshrq_n_s8(vreinterpretq_s8_u8(second), 4), q, sums);
            multiply<1>(low, vreinterpretq_s8_u8(vandq_u8(second, vdupq_n_u8(15))), q, sums);
        }
        for (auto &p : values) p += kStepBytes;
    }

    [[gnu::always_inline]] void run(size_t steps, int32x4_t (&sums)[R][Q]) {
        for (; steps >= 2; steps -= 2) {
            step(sums);
            step(sums);
        }
        if (steps) step(sums);
    }
};

// Where the sums of group g start.
template <int R, int Q>
[[gnu::always_inline]] inline void start_sums(const Int4Tile &tile, size_t offset, size_t g, int32x4_t (&sums)[R][Q]) {
    for (int r = 0; r < R; ++r) {
        const int32_t *start = tile.sums + static_cast<size_t>(r / 2) * tile.sums_stride + g * 8 + r % 2 * 2;
        for (int q = 0; q < Q; ++q) sums[r][q] = vdupq_n_s32(start[0]);
        if (!tile.zero_points) continue;
        for (int q = 0; q < Q; ++q) {
            const int8_t *p = tile.zero_points + static_cast<size_t>(q / 2) * tile.zero_points_stride;
            const int32x4_t zero_point = load_zero_points(p + g * kPanelColumns + offset + q % 2 * 4);
            sums[r][q] = vmlaq_n_s32(sums[r][q], zero_point, start[4]);
        }
    }
}

template <int R, int Q, bool kInteger, class Sum>
[[gnu::always_inline]] inline void finish_tile(const Int4Tile &tile, size_t offset, const Sum (&sums)[R][Q]) {
    if (tile.last) return finish_rows<kInteger>(tile, sums, 4 * Q, offset);
    Sum *to = static_cast<Sum *>(tile.partial);
    for (int r = 0; r < R; ++r) {
        for (int q = 0; q < Q; ++q) to[r * Q + q] = sums[r][q];
    }
}

template <int R, int Q>
void tile_per_channel(const Int4Tile &tile, size_t offset) {
    int32x4_t sums[R][Q];
    if (tile.first) {
        start_sums<R, Q>(tile, offset, 0, sums);
    } else {
        const auto *from = static_cast<const int32x4_t *>(tile.partial);
        for (int r = 0; r < R; ++r) {
            for (int q = 0; q < Q; ++q) sums[r][q] = from[r * Q + q];
        }
    }
    Sdot<R, Q>(tile, offset).run(tile.steps, sums);
    finish_tile<R, Q, true>(tile, offset, sums);
}

template <int R, int Q, bool kBf16Scales>
void tile_groups(const Int4Tile &tile, size_t offset) {
    float32x4_t totals[R][Q];
    for (int r = 0; r < R; ++r) {
        for (int q = 0; q < Q; ++q)
            totals[r][q] = tile.first ? vdupq_n_f32(0) : static_cast<const float32x4_t *>(tile.partial)[r * Q + q];
    }
    Sdot<R, Q> kernel(tile, offset);
    for (size_t g = 0, step = 0; step < tile.steps; ++g, step += tile.group_steps) {
        int32x4_t sums[R][Q];
        start_sums<R, Q>(tile, offset, g, sums);
        kernel.run(min_size(tile.group_steps, tile.steps - step), sums);
        for (int q = 0; q < Q; ++q) {
            const char *scales = tile.scales + static_cast<size_t>(q / 2) * tile.scales_stride;
            const float32x4_t scale = load_scales<kBf16Scales>(scales, g * kPanelColumns + offset + q % 2 * 4);
            for (int r = 0; r < R; ++r) {
                const float32x4_t sum = vsubq_f32(vreinterpretq_f32_s32(sums[r][q]), vdupq_n_f32(kMagic));
                totals[r][q] = vfmaq_f32(totals[r][q], sum, scale);
            }
        }
    }
    finish_tile<R, Q, false>(tile, offset, totals);
}

// --- which tile for how many rows ----------------------------------------------

struct Tiles {
    static constexpr int kind(bool groups, bool bf16_scales) { return groups ? 1 + bf16_scales : 0; }

    struct Choice {
        TileKernel kernel;
        size_t panels, parts;  // panels at a time; or parts of a panel, one after the other
    };

    static size_t most_rows(bool, bool) { return 8; }

    static Choice narrow(int kind, size_t rows, size_t panels) {
        static constexpr TileKernel two_panels[3] = {tile_per_channel<1, 4>, tile_groups<1, 4, false>,
                                                     tile_groups<1, 4, true>};
        static constexpr TileKernel kernels[3][8] = {
            {tile_per_channel<1, 2>, tile_per_channel<2, 2>, tile_per_channel<3, 2>, tile_per_channel<4, 2>,
             tile_per_channel<5, 2>, tile_per_channel<6, 2>, tile_per_channel<7, 2>, tile_per_channel<8, 2>},
            {tile_groups<1, 2, false>, tile_groups<2, 2, false>, tile_groups<3, 2, false>, tile_groups<4, 2, false>,
             tile_groups<5, 1, false>, tile_groups<6, 1, false>, tile_groups<7, 1, false>, tile_groups<8, 1, false>},
            {tile_groups<1, 2, true>, tile_groups<2, 2, true>, tile_groups<3, 2, true>, tile_groups<4, 2, true>,
             tile_groups<5, 1, true>, tile_groups<6, 1, true>, tile_groups<7, 1, true>, tile_groups<8, 1, true>},
        };
        if (rows == 1 && panels >= 2) return {two_panels[kind], 2, 1};
        return {kernels[kind][rows - 1], 1, kind == 0 || rows <= 4 ? size_t{1} : size_t{2}};
    }

    static Choice widened(int kind, size_t rows) { return narrow(kind, rows, 1); }

    // They widen in registers too: 8 rows make up for it.
    static const uint8_t *widen(const uint8_t *values, size_t, uint8_t *) { return values; }
};

}  // namespace
#endif
