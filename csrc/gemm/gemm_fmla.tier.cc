// Linear on FP32 multiply-add, for f32 and f16 under every tier and for bf16 where there is no BFMMLA.
//
// M > 4: lhs is packed as FP32; weights are widened in registers or, from 25 rows on, panel by panel into an L1-sized
// buffer.
// A tile is G groups of 4 rows x P panels of 8 columns, 4G * 2P registers of 4 sums:
//   G = 3, P = 1   12 rows x  8 columns   24 sums, 2 of rhs, 3 of lhs
//   G = 1, P = 2    4 rows x 16 columns   16 sums, 4 of rhs, 1 of lhs
// M <= 4: weights are widened in registers, R rows x P panels, 16 to 24 sums.
// f16 where there is FMLAL: nothing is widened, neither lhs nor weights.
#include "gemm/blocked.h"
#include "gemm/epilogue.h"
#include "gemm/kernels.h"

namespace {

// How a weight's panel is stored: 8 columns at one k.
struct PanelF32 : StoredF32 {
    static void widen(const float *p, float32x4_t &low, float32x4_t &high) {
        low = vld1q_f32(p);
        high = vld1q_f32(p + 4);
    }
};

struct PanelF16 : StoredF16 {
    static void widen(const uint16_t *p, float32x4_t &low, float32x4_t &high) {
        const float16x8_t both = vreinterpretq_f16_u16(vld1q_u16(p));
        low = vcvt_f32_f16(vget_low_f16(both));
        high = vcvt_high_f32_f16(both);
    }
};

#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Columns in the order 0 4 1 5 2 6 3 7.
struct PanelBF16 : StoredBF16 {
    static void widen(const uint16_t *p, float32x4_t &low, float32x4_t &high) {
        const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p));
        low = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
        high = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
};
#endif

// R rows of C registers of sums go to out, or wait for the next block of K.
template <int R, int C>
inline void finish_tile(const Tile &tile, const float32x4_t (&sums)[R][C]) {
    float buffer[R * C * 4];
    float *to = tile.last ? buffer : tile.partial;
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) vst1q_f32(to + 4 * (C * r + c), sums[r][c]);
    }
    if (tile.last) finish_rows(*tile.args, buffer, 4 * C, tile.rows, tile.row, tile.column);
}

// lhs: [k][4G rows]; rhs: P panels of [k][8].
template <class Panel, int G, int P>
void run_tile(const Tile &tile) {
    using Element = typename Panel::Element;
    float32x4_t sums[4 * G][2 * P];
    for (int r = 0; r < 4 * G; ++r) {
        for (int c = 0; c < 2 * P; ++c)
            sums[r][c] = tile.first ? vdupq_n_f32(0) : vld1q_f32(tile.partial + 4 * (2 * P * r + c));
    }
    const float *lhs = static_cast<const float *>(tile.lhs);
    const Element *rhs[P];
    for (int p = 0; p < P; ++p)
        rhs[p] = reinterpret_cast<const Element *>(static_cast<const char *>(tile.rhs) + p * tile.rhs_stride);

    const auto step = [&](size_t i) {
        float32x4_t b[2 * P];
        for (int p = 0; p < P; ++p) Panel::widen(rhs[p] + i * kPanelColumns, b[2 * p], b[2 * p + 1]);
        for (int g = 0; g < G; ++g) {
            const float32x4_t a = vld1q_f32(lhs + i * 4 * G + 4 * g);
            for (int c = 0; c < 2 * P; ++c) {
                sums[4 * g + 0][c] = vfmaq_laneq_f32(sums[4 * g + 0][c], b[c], a, 0);
                sums[4 * g + 1][c] = vfmaq_laneq_f32(sums[4 * g + 1][c], b[c], a, 1);
                sums[4 * g + 2][c] = vfmaq_laneq_f32(sums[4 * g + 2][c], b[c], a, 2);
                sums[4 * g + 3][c] = vfmaq_laneq_f32(sums[4 * g + 3][c], b[c], a, 3);
            }
        }
    };
    size_t k = tile.k;
    for (; k >= 4; k -= 4) {
        for (size_t i = 0; i < 4; ++i) step(i);
        lhs += 4 * 4 * G;
        for (int p = 0; p < P; ++p) rhs[p] += 4 * kPanelColumns;
    }
    for (; k; --k) {
        step(0);
        lhs += 4 * G;
        for (int p = 0; p < P; ++p) rhs[p] += kPanelColumns;
    }

    finish_tile<4 * G, 2 * P>(tile, sums);
}

