// BF16 linear on BFMMLA: 2 rows x 4 k times 2 columns x 4 k per instruction.
//
// A tile is R row pairs x P panels of 4 column pairs, R * 4P sums of 2 x 2:
//   R = 6, P = 1   12 rows x  8 columns   24 registers of sums, 4 of rhs, lhs streams   (the GEMM tile)
//   R = 2, P = 3    4 rows x 24 columns   24 sums, 2 of lhs, rhs streams                (M = 3, 4)
//   R = 1, P = 4    2 rows x 32 columns   16 sums, 1 of lhs, rhs streams                (M = 1, 2)
// A register of sums holds [row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1]. Each sum is one chain
// over k, whatever the tile; 16 chains or more cover the latency of BFMMLA on 4 pipelines.
#include "gemm/kernels.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "gemm/blocked.h"
#include "gemm/epilogue.h"

namespace {

inline bfloat16x8_t load(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

// A lone row is read as it is, with zeros for the second row of the pair: an 8-byte load clears the upper half.
template <bool kLoneRow>
inline bfloat16x8_t load_lhs(const uint16_t *lhs) {
    if (!kLoneRow) return load(lhs);
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(lhs), vdup_n_u16(0)));
}

inline float32x4_t first_row(float32x4_t c01, float32x4_t c23) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(c01), vreinterpretq_f64_f32(c23)));
}
inline float32x4_t second_row(float32x4_t c01, float32x4_t c23) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(c01), vreinterpretq_f64_f32(c23)));
}
// Two registers of sums in BF16, two columns of one row to a 32-bit element: rows 0 1 0 1.
inline uint32x4_t bf16_from_f32(float32x4_t low, float32x4_t high) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}

template <int R, int P>
inline void write_out(const Tile &tile, const float32x4_t (&sums)[R][4 * P]) {
    const vac_gemm_args &args = *tile.args;
    const bool plain = args.out_dtype == VAC_BF16 && !args.bias && !args.residual;
    if (plain && tile.column + P * kPanelColumns <= args.n) {
        const size_t stride = args.out_stride;
        uint16_t *out = static_cast<uint16_t *>(args.out) + tile.row * stride + tile.column;
        for (int r = 0; r < R; ++r, out += 2 * stride) {
            uint32x4_t left[P], right[P];
            for (int p = 0; p < P; ++p) {
                left[p] = bf16_from_f32(sums[r][4 * p], sums[r][4 * p + 1]);
                right[p] = bf16_from_f32(sums[r][4 * p + 2], sums[r][4 * p + 3]);
            }
            for (int p = 0; p < P; ++p) vst1q_u16(out + 8 * p, vreinterpretq_u16_u32(vuzp1q_u32(left[p], right[p])));
            // Only the last pair of a tile can lack its second row.
            if (r == R - 1 && (tile.rows & 1)) break;
            for (int p = 0; p < P; ++p)
                vst1q_u16(out + stride + 8 * p, vreinterpretq_u16_u32(vuzp2q_u32(left[p], right[p])));
        }
        return;
    }
    float rows[2 * R][8 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 2 * P; ++c) {
            vst1q_f32(rows[2 * r] + 4 * c, first_row(sums[r][2 * c], sums[r][2 * c + 1]));
            vst1q_f32(rows[2 * r + 1] + 4 * c, second_row(sums[r][2 * c], sums[r][2 * c + 1]));
        }
    }
    finish_rows(args, rows[0], 8 * P, tile.rows, tile.row, tile.column);
}

