// Tiles on SMMLA: 2 rows x 8 k times 2 columns x 8 k per instruction.
//
// A tile is R row pairs x P panels of 4 column pairs, R * 4P sums of 2 x 2:
//   R = 6, P = 1   12 rows x  8 columns   24 registers of sums, 4 of rhs, lhs streams   (the GEMM tile)
//   R = 2, P = 3    4 rows x 24 columns   24 sums, 2 of lhs, rhs streams                (M = 3, 4)
//   R = 1, P = 4    2 rows x 32 columns   16 sums, 1 of lhs, rhs streams                (M = 1, 2)
// A register of sums holds [row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1]. 12 or more of them cover
// the latency of SMMLA on 4 pipelines. One row takes SMMLA with zeros for the second row: loads limit it, not products,
// and the sums come out as they do for more rows.
#pragma once

#include "quant/int8_epilogue.h"

namespace vac::VAC_TIER_NS {
namespace {

constexpr size_t kUnitRows = 2;    // a unit of lhs is a pair of rows
constexpr size_t kRowBytes = 8;    // from the first row of a pair to the second
constexpr size_t kUnitKBytes = 2;  // of a unit, per k
constexpr size_t kFullPanels = 1;  // at a time for full tiles

inline float32x4_t low_pair_twice(float32x4_t v) {
    return vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(v), 0));
}
inline float32x4_t high_pair_twice(float32x4_t v) {
    return vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(v), 1));
}
inline void column_pairs(F32x8 v, float32x4_t (&pairs)[4]) {
    pairs[0] = low_pair_twice(v.lo), pairs[1] = high_pair_twice(v.lo);
    pairs[2] = low_pair_twice(v.hi), pairs[3] = high_pair_twice(v.hi);
}

// Two registers of sums in BF16, two columns of one row to a 32-bit element: rows 0 1 0 1.
inline uint32x4_t bf16_pairs(float32x4_t low, float32x4_t high) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}

// Scales, BF16 and nothing else. Inlined, or the sums would live in memory.
template <int R, int P>
[[gnu::always_inline]] inline void write_bf16(const Tile &tile, const int32x4_t (&sums)[R][4 * P], size_t row,
                                              size_t column, size_t first) {
    const Target &target = *tile.target;
    const size_t stride = target.out_stride;
    for (int p = 0; p < P; ++p, column += kPanelColumns) {
        float32x4_t scales[4];
        column_pairs(F32::load(target.scales + column), scales);
        uint16_t *out = static_cast<uint16_t *>(target.out) + row * stride + column;
        for (int r = 0; r < R; ++r, out += 2 * stride) {
            const float32x4_t row_scales = vld1q_f32(tile.pair_scales + 2 * first + 4 * r);
            float32x4_t v[4];
            for (int c = 0; c < 4; ++c)
                v[c] = vmulq_f32(vmulq_f32(vcvtq_f32_s32(sums[r][4 * p + c]), row_scales), scales[c]);
            const uint32x4_t left = bf16_pairs(v[0], v[1]), right = bf16_pairs(v[2], v[3]);
            vst1q_u16(out, vreinterpretq_u16_u32(vuzp1q_u32(left, right)));
            // Only the last pair of a tile can lack its second row.
            if (r == R - 1 && __builtin_expect(tile.rows & 1, 0)) break;
            vst1q_u16(out + stride, vreinterpretq_u16_u32(vuzp2q_u32(left, right)));
        }
    }
}

inline int32x4_t first_row(int32x4_t c01, int32x4_t c23) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(c01), vreinterpretq_s64_s32(c23)));
}
inline int32x4_t second_row(int32x4_t c01, int32x4_t c23) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(c01), vreinterpretq_s64_s32(c23)));
}

// The same of a lone row: the upper halves of the sums are nothing.
template <int P>
[[gnu::always_inline]] inline void write_bf16_row(const Tile &tile, const int32x4_t (&sums)[1][4 * P], size_t row,
                                                  size_t column, size_t first) {
    const Target &target = *tile.target;
    uint16_t *out = static_cast<uint16_t *>(target.out) + row * target.out_stride + column;
    const float32x4_t row_scale = vld1q_dup_f32(tile.row_scales + first);
    for (int p = 0; p < P; ++p) {
        const F32x8 scales = F32::load(target.scales + column + 8 * p);
        const F32x8 v = {vcvtq_f32_s32(first_row(sums[0][4 * p], sums[0][4 * p + 1])),
                         vcvtq_f32_s32(first_row(sums[0][4 * p + 2], sums[0][4 * p + 3]))};
        BF16::store(out + 8 * p, v * row_scale * scales);
    }
}