template <class Panel, bool kWidenFirst>
struct Widened {
    using Type = Panel;
};
template <class Panel>
struct Widened<Panel, true> {
    using Type = PanelF32;
};

// kWidenFirst: panels are widened into scratch, once for all tiles of a block; else by every tile, in registers.
template <class Panel, bool kWidenFirst>
struct Fmla {
    using Element = typename Panel::Element;
    static constexpr size_t kMaxK = kBlockLhsRowBytes / sizeof(float);

    static size_t tail_panels(size_t rows) { return rows <= 4 ? 2 : 1; }

    static size_t lhs_tile_bytes(size_t rows, size_t k) { return round_up(rows, 4) * k * sizeof(float); }

    // [k][rows rounded up to 4] in FP32, the rows added are zero.
    static void pack_lhs(const vac_gemm_args &args, size_t row, size_t rows, size_t k0, size_t k, void *packed) {
        const size_t width = round_up(rows, 4);
        for (size_t g = 0; g < width; g += 4) {
            const Element *from[4];
            float32x4_t keep[4];
            for (size_t r = 0; r < 4; ++r) {
                const bool real = g + r < rows;
                from[r] = static_cast<const Element *>(args.lhs) + (row + (real ? g + r : 0)) * args.lhs_stride + k0;
                keep[r] = vreinterpretq_f32_u32(vdupq_n_u32(real ? ~0u : 0));
            }
            float *to = static_cast<float *>(packed) + g;
            for (size_t i = 0; i < k; i += 4) {
                const size_t count = min_size(k - i, 4);
                float32x4_t x[4];
                for (size_t r = 0; r < 4; ++r) {
                    const float32x4_t value = load_some<Panel>(from[r] + i, count);
                    x[r] =
                        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(value), vreinterpretq_u32_f32(keep[r])));
                }
                const float64x2_t t0 = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1]));
                const float64x2_t t1 = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1]));
                const float64x2_t t2 = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3]));
                const float64x2_t t3 = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
                const float64x2_t y[4] = {vtrn1q_f64(t0, t2), vtrn1q_f64(t1, t3), vtrn2q_f64(t0, t2),
                                          vtrn2q_f64(t1, t3)};
                for (size_t j = 0; j < count; ++j, to += width) vst1q_f32(to, vreinterpretq_f32_f64(y[j]));
            }
        }
    }

    static const char *rhs(const vac_gemm_args &args, size_t panel, size_t count, size_t k0, size_t k, void *scratch,
                           size_t *stride) {
        const size_t bytes = panel_bytes(args.dtype, args.k);
        const char *packed = static_cast<const char *>(args.rhs) + panel * bytes + k0 * kPanelColumns * sizeof(Element);
        *stride = bytes;
        if (!kWidenFirst) return packed;
        *stride = kPanelColumns * kBlockLhsRowBytes;
        for (size_t p = 0; p < count; ++p) {
            const auto *from = reinterpret_cast<const Element *>(packed + p * bytes);
            float *to = reinterpret_cast<float *>(static_cast<char *>(scratch) + p * *stride);
            for (size_t i = 0; i < k * kPanelColumns; i += kPanelColumns) {
                float32x4_t low, high;
                Panel::widen(from + i, low, high);
                vst1q_f32(to + i, low);
                vst1q_f32(to + i + 4, high);
            }
        }
        return static_cast<const char *>(scratch);
    }

    static void run(const Tile &tile, size_t panels) {
        using Tiled = typename Widened<Panel, kWidenFirst>::Type;
        if (tile.rows > 8) return run_tile<Tiled, 3, 1>(tile);
        if (tile.rows > 4) return run_tile<Tiled, 2, 1>(tile);
        return panels == 1 ? run_tile<Tiled, 1, 1>(tile) : run_tile<Tiled, 1, 2>(tile);
    }
};