// lhs: [k / 4][R pairs][2 rows][4 k], or the row itself (kLoneRow). rhs: P panels.
template <int R, int P, bool kLoneRow>
void run_tile(const Tile &tile) {
    constexpr size_t kLhsStep = kLoneRow ? 4 : 8 * R, kRhsStep = 32;
    float32x4_t sums[R][4 * P];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 4 * P; ++c)
            sums[r][c] = tile.first ? vdupq_n_f32(0) : vld1q_f32(tile.partial + 4 * (4 * P * r + c));
    }
    const auto *lhs = static_cast<const uint16_t *>(tile.lhs);
    const uint16_t *rhs[P];
    for (int p = 0; p < P; ++p)
        rhs[p] = reinterpret_cast<const uint16_t *>(static_cast<const char *>(tile.rhs) + p * tile.rhs_stride);

    const auto step = [&](size_t i) {
        bfloat16x8_t a[R];
        for (int r = 0; r < R; ++r) a[r] = load_lhs<kLoneRow>(lhs + i * kLhsStep + 8 * r);
        for (int p = 0; p < P; ++p) {
            for (int c = 0; c < 4; ++c) {
                const bfloat16x8_t b = load(rhs[p] + i * kRhsStep + 8 * c);
                for (int r = 0; r < R; ++r) sums[r][4 * p + c] = vbfmmlaq_f32(sums[r][4 * p + c], a[r], b);
            }
        }
    };
    constexpr size_t kUnroll = 8;
    size_t steps = tile.k / 4;
    for (; steps >= kUnroll; steps -= kUnroll) {
        for (size_t i = 0; i < kUnroll; ++i) step(i);
        lhs += kUnroll * kLhsStep;
        for (int p = 0; p < P; ++p) rhs[p] += kUnroll * kRhsStep;
    }
    for (; steps; --steps) {
        step(0);
        lhs += kLhsStep;
        for (int p = 0; p < P; ++p) rhs[p] += kRhsStep;
    }

    if (tile.last) return write_out<R, P>(tile, sums);
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < 4 * P; ++c) vst1q_f32(tile.partial + 4 * (4 * P * r + c), sums[r][c]);
    }
}

using TileKernel = void (*)(const Tile &);
constexpr TileKernel kLoneRow[] = {run_tile<1, 1, true>, run_tile<1, 2, true>, run_tile<1, 3, true>,
                                   run_tile<1, 4, true>};
// By row pairs, then panels; the longest entry of a line is its tail_panels.
constexpr TileKernel kTiles[6][4] = {
    {run_tile<1, 1, false>, run_tile<1, 2, false>, run_tile<1, 3, false>, run_tile<1, 4, false>},
    {run_tile<2, 1, false>, run_tile<2, 2, false>, run_tile<2, 3, false>},
    {run_tile<3, 1, false>, run_tile<3, 2, false>},
    {},  // 7 and 8 rows are two tiles of 4
    {run_tile<5, 1, false>},
    {run_tile<6, 1, false>},
};

inline uint16x8_t load_some(const uint16_t *p, size_t count) {
    if (count >= 8) return vld1q_u16(p);
    uint16_t buffer[8] = {};
    for (size_t i = 0; i < count; ++i) buffer[i] = p[i];
    return vld1q_u16(buffer);
}

struct Bfmmla {
    static constexpr size_t kMaxK = kBlockLhsRowBytes / 2;

    static size_t tail_panels(size_t rows) {
        constexpr uint8_t panels[] = {4, 3, 2, 3, 1, 1};
        return panels[(rows - 1) / 2];
    }

    static size_t lhs_tile_bytes(size_t rows, size_t k) { return round_up(rows, 2) * round_up(k, 4) * 2; }

    // One pair of rows, groups of 4 k `step` elements apart; a missing second row and what is beyond K is zero.
    template <bool kBoth>
    static void pack_pair(const uint16_t *a, const uint16_t *b, size_t k, uint16_t *to, size_t step) {
        const auto put = [&](uint16x8_t first, uint16x8_t second, bool upper) {
            const uint64x2_t x = vreinterpretq_u64_u16(first), y = vreinterpretq_u64_u16(second);
            vst1q_u16(to, vreinterpretq_u16_u64(vzip1q_u64(x, y)));
            if (upper) vst1q_u16(to + step, vreinterpretq_u16_u64(vzip2q_u64(x, y)));
            to += 2 * step;
        };
        const uint16x8_t zero = vdupq_n_u16(0);
        size_t i = 0;
        for (; i + 16 <= k; i += 16) {
            put(vld1q_u16(a + i), kBoth ? vld1q_u16(b + i) : zero, true);
            put(vld1q_u16(a + i + 8), kBoth ? vld1q_u16(b + i + 8) : zero, true);
        }
        for (; i < k; i += 8) put(load_some(a + i, k - i), kBoth ? load_some(b + i, k - i) : zero, k - i > 4);
    }