// Everything else.
template <int R, int P>
[[gnu::always_inline]] inline void write_out(const Tile &tile, const int32x4_t (&sums)[R][4 * P], size_t column,
                                             size_t first) {
    int32_t rows[2 * R][8 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 2 * P; ++c) {
            vst1q_s32(rows[2 * r] + 4 * c, first_row(sums[r][2 * c], sums[r][2 * c + 1]));
            vst1q_s32(rows[2 * r + 1] + 4 * c, second_row(sums[r][2 * c], sums[r][2 * c + 1]));
        }
    }
    finish_rows(tile, first, tile.rows, column, rows[0], 8 * P);
}

// A lone row: an 8-byte load clears what would be the second one.
template <bool kLoneRow>
inline int8x16_t load_lhs(const int8_t *lhs) {
    return kLoneRow ? vcombine_s8(vld1_s8(lhs), vdup_n_s8(0)) : vld1q_s8(lhs);
}

// Runs `groups` groups of P panels, and of each `count` tiles one below the other. kPlain: the usual end, straight to
// BF16 without zero points or a bias, follows the sums without a branch.
template <int R, int P, bool kLoneRow, bool kPlain>
void run_tiles(const Tile &tile, size_t count, size_t groups) {
    constexpr size_t kLhsStep = 16, kRhsStep = 64, kSums = kTileRows * kPanelColumns * P;
    int32_t *partial = tile.partial;
    int32x4_t sums[R][4 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 4 * P; ++c) sums[r][c] = vdupq_n_s32(0);
    }
    const int8_t *panels = tile.rhs;
    size_t column = tile.column, i = 0;
    const int8_t *const *units = tile.lhs;
    while (groups != 0) {
        if (!tile.first) {
            for (int r = 0; r < R; ++r) {
                for (int c = 0; c < 4 * P; ++c) sums[r][c] = vld1q_s32(partial + 4 * (4 * P * r + c));
            }
        }
        const int8_t *lhs[R], *rhs[P];
        for (int r = 0; r < R; ++r) lhs[r] = units[r] + tile.lhs_offset;
        for (int p = 0; p < P; ++p) rhs[p] = panels + p * tile.rhs_stride;

        // What the sums leave of the registers holds the operand with fewer vectors; the other one streams.
        const auto step = [&](size_t s) __attribute__((always_inline)) {
            if constexpr (R > 4 * P) {
                int8x16_t b[4 * P];
                for (int c = 0; c < 4 * P; ++c) b[c] = vld1q_s8(rhs[c / 4] + s * kRhsStep + 16 * (c % 4));
                for (int r = 0; r < R; ++r) {
                    const int8x16_t a = load_lhs<kLoneRow>(lhs[r] + s * kLhsStep);
                    for (int c = 0; c < 4 * P; ++c) sums[r][c] = vmmlaq_s32(sums[r][c], a, b[c]);
                }
            } else {
                int8x16_t a[R];
                for (int r = 0; r < R; ++r) a[r] = load_lhs<kLoneRow>(lhs[r] + s * kLhsStep);
                for (int c = 0; c < 4 * P; ++c) {
                    const int8x16_t b = vld1q_s8(rhs[c / 4] + s * kRhsStep + 16 * (c % 4));
                    for (int r = 0; r < R; ++r) sums[r][c] = vmmlaq_s32(sums[r][c], a[r], b);
                }
            }
            // Loads of the next step are not drawn into this one, to be paired: there is no register for them.
            asm volatile("" ::: "memory");
        };
        const auto steps = [&]() __attribute__((always_inline)) {
            step(0), step(1), step(2), step(3), step(4), step(5), step(6), step(7);
        };
        // The last steps stand behind the loop, in one piece with what follows them, so that the two overlap.
        for (size_t k = tile.k; k > kKAlign; k -= kKAlign) {
            steps();
            for (int r = 0; r < R; ++r) lhs[r] += 8 * kLhsStep;
            for (int p = 0; p < P; ++p) rhs[p] += 8 * kRhsStep;
        }
        steps();
        // Or the compiler would bring each sum's products to its end, and keep all operands until then.
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < 4 * P; ++c) asm volatile("" : "+w"(sums[r][c]));
        }

        const size_t first = i * 2 * R, row = tile.row + first;
        if constexpr (kPlain && kLoneRow) {
            write_bf16_row<P>(tile, sums, row, column, first);
        } else if constexpr (kPlain) {
            write_bf16<R, P>(tile, sums, row, column, first);
        } else if (tile.last) {
            write_out<R, P>(tile, sums, column, first);
        } else {
            for (int r = 0; r < R; ++r) {
                for (int c = 0; c < 4 * P; ++c) vst1q_s32(partial + 4 * (4 * P * r + c), sums[r][c]);
            }
        }
        // Here, not at the loop's head: what ends a tile is then one piece with nothing left over for the next.
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < 4 * P; ++c) asm volatile("movi %0.2d, #0" : "=w"(sums[r][c]));
        }
        partial += kSums;
        units += R;
        if (++i < count) continue;
        i = 0;
        units = tile.lhs;
        panels += P * tile.rhs_stride;
        column += P * kPanelColumns;
        --groups;
    }
}