#if defined(__ARM_FEATURE_FP16_FML)
// The same tiles for f16 with FMLAL, which multiplies f16 and adds in FP32: nothing is widened. It rounds once, like
// FMLA on the widened values, so all f16 kernels give the same bits.
// lhs: [k][4G rows] in f16; rhs: P panels of [k][8].
template <int G, int P>
void run_f16_tile(const Tile &tile) {
    float32x4_t sums[4 * G][2 * P];
    for (int r = 0; r < 4 * G; ++r) {
        for (int c = 0; c < 2 * P; ++c)
            sums[r][c] = tile.first ? vdupq_n_f32(0) : vld1q_f32(tile.partial + 4 * (2 * P * r + c));
    }
    const uint16_t *lhs = static_cast<const uint16_t *>(tile.lhs);
    const uint16_t *rhs[P];
    for (int p = 0; p < P; ++p)
        rhs[p] = reinterpret_cast<const uint16_t *>(static_cast<const char *>(tile.rhs) + p * tile.rhs_stride);

    const auto step = [&](size_t i) {
        float16x8_t b[P];
        for (int p = 0; p < P; ++p) b[p] = vreinterpretq_f16_u16(vld1q_u16(rhs[p] + i * kPanelColumns));
        for (int g = 0; g < G; ++g) {
            const float16x4_t a = vreinterpret_f16_u16(vld1_u16(lhs + i * 4 * G + 4 * g));
            for (int p = 0; p < P; ++p) {
                float32x4_t *s0 = sums[4 * g] + 2 * p, *s1 = s0 + 2 * P, *s2 = s1 + 2 * P, *s3 = s2 + 2 * P;
                s0[0] = vfmlalq_lane_low_f16(s0[0], b[p], a, 0);
                s0[1] = vfmlalq_lane_high_f16(s0[1], b[p], a, 0);
                s1[0] = vfmlalq_lane_low_f16(s1[0], b[p], a, 1);
                s1[1] = vfmlalq_lane_high_f16(s1[1], b[p], a, 1);
                s2[0] = vfmlalq_lane_low_f16(s2[0], b[p], a, 2);
                s2[1] = vfmlalq_lane_high_f16(s2[1], b[p], a, 2);
                s3[0] = vfmlalq_lane_low_f16(s3[0], b[p], a, 3);
                s3[1] = vfmlalq_lane_high_f16(s3[1], b[p], a, 3);
            }
        }
    };
    size_t k = tile.k;
    for (; k >= 4; k -= 4) {
        for (size_t i = 0; i < 4; ++i) step(i);
        lhs += 4 * 4 * G;
        for (int p = 0; p < P; ++p) rhs[p] += 4 * kPanelColumns;
    }
    for (; k; --k) {
        step(0);
        lhs += 4 * G;
        for (int p = 0; p < P; ++p) rhs[p] += kPanelColumns;
    }
    finish_tile<4 * G, 2 * P>(tile, sums);
}

struct Fmlal {
    static constexpr size_t kMaxK = kBlockLhsRowBytes / 2;

    static size_t tail_panels(size_t rows) { return rows <= 4 ? 2 : 1; }

    static size_t lhs_tile_bytes(size_t rows, size_t k) { return round_up(rows, 4) * k * 2; }

    // [k][rows rounded up to 4], the rows added are zero.
    static void pack_lhs(const vac_gemm_args &args, size_t row, size_t rows, size_t k0, size_t k, void *packed) {
        const size_t width = round_up(rows, 4);
        for (size_t g = 0; g < width; g += 4) {
            const uint16_t *from = static_cast<const uint16_t *>(args.lhs) + (row + g) * args.lhs_stride + k0;
            const size_t real = min_size(rows - g, 4);
            uint16_t *to = static_cast<uint16_t *>(packed) + g;
            for (size_t i = 0; i < k; i += 4) {
                const size_t count = min_size(k - i, 4);
                uint16_t buffer[4][4] = {};
                uint16x4_t x[4];
                if (real == 4 && count == 4) {
                    for (size_t r = 0; r < 4; ++r) x[r] = vld1_u16(from + r * args.lhs_stride + i);
                } else {
                    for (size_t r = 0; r < real; ++r) {
                        for (size_t j = 0; j < count; ++j) buffer[r][j] = from[r * args.lhs_stride + i + j];
                    }
                    for (size_t r = 0; r < 4; ++r) x[r] = vld1_u16(buffer[r]);
                }
                const uint32x2_t t0 = vreinterpret_u32_u16(vtrn1_u16(x[0], x[1]));
                const uint32x2_t t1 = vreinterpret_u32_u16(vtrn2_u16(x[0], x[1]));
                const uint32x2_t t2 = vreinterpret_u32_u16(vtrn1_u16(x[2], x[3]));
                const uint32x2_t t3 = vreinterpret_u32_u16(vtrn2_u16(x[2], x[3]));
                const uint32x2_t y[4] = {vtrn1_u32(t0, t2), vtrn1_u32(t1, t3), vtrn2_u32(t0, t2), vtrn2_u32(t1, t3)};
                for (size_t j = 0; j < count; ++j, to += width) vst1_u16(to, vreinterpret_u16_u32(y[j]));
            }
        }
    }