    // 16 sums for 8 rows x 8 columns would wait for each other where BFMMLA has a latency of 5: two tiles of 4 rows
    // and 3 panels have 24.
    static bool two_tiles(size_t rows) { return rows == 7 || rows == 8; }

    // [k / 4][pairs][2 rows][4 k]
    static void pack_lhs(const vac_gemm_args &args, size_t row, size_t rows, size_t k0, size_t k, void *packed) {
        if (two_tiles(rows)) {
            pack_lhs(args, row, 4, k0, k, packed);
            return pack_lhs(args, row + 4, rows - 4, k0, k, static_cast<char *>(packed) + lhs_tile_bytes(4, k));
        }
        const size_t pairs = ceil_div(rows, 2), step = 8 * pairs;
        for (size_t pair = 0; pair < pairs; ++pair) {
            const uint16_t *a = static_cast<const uint16_t *>(args.lhs) + (row + 2 * pair) * args.lhs_stride + k0;
            uint16_t *to = static_cast<uint16_t *>(packed) + 8 * pair;
            if (2 * pair + 1 < rows)
                pack_pair<true>(a, a + args.lhs_stride, k, to, step);
            else
                pack_pair<false>(a, nullptr, k, to, step);
        }
    }

    static const char *rhs(const vac_gemm_args &args, size_t panel, size_t, size_t k0, size_t, void *, size_t *stride) {
        *stride = panel_bytes(VAC_BF16, args.k);
        return static_cast<const char *>(args.rhs) + panel * *stride + k0 * kPanelColumns * 2;
    }

    static void run(Tile tile, size_t panels) {
        const size_t k = tile.k, rows = tile.rows;
        tile.k = round_up(k, 4);
        if (!two_tiles(rows)) return kTiles[(rows - 1) / 2][panels - 1](tile);
        tile.rows = 4;
        kTiles[1][panels - 1](tile);
        tile.rows = rows - 4;
        tile.row += 4;
        tile.lhs = static_cast<const char *>(tile.lhs) + lhs_tile_bytes(4, k);
        tile.partial += 4 * kPanelColumns * panels;
        kTiles[1][panels - 1](tile);
    }
};

// M <= 4: all of K in one go, each weight read once.
void run_small(const vac_gemm_args &args, const Range &panels, char *workspace) {
    Tile tile;
    tile.args = &args;
    tile.k = round_up(args.k, 4);
    tile.first = tile.last = true;
    tile.partial = nullptr;
    tile.row = 0;
    tile.rows = args.m;
    const bool in_place = args.m == 1 && args.k % 4 == 0;
    tile.lhs = in_place ? args.lhs : workspace;
    if (!in_place) Bfmmla::pack_lhs(args, 0, args.m, 0, args.k, workspace);
    const TileKernel *kernels = in_place ? kLoneRow : kTiles[(args.m - 1) / 2];
    const size_t group = Bfmmla::tail_panels(args.m);
    for (size_t panel = panels.begin; panel < panels.end; panel += group) {
        tile.rhs = Bfmmla::rhs(args, panel, group, 0, args.k, nullptr, &tile.rhs_stride);
        tile.column = panel * kPanelColumns;
        kernels[min_size(group, panels.end - panel) - 1](tile);
    }
}

}  // namespace

namespace vac::VAC_TIER_NS {

void gemm_any_bf16_bf16p4x8_bfmmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                   char *workspace) {
    const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
    if (args.m <= kSmallRows)
        run_small(args, part.panels, workspace);
    else
        run_blocked<Bfmmla>(args, part, workspace);
}

}  // namespace vac::VAC_TIER_NS
#endif
