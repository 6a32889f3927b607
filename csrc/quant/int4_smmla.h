// Tiles of vac_int4_w4a8 on SMMLA: 2 rows x 8 k times 2 columns x 8 k per instruction.
//
// A tile is R pairs of rows x V vectors of 2 columns; V = 2 is half a panel, V = 8 two panels. Registers:
//   per channel   R * V of int32 sums [row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1]
//   groups        and R * V of FP32 sums: int32 sums of a group start at the pattern of 1.5 * 2^23, so that they are
//                 floats once that is subtracted again; multiply-add with the scale follows
// A byte of the weight gives v >> 4 and v & 15 (8 too much: `sums` start 8 times the sum of their k lower), or it was
// widened before.
//
// A lone row fills both rows of the instruction: with v itself, 16 * high + low, and with low = v & 15 alone,
//   row 0   sum of a[8 .. 15] * low
//   row 1   sum of a[0 .. 7] * v, less sum of a[0 .. 7] * low
// so that row 0 + row 1 / 16 is what is wanted, for one AND in place of AND and shift.
#pragma once

#include "quant/int4_tile.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
namespace {

inline int8x16_t high_nibbles(uint8x16_t v) { return vshrq_n_s8(vreinterpretq_s8_u8(v), 4); }
inline int8x16_t low_nibbles(uint8x16_t v) { return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))); }

// Of 4 columns c0 .. c3: [c0 c1 c0 c1] and [c2 c3 c2 c3].
inline float32x4_t pair_of(float32x4_t x, bool upper) {
    const float64x2_t d = vreinterpretq_f64_f32(x);
    return vreinterpretq_f32_f64(upper ? vdupq_laneq_f64(d, 1) : vdupq_laneq_f64(d, 0));
}
inline int32x4_t pair_of(int32x4_t x, bool upper) {
    const int64x2_t d = vreinterpretq_s64_s32(x);
    return vreinterpretq_s32_s64(upper ? vdupq_laneq_s64(d, 1) : vdupq_laneq_s64(d, 0));
}

// The pointer to vector j of a tile whose first vector lies `offset` columns into its first panel.
template <int V>
inline const uint8_t *panel_of(const Int4Tile &tile, int j) {
    return V <= 4 ? tile.values : tile.values + static_cast<size_t>(j / 4) * tile.values_stride;
}

template <int R, int V, bool kWidened>
struct Smmla {
    const int8_t *lhs[R];
    const uint8_t *values[V <= 4 ? 1 : V / 4];

    Smmla(const Int4Tile &tile, size_t offset) {
        for (int r = 0; r < R; ++r) lhs[r] = tile.lhs + static_cast<size_t>(r) * tile.pair_stride;
        for (int p = 0; p < (V <= 4 ? 1 : V / 4); ++p)
            values[p] = tile.values + static_cast<size_t>(p) * tile.values_stride + offset * 8;
    }

    [[gnu::always_inline]] void step(size_t i, int32x4_t (&sums)[R][V]) const {
        if (kWidened) {
            for (int half = 0; half < 2; ++half) {
                const size_t at = 2 * i + static_cast<size_t>(half);
                int8x16_t a[R];
                for (int r = 0; r < R; ++r) a[r] = vld1q_s8(lhs[r] + at * 16);
                for (int j = 0; j < V; ++j) {
                    const int8x16_t b = vreinterpretq_s8_u8(
                        vld1q_u8(values[j / 4] + at * kStepBytes + static_cast<size_t>(j % 4) * 16));
                    for (int r = 0; r < R; ++r) sums[r][j] = vmmlaq_s32(sums[r][j], a[r], b);
                }
            }
            return;
        }
        int8x16_t high[V], low[V];
        for (int j = 0; j < V; ++j) {
            const uint8x16_t v = vld1q_u8(values[j / 4] + i * kStepBytes + static_cast<size_t>(j % 4) * 16);
            high[j] = high_nibbles(v);
            low[j] = low_nibbles(v);
        }
        for (int r = 0; r < R; ++r) {
            const int8x16_t a = vld1q_s8(lhs[r] + i * 32);
            for (int j = 0; j < V; ++j) sums[r][j] = vmmlaq_s32(sums[r][j], a, high[j]);
        }
        for (int r = 0; r < R; ++r) {
            const int8x16_t a = vld1q_s8(lhs[r] + i * 32 + 16);
            for (int j = 0; j < V; ++j) sums[r][j] = vmmlaq_s32(sums[r][j], a, low[j]);
        }
    }