    static const char *rhs(const vac_gemm_args &args, size_t panel, size_t, size_t k0, size_t, void *, size_t *stride) {
        *stride = panel_bytes(VAC_F16, args.k);
        return static_cast<const char *>(args.rhs) + panel * *stride + k0 * kPanelColumns * 2;
    }

    static void run(const Tile &tile, size_t panels) {
        if (tile.rows > 8) return run_f16_tile<3, 1>(tile);
        if (tile.rows > 4) return run_f16_tile<2, 1>(tile);
        return panels == 1 ? run_f16_tile<1, 1>(tile) : run_f16_tile<1, 2>(tile);
    }
};
#endif

// M <= 4. What differs between dtypes: the lhs row as the kernel reads it, and one k of one panel.
template <class Panel>
struct SmallWidened {
    using Element = typename Panel::Element;
    using Lhs = float;
    using Vector = float32x4_t;
    static constexpr size_t kLanes = 4;
    struct Weights {
        float32x4_t low, high;
    };
    static Vector load_lhs(const float *p) { return vld1q_f32(p); }
    static Vector repeat_lhs(const float *p) { return vld1q_dup_f32(p); }
    static Weights load(const Element *p) {
        Weights w;
        Panel::widen(p, w.low, w.high);
        return w;
    }
    template <int kLane>
    static void add(float32x4_t *sums, const Weights &w, Vector a) {
        sums[0] = vfmaq_laneq_f32(sums[0], w.low, a, kLane);
        sums[1] = vfmaq_laneq_f32(sums[1], w.high, a, kLane);
    }
};

#if defined(__ARM_FEATURE_FP16_FML)
struct SmallF16 {
    using Element = uint16_t;
    using Lhs = uint16_t;
    using Vector = float16x8_t;
    using Weights = float16x8_t;
    static constexpr size_t kLanes = 8;
    static Vector load_lhs(const uint16_t *p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }
    static Vector repeat_lhs(const uint16_t *p) { return vreinterpretq_f16_u16(vld1q_dup_u16(p)); }
    static Weights load(const uint16_t *p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }
    template <int kLane>
    static void add(float32x4_t *sums, Weights w, Vector a) {
        sums[0] = vfmlalq_laneq_low_f16(sums[0], w, a, kLane);
        sums[1] = vfmlalq_laneq_high_f16(sums[1], w, a, kLane);
    }
};
#endif

template <class Small, int R, int P>
struct SmallTile {
    using Element = typename Small::Element;
    using Lhs = typename Small::Lhs;

    template <int kLane>
    static void add_k(float32x4_t (&sums)[R][2 * P], const typename Small::Vector (&a)[R],
                      const Element *const (&rhs)[P], size_t i) {
        for (int p = 0; p < P; ++p) {
            const typename Small::Weights w = Small::load(rhs[p] + i * kPanelColumns);
            for (int r = 0; r < R; ++r) Small::template add<kLane>(sums[r] + 2 * p, w, a[r]);
        }
    }

    static void run(const vac_gemm_args &args, const Lhs *lhs, size_t lhs_stride, size_t panel) {
        const size_t bytes = panel_bytes(args.dtype, args.k);
        const Element *rhs[P];
        for (int p = 0; p < P; ++p)
            rhs[p] = reinterpret_cast<const Element *>(static_cast<const char *>(args.rhs) + (panel + p) * bytes);
        float32x4_t sums[R][2 * P];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < 2 * P; ++c) sums[r][c] = vdupq_n_f32(0);
        }
        typename Small::Vector a[R];
        size_t k = args.k;
        for (; k >= Small::kLanes; k -= Small::kLanes) {
            for (int r = 0; r < R; ++r) a[r] = Small::load_lhs(lhs + r * lhs_stride);
            add_k<0>(sums, a, rhs, 0);
            add_k<1>(sums, a, rhs, 1);
            add_k<2>(sums, a, rhs, 2);
            add_k<3>(sums, a, rhs, 3);
            if constexpr (Small::kLanes == 8) {
                add_k<4>(sums, a, rhs, 4);
                add_k<5>(sums, a, rhs, 5);
                add_k<6>(sums, a, rhs, 6);
                add_k<7>(sums, a, rhs, 7);
            }
            lhs += Small::kLanes;
            for (int p = 0; p < P; ++p) rhs[p] += Small::kLanes * kPanelColumns;
        }
        for (; k; --k, ++lhs) {
            for (int r = 0; r < R; ++r) a[r] = Small::repeat_lhs(lhs + r * lhs_stride);
            add_k<0>(sums, a, rhs, 0);
            for (int p = 0; p < P; ++p) rhs[p] += kPanelColumns;
        }
        float rows[R][8 * P];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < 2 * P; ++c) vst1q_f32(rows[r] + 4 * c, sums[r][c]);
        }
        finish_rows(args, rows[0], 8 * P, R, 0, panel * kPanelColumns);
    }
};