using TileKernel = void (*)(const Tile &, size_t count, size_t groups);
template <int R, int P, bool kLoneRow = false>
constexpr TileKernel kEither[2] = {run_tiles<R, P, kLoneRow, false>, run_tiles<R, P, kLoneRow, true>};
constexpr const TileKernel *kLoneRows[] = {kEither<1, 1, true>, kEither<1, 2, true>, kEither<1, 3, true>,
                                           kEither<1, 4, true>};
// By row pairs, then panels; the longest entry of a line is its tail_panels.
constexpr const TileKernel *kTiles[6][4] = {
    {kEither<1, 1>, kEither<1, 2>, kEither<1, 3>, kEither<1, 4>},
    {kEither<2, 1>, kEither<2, 2>, kEither<2, 3>},
    {kEither<3, 1>, kEither<3, 2>},
    {kEither<4, 1>},
    {kEither<5, 1>},
    {kEither<6, 1>},
};

// Tile::pair_scales of a block of rows.
inline void scales_of_pairs(const float *scales, size_t rows, float *pairs) {
    for (size_t r = 0; r < rows; r += 2) {
        const float32x4_t two = vcombine_f32(vld1_f32(scales + r), vdup_n_f32(0));
        vst1q_f32(pairs + 2 * r, vzip1q_f32(two, two));
    }
}

// Panels at a time for a tile of so many rows.
inline size_t tail_panels(size_t rows) {
    constexpr uint8_t panels[] = {4, 3, 2, 1, 1, 1};
    return panels[(rows - 1) / 2];
}

// `groups` groups of `panels` panels, and of each `count` tiles of tile.rows one below the other. plain: all of out is
// BF16 without zero points or a bias.
inline void run(const Tile &tile, size_t panels, size_t count, size_t groups, bool plain) {
    (tile.rows == 1 ? kLoneRows : kTiles[(tile.rows - 1) / 2])[panels - 1][plain](tile, count, groups);
}

// A gathered block of rows, pair by pair, `stride` bytes apart: only the rows at from[0 .. rows) are read, bytes
// lhs_offset .. of each. A lone row stays where it is.
inline void gather_lhs(const int8_t *const *from, size_t rows, size_t offset, size_t k, int8_t *to, size_t stride) {
    for (size_t r = 0; r + 1 < rows; r += 2) {
        const int8_t *a = from[r] + offset, *b = from[r + 1] + offset;
        int8_t *pair = to + r / 2 * stride;
        for (size_t i = 0; i < 2 * k; i += 16) vst1q_s8(pair + i, vcombine_s8(vld1_s8(a + i), vld1_s8(b + i)));
    }
    if (rows % 2 == 0) return;
    const int8_t *a = from[rows - 1] + offset;
    int8_t *pair = to + rows / 2 * stride;
    for (size_t i = 0; i < 2 * k; i += 16) vst1q_s8(pair + i, vcombine_s8(vld1_s8(a + i), vdup_n_s8(0)));
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