    [[gnu::always_inline]] void advance(size_t steps) {
        constexpr size_t kBytes = kWidened ? 2 * kStepBytes : kStepBytes;
        for (int r = 0; r < R; ++r) lhs[r] += steps * 32;
        for (auto &p : values) p += steps * kBytes;
    }

    [[gnu::always_inline]] void run(size_t steps, int32x4_t (&sums)[R][V]) {
        for (; steps >= 2; steps -= 2) {
            step(0, sums);
            step(1, sums);
            advance(2);
        }
        if (steps) {
            step(0, sums);
            advance(1);
        }
    }
};

// Where the sums of group g start.
template <int R, int V>
[[gnu::always_inline]] inline void start_sums(const Int4Tile &tile, size_t offset, size_t g, int32x4_t (&sums)[R][V]) {
    for (int r = 0; r < R; ++r) {
        const int32x4_t start = vld1q_s32(tile.sums + static_cast<size_t>(r) * tile.sums_stride + g * 8);
        for (int j = 0; j < V; ++j) sums[r][j] = start;
    }
    if (!tile.zero_points) return;
    for (int j = 0; j < V; ++j) {
        const int8_t *p = tile.zero_points + static_cast<size_t>(j / 4) * tile.zero_points_stride + g * kPanelColumns;
        const int32x4_t zero_point = pair_of(load_zero_points(p + offset + j % 4 / 2 * 4), j % 2);
        for (int r = 0; r < R; ++r) {
            const int32x4_t less = vld1q_s32(tile.sums + static_cast<size_t>(r) * tile.sums_stride + g * 8 + 4);
            sums[r][j] = vmlaq_s32(sums[r][j], zero_point, less);
        }
    }
}

// [pair][vector][2 rows x 2 columns] to [row][column].
template <int R, int V, bool kInteger, class Sum>
[[gnu::always_inline]] inline void finish_tile(const Int4Tile &tile, size_t offset, const Sum (&sums)[R][V]) {
    if (!tile.last) {
        Sum *to = static_cast<Sum *>(tile.partial);
        for (int r = 0; r < R; ++r) {
            for (int j = 0; j < V; ++j) to[r * V + j] = sums[r][j];
        }
        return;
    }
    int64_t rows[2 * R][V];
    for (int r = 0; r < R; ++r) {
        for (int j = 0; j < V; j += 2) {
            const int64x2_t x = (int64x2_t)sums[r][j], y = (int64x2_t)sums[r][j + 1];
            vst1q_s64(rows[2 * r] + j, vzip1q_s64(x, y));
            vst1q_s64(rows[2 * r + 1] + j, vzip2q_s64(x, y));
        }
    }
    finish_rows<kInteger>(tile, rows, 2 * V, offset);
}

template <int R, int V, bool kWidened>
void tile_per_channel(const Int4Tile &tile, size_t offset) {
    int32x4_t sums[R][V];
    if (tile.first) {
        start_sums<R, V>(tile, offset, 0, sums);
    } else {
        const auto *from = static_cast<const int32x4_t *>(tile.partial);
        for (int r = 0; r < R; ++r) {
            for (int j = 0; j < V; ++j) sums[r][j] = from[r * V + j];
        }
    }
    Smmla<R, V, kWidened>(tile, offset).run(tile.steps, sums);
    finish_tile<R, V, true>(tile, offset, sums);
}

template <int R, int V, bool kWidened, bool kBf16Scales>
void tile_groups(const Int4Tile &tile, size_t offset) {
    float32x4_t totals[R][V];
    for (int r = 0; r < R; ++r) {
        for (int j = 0; j < V; ++j)
            totals[r][j] = tile.first ? vdupq_n_f32(0) : static_cast<const float32x4_t *>(tile.partial)[r * V + j];
    }
    Smmla<R, V, kWidened> kernel(tile, offset);
    for (size_t g = 0, step = 0; step < tile.steps; ++g, step += tile.group_steps) {
        int32x4_t sums[R][V];
        start_sums<R, V>(tile, offset, g, sums);
        kernel.run(min_size(tile.group_steps, tile.steps - step), sums);
        for (int j = 0; j < V; j += 2) {
            const char *scales = tile.scales + static_cast<size_t>(j / 4) * tile.scales_stride;
            const float32x4_t four = load_scales<kBf16Scales>(scales, g * kPanelColumns + offset + j % 4 * 2);
            for (int i = 0; i < 2; ++i) {
                const float32x4_t scale = pair_of(four, i);
                for (int r = 0; r < R; ++r) {
                    const float32x4_t sum = vsubq_f32(vreinterpretq_f32_s32(sums[r][j + i]), vdupq_n_f32(kMagic));
                    totals[r][j + i] = vfmaq_f32(totals[r][j + i], sum, scale);
                }
            }
        }
    }
    finish_tile<R, V, false>(tile, offset, totals);
}