// Whole groups of P panels, then single ones.
template <class Small, int R, int P>
void run_small_rows(const vac_gemm_args &args, const Range &panels, const typename Small::Lhs *lhs, size_t stride) {
    size_t panel = panels.begin;
    for (; panel + P <= panels.end; panel += P) SmallTile<Small, R, P>::run(args, lhs, stride, panel);
    for (; panel < panels.end; ++panel) SmallTile<Small, R, 1>::run(args, lhs, stride, panel);
}

template <class Small, class Panel>
void run_small(const vac_gemm_args &args, const Range &panels, char *workspace) {
    using Lhs = typename Small::Lhs;
    const Lhs *lhs = static_cast<const Lhs *>(args.lhs);
    size_t stride = args.lhs_stride;
    if (sizeof(Lhs) != sizeof(typename Panel::Element) && panels.begin != panels.end) {
        float *widened = reinterpret_cast<float *>(workspace);
        for (size_t r = 0; r < args.m; ++r) {
            const auto *row = static_cast<const typename Panel::Element *>(args.lhs) + r * args.lhs_stride;
            for (size_t i = 0; i < args.k; i += 4)
                store_some<StoredF32>(widened + r * args.k + i, load_some<Panel>(row + i, args.k - i), args.k - i);
        }
        lhs = reinterpret_cast<const Lhs *>(widened);
        stride = args.k;
    }
    if (args.m == 1) return run_small_rows<Small, 1, 8>(args, panels, lhs, stride);
    if (args.m == 2) return run_small_rows<Small, 2, 4>(args, panels, lhs, stride);
    if (args.m == 3) return run_small_rows<Small, 3, 3>(args, panels, lhs, stride);
    return run_small_rows<Small, 4, 2>(args, panels, lhs, stride);
}

// Widening in registers costs each tile 2 operations per 8 weights, widening first costs 2 and 2 stores once.
constexpr size_t kWidenFirstRows = 2 * kTileRows + 1;

template <class Panel>
void run_widened(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count, char *workspace) {
    const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
    if (args.m <= kSmallRows)
        run_small<SmallWidened<Panel>, Panel>(args, part.panels, workspace);
    else if (part.rows.end - part.rows.begin < kWidenFirstRows)
        run_blocked<Fmla<Panel, false>>(args, part, workspace);
    else
        run_blocked<Fmla<Panel, true>>(args, part, workspace);
}

}  // namespace

namespace vac::VAC_TIER_NS {

void gemm_any_f32_f32p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                               char *workspace) {
    const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
    if (args.m <= kSmallRows)
        run_small<SmallWidened<PanelF32>, PanelF32>(args, part.panels, workspace);
    else
        run_blocked<Fmla<PanelF32, false>>(args, part, workspace);
}

#if defined(__ARM_FEATURE_FP16_FML)
void gemm_any_f16_f16p1x8_fmlal(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                char *workspace) {
    const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
    if (args.m <= kSmallRows)
        run_small<SmallF16, PanelF16>(args, part.panels, workspace);
    else
        run_blocked<Fmlal>(args, part, workspace);
}
#else
void gemm_any_f16_f16p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                               char *workspace) {
    run_widened<PanelF16>(args, thread_index, thread_count, workspace);
}
#endif

#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
void gemm_any_bf16_bf16p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                 char *workspace) {
    run_widened<PanelBF16>(args, thread_index, thread_count, workspace);
}
#endif

}  // namespace vac::VAC_TIER_NS