// --- a lone row ---------------------------------------------------------------

// [step][a[8 .. 15] | -a[0 .. 7]][0 | a[0 .. 7]] of row `row`.
inline void pack_lone(const Quantized &lhs, size_t row, size_t k, int8_t *to) {
    const int8_t *from = lhs.values + row / 2 * lhs.pair_stride + row % 2 * 8;
    for (size_t i = 0; i < k; i += kStep, from += 32, to += 32) {
        const int8x8_t high = vld1_s8(from), low = vld1_s8(from + 16);
        vst1q_s8(to, vcombine_s8(low, vneg_s8(high)));
        vst1q_s8(to + 16, vcombine_s8(vdup_n_s8(0), high));
    }
}

// P panels; `tile.lhs` as pack_lone makes it, `tile.sums` at the row's own.
template <int P>
struct LoneRow {
    static constexpr int V = 4 * P;
    const int8_t *lhs;
    const uint8_t *values[P];

    explicit LoneRow(const Int4Tile &tile) : lhs(tile.lhs) {
        for (int p = 0; p < P; ++p) values[p] = tile.values + static_cast<size_t>(p) * tile.values_stride;
    }

    [[gnu::always_inline]] void step(size_t i, int32x4_t (&sums)[V]) const {
        const int8x16_t x = vld1q_s8(lhs + i * 32), y = vld1q_s8(lhs + i * 32 + 16);
        for (int j = 0; j < V; ++j) {
            const uint8x16_t v = vld1q_u8(values[j / 4] + i * kStepBytes + static_cast<size_t>(j % 4) * 16);
            sums[j] = vmmlaq_s32(sums[j], y, vreinterpretq_s8_u8(v));
            sums[j] = vmmlaq_s32(sums[j], x, low_nibbles(v));
        }
    }

    [[gnu::always_inline]] void run(size_t steps, int32x4_t (&sums)[V]) {
        const auto advance = [&](size_t count) {
            lhs += count * 32;
            for (auto &p : values) p += count * kStepBytes;
        };
        for (; steps >= 2; steps -= 2) {
            step(0, sums);
            step(1, sums);
            advance(2);
        }
        if (steps) {
            step(0, sums);
            advance(1);
        }
    }
};

// Sums of group g of 4P columns, exact.
template <int P>
[[gnu::always_inline]] inline void lone_group(const Int4Tile &tile, LoneRow<P> &kernel, size_t g, size_t steps,
                                              int32x4_t (&out)[2 * P]) {
    int32x4_t sums[4 * P];
    const int32x4_t start = vcombine_s32(vld1_s32(tile.sums + g * 8), vdup_n_s32(0));
    for (int j = 0; j < 4 * P; ++j) sums[j] = start;
    kernel.run(steps, sums);
    for (int c = 0; c < 2 * P; ++c) {
        const int64x2_t a = vreinterpretq_s64_s32(sums[2 * c]), b = vreinterpretq_s64_s32(sums[2 * c + 1]);
        const int32x4_t low = vreinterpretq_s32_s64(vzip1q_s64(a, b)), high = vreinterpretq_s32_s64(vzip2q_s64(a, b));
        out[c] = vsraq_n_s32(low, high, 4);
    }
    if (!tile.zero_points) return;
    for (int c = 0; c < 2 * P; ++c) {
        const int8_t *p = tile.zero_points + static_cast<size_t>(c / 2) * tile.zero_points_stride + g * kPanelColumns;
        out[c] = vmlaq_n_s32(out[c], load_zero_points(p + c % 2 * 4), tile.sums[g * 8 + 4]);
    }
}

template <int P>
void lone_per_channel(const Int4Tile &tile, size_t) {
    LoneRow<P> kernel(tile);
    int32x4_t out[2 * P];
    lone_group<P>(tile, kernel, 0, tile.steps, out);
    finish_rows<true>(tile, out, 8 * P, 0);
}

template <int P, bool kBf16Scales>
void lone_groups(const Int4Tile &tile, size_t) {
    LoneRow<P> kernel(tile);
    float32x4_t totals[2 * P];
    for (auto &total : totals) total = vdupq_n_f32(0);
    for (size_t g = 0, step = 0; step < tile.steps; ++g, step += tile.group_steps) {
        int32x4_t sums[2 * P];
        lone_group<P>(tile, kernel, g, min_size(tile.group_steps, tile.steps - step), sums);
        for (int c = 0; c < 2 * P; ++c) {
            const char *scales = tile.scales + static_cast<size_t>(c / 2) * tile.scales_stride;
            const float32x4_t scale = load_scales<kBf16Scales>(scales, g * kPanelColumns + c % 2 * 4);
            const float32x4_t sum = vsubq_f32(vreinterpretq_f32_s32(sums[c]), vdupq_n_f32(kMagic));
            totals[c] = vfmaq_f32(totals[c], sum, scale);
        }
    }
    finish_rows<false>(tile, totals, 8 * P, 0);
}

// --- which tile for how many rows ----------------------------------------------

struct Tiles {
    // By kind: per channel, groups with FP32 scales, groups with BF16 scales.
    static constexpr int kind(bool groups, bool bf16_scales) { return groups ? 1 + bf16_scales : 0; }

    struct Choice {
        TileKernel kernel;
        size_t panels, parts;  // panels at a time; or parts of a panel, one after the other
    };

    // Pairs of rows at most, in registers or widened.
    static size_t most_rows(bool groups, bool widened) { return widened ? (groups ? 6 : 8) : (groups ? 12 : 16); }

    static Choice lone(int kind, size_t panels) {
        static constexpr TileKernel kernels[3][2] = {{lone_per_channel<1>, lone_per_channel<2>},
                                                     {lone_groups<1, false>, lone_groups<2, false>},
                                                     {lone_groups<1, true>, lone_groups<2, true>}};
        const size_t count = min_size(panels, 2);
        return {kernels[kind][count - 1], count, 1};
    }

    static Choice narrow(int kind, size_t rows, size_t panels) {
        static constexpr TileKernel two_panels[3] = {tile_per_channel<1, 8, false>, tile_groups<1, 8, false, false>,
                                                     tile_groups<1, 8, false, true>};
        static constexpr TileKernel kernels[3][8] = {
            {tile_per_channel<1, 4, false>, tile_per_channel<2, 4, false>, tile_per_channel<3, 4, false>,
             tile_per_channel<4, 4, false>, tile_per_channel<5, 2, false>, tile_per_channel<6, 2, false>,
             tile_per_channel<7, 2, false>, tile_per_channel<8, 2, false>},
            {tile_groups<1, 4, false, false>, tile_groups<2, 4, false, false>, tile_groups<3, 2, false, false>,
             tile_groups<4, 2, false, false>, tile_groups<5, 2, false, false>, tile_groups<6, 2, false, false>},
            {tile_groups<1, 4, false, true>, tile_groups<2, 4, false, true>, tile_groups<3, 2, false, true>,
             tile_groups<4, 2, false, true>, tile_groups<5, 2, false, true>, tile_groups<6, 2, false, true>},
        };
        const size_t pairs = ceil_div(rows, 2), whole = kind == 0 ? 4 : 2;
        if (pairs == 1 && panels >= 2) return {two_panels[kind], 2, 1};
        return {kernels[kind][pairs - 1], 1, pairs <= whole ? size_t{1} : size_t{2}};
    }

    static Choice widened(int kind, size_t rows) {
        static constexpr TileKernel kernels[3][4] = {
            {tile_per_channel<1, 4, true>, tile_per_channel<2, 4, true>, tile_per_channel<3, 4, true>,
             tile_per_channel<4, 4, true>},
            {tile_groups<1, 4, true, false>, tile_groups<2, 4, true, false>, tile_groups<3, 4, true, false>},
            {tile_groups<1, 4, true, true>, tile_groups<2, 4, true, true>, tile_groups<3, 4, true, true>},
        };
        return {kernels[kind][ceil_div(rows, 2) - 1], 1, 1};
    }

    // What `widened` kernels read: the panel as int8, [step][high nibbles, 64 bytes][low nibbles, 64 bytes].
    static const uint8_t *widen(const uint8_t *values, size_t steps, uint8_t *scratch) {
        uint8_t *to = scratch;
        for (size_t i = 0; i < steps; ++i, values += kStepBytes, to += 2 * kStepBytes) {
            for (size_t j = 0; j < kStepBytes; j += 16) {
                const uint8x16_t v = vld1q_u8(values + j);
                vst1q_u8(to + j, vreinterpretq_u8_s8(high_nibbles(v)));
                vst1q_u8(to + kStepBytes + j, vreinterpretq_u8_s8(low_nibbles(v)));
            }
        }
        return scratch;
    }
};

}  // namespace
#endif
