// W4A16: activations keep their precision.
//
// Few rows of 16-bit lhs: split into digits, which the integer tiles multiply by the packed weight (int4_digits.h).
// Else the weight is widened panel by panel into L1.
// BF16 lhs where there is BFMMLA: the integers, exact in BF16, times lhs; FP32 sums of a group times its scale.
//   tile   R pairs of rows x 8 columns, R * 4 sums of a group; R * 4 totals of 2 rows x 2 columns, in memory meanwhile
// Everything else: scale * (value - zero point) in FP32, rows and columns both along k, so nothing is transposed.
//   tile   R rows x C columns, R * C sums of 4 k side by side
// Blocks: 96 rows, 32 panels, about 1024 k (whole groups); between blocks of K totals wait in FP32.
#include "quant/int4_digits.h"
#include "quant/int4_rows.h"

namespace {

// One block of a call: what is packed and where it goes.
struct Wide {
    const vac_int4_gemm_args &args;
    PackedInt4 packed;
    size_t group_steps, k_steps;
    char *lhs;       // packed rows
    char *widened;   // a panel
    float *partial;  // totals
};

// Rows of out from `out` on; of lhs from `first` on, or those that `index` names.
struct WideRows {
    size_t first, out, count;
    const int32_t *index;
    const char *rhs;
    const void *bias;

    const char *row(const vac_int4_gemm_args &args, size_t r) const {
        const size_t at = index ? static_cast<size_t>(index[r]) : first + r;
        return static_cast<const char *>(args.lhs) + at * args.lhs_stride * element_size(args.dtype);
    }
};

// 8 bytes of column c of a step: k + i in the high nibble, less 8; k + 8 + i in the low one. As 0 .. 15.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr size_t kColumnStride = 8, kWordStride = 4;
#else
constexpr size_t kColumnStride = 4, kWordStride = 32;
#endif
inline uint8x16_t column_values(const uint8_t *step, size_t c) {
    uint32_t word[2];
    __builtin_memcpy(word, step + c * kColumnStride, 4);
    __builtin_memcpy(word + 1, step + c * kColumnStride + kWordStride, 4);
    const uint8x8_t both = vreinterpret_u8_u32(vld1_u32(word));
    return vcombine_u8(veor_u8(vshr_n_u8(both, 4), vdup_n_u8(8)), vand_u8(both, vdup_n_u8(15)));
}

struct PanelAt {
    const uint8_t *values;
    const char *scales;
    const int8_t *zero_points;  // or NULL
};

inline PanelAt panel_at(const PackedInt4 &packed, const char *rhs, size_t panel, size_t step, size_t group) {
    PanelAt at;
    at.values = reinterpret_cast<const uint8_t *>(rhs) + panel * packed.values_panel + step * kStepBytes;
    at.scales = rhs + packed.scales + panel * packed.scales_panel + group * kPanelColumns * packed.scale_bytes;
    at.zero_points = packed.zero_points_panel ? reinterpret_cast<const int8_t *>(rhs) + packed.zero_points +
                                                    panel * packed.zero_points_panel + group * kPanelColumns
                                              : nullptr;
    return at;
}

inline float32x4_t scales_at(const PackedInt4 &packed, const char *scales, size_t at) {
    return packed.scale_bytes == 2 ? StoredBF16::load4(reinterpret_cast<const uint16_t *>(scales) + at)
                                   : vld1q_f32(reinterpret_cast<const float *>(scales) + at);
}

// Panels of totals, `parts` rows `stride` apart for each row, to out: their sum, plus bias.
void finish(const vac_int4_gemm_args &args, const WideRows &rows, const float *totals, size_t stride, size_t parts,
            const Range &panels) {
    const size_t column = panels.begin * kPanelColumns;
    const size_t columns = min_size(args.n - column, panels.size() * kPanelColumns);
    with_stored(args.out_dtype, [&](auto stored) {
        using Stored = decltype(stored);
        for (size_t c = 0; c < columns; c += 4) {
            const size_t count = min_size(columns - c, 4);
            const float32x4_t bias =
                rows.bias ? load_some(args.bias_dtype, rows.bias, column + c, count) : vdupq_n_f32(-0.0f);
            auto *out = static_cast<typename Stored::Element *>(args.out) + rows.out * args.out_stride + column + c;
            const float *from = totals + c;
            for (size_t r = 0; r < rows.count; ++r, out += args.out_stride) {
                float32x4_t sum = vld1q_f32(from);
                from += stride;
                for (size_t part = 1; part < parts; ++part, from += stride) sum = vaddq_f32(sum, vld1q_f32(from));
                store_some<Stored>(out, vaddq_f32(sum, bias), count);
            }
        }
    });
}

// --- FP32 ------------------------------------------------------------------------

struct WideFmla {
    static constexpr size_t kTile = 4;

    static size_t row_bytes(size_t steps) { return steps * kStep * sizeof(float) + kLine; }

    // [row][k] as FP32, zero beyond K.
    static void pack_lhs(const Wide &wide, const WideRows &rows, size_t step, size_t steps) {
        const vac_int4_gemm_args &args = wide.args;
        const size_t k0 = step * kStep, k = min_size(args.k - k0, steps * kStep);
        for (size_t r = 0; r < rows.count; ++r) {
            float *to = reinterpret_cast<float *>(wide.lhs + r * row_bytes(steps));
            widen_row(args.dtype, rows.row(args, r) + k0 * element_size(args.dtype), k, to);
            for (size_t i = k; i < steps * kStep; ++i) to[i] = 0;
        }
    }

    // [column][k] as FP32.
    static void widen(const Wide &wide, const char *rhs, size_t panel, size_t step, size_t steps) {
        const bool one = wide.packed.groups == 1;
        const size_t stride = steps * kStep + kLine / sizeof(float);
        for (size_t s = 0; s < steps; s += wide.group_steps) {
            const size_t group = one ? 0 : (step + s) / wide.group_steps;
            const PanelAt at = panel_at(wide.packed, rhs, panel, step + s, group);
            const size_t count = min_size(wide.group_steps, steps - s);
            float scales[kPanelColumns];
            vst1q_f32(scales, scales_at(wide.packed, at.scales, 0));
            vst1q_f32(scales + 4, scales_at(wide.packed, at.scales, 4));
            for (size_t c = 0; c < kPanelColumns; ++c) {
                const int8x16_t zero = vdupq_n_s8(static_cast<int8_t>(8 + (at.zero_points ? at.zero_points[c] : 0)));
                float *to = reinterpret_cast<float *>(wide.widened) + c * stride + s * kStep;
                for (size_t i = 0; i < count; ++i, to += kStep) {
                    const int8x16_t q =
                        vsubq_s8(vreinterpretq_s8_u8(column_values(at.values + i * kStepBytes, c)), zero);
                    const int16x8_t low = vmovl_s8(vget_low_s8(q)), high = vmovl_high_s8(q);
                    vst1q_f32(to, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scales[c]));
                    vst1q_f32(to + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), scales[c]));
                    vst1q_f32(to + 8, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scales[c]));
                    vst1q_f32(to + 12, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), scales[c]));
                }
            }
        }
    }

    // R rows x C columns, U sums each.
    template <int R, int C, int U>
    static void tile(const float *lhs, size_t lhs_stride, const float *rhs, size_t rhs_stride, size_t k, bool first,
                     float *totals) {
        float32x4_t sums[U][R][C];
        for (auto &u : sums) {
            for (auto &r : u) {
                for (auto &sum : r) sum = vdupq_n_f32(0);
            }
        }
        for (size_t i = 0; i < k; i += 4 * U) {
            for (size_t u = 0; u < U; ++u) {
                float32x4_t a[R];
                for (size_t r = 0; r < R; ++r) a[r] = vld1q_f32(lhs + r * lhs_stride + i + 4 * u);
                for (size_t c = 0; c < C; ++c) {
                    const float32x4_t b = vld1q_f32(rhs + c * rhs_stride + i + 4 * u);
                    for (size_t r = 0; r < R; ++r) sums[u][r][c] = vfmaq_f32(sums[u][r][c], a[r], b);
                }
            }
        }
        for (int r = 0; r < R; ++r, totals += kPanelColumns) {
            for (int c = 0; c < C; c += 4) {
                float32x4_t x[4];
                for (int i = 0; i < 4; ++i) {
                    x[i] = sums[0][r][c + i];
                    for (int u = 1; u < U; ++u) x[i] = vaddq_f32(x[i], sums[u][r][c + i]);
                }
                const float32x4_t four = vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
                vst1q_f32(totals + c, first ? four : vaddq_f32(vld1q_f32(totals + c), four));
            }
        }
    }

    static void multiply(const Wide &wide, size_t rows, size_t, const char *, size_t, size_t steps, bool first,
                         float *totals) {
        const size_t k = steps * kStep, lhs_stride = row_bytes(steps) / sizeof(float);
        const size_t rhs_stride = k + kLine / sizeof(float);
        const auto *rhs = reinterpret_cast<const float *>(wide.widened);
        for (size_t row = 0; row < rows; row += kTile) {
            const auto *lhs = reinterpret_cast<const float *>(wide.lhs + row * row_bytes(steps));
            float *to = totals + row * kPanelColumns;
            switch (min_size(rows - row, kTile)) {
                case 1:
                    tile<1, 8, 2>(lhs, lhs_stride, rhs, rhs_stride, k, first, to);
                    break;
                case 2:
                    tile<2, 8, 1>(lhs, lhs_stride, rhs, rhs_stride, k, first, to);
                    break;
                case 3:
                    tile<3, 4, 1>(lhs, lhs_stride, rhs, rhs_stride, k, first, to);
                    tile<3, 4, 1>(lhs, lhs_stride, rhs + 4 * rhs_stride, rhs_stride, k, first, to + 4);
                    break;
                default:
                    tile<4, 4, 1>(lhs, lhs_stride, rhs, rhs_stride, k, first, to);
                    tile<4, 4, 1>(lhs, lhs_stride, rhs + 4 * rhs_stride, rhs_stride, k, first, to + 4);
            }
        }
    }
};

// --- BFMMLA ----------------------------------------------------------------------

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Byte tables of BF16 -16 .. 15.
constexpr uint8_t kLowBytes[32] = {0x80, 0x70, 0x60, 0x50, 0x40, 0x30, 0x20, 0x10, 0x00, 0xe0, 0xc0,
                                   0xa0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00, 0x40, 0x80, 0xa0,
                                   0xc0, 0xe0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
constexpr uint8_t kHighBytes[32] = {0xc1, 0xc1, 0xc1, 0xc1, 0xc1, 0xc1, 0xc1, 0xc1, 0xc1, 0xc0, 0xc0,
                                    0xc0, 0xc0, 0xc0, 0xc0, 0xbf, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                    0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};

struct WideBfmmla {
    static constexpr size_t kTile = 12;

    static size_t pair_bytes(size_t steps) { return steps * kStep * 2 * sizeof(uint16_t); }

    // By tiles of 12 rows: [k / 4][pair][2 rows][4 k], zero beyond K and for a missing second row.
    static void pack_lhs(const Wide &wide, const WideRows &rows, size_t step, size_t steps) {
        const vac_int4_gemm_args &args = wide.args;
        const size_t k0 = step * kStep, k = min_size(args.k - k0, steps * kStep);
        for (size_t r = 0; r < rows.count; r += 2) {
            const size_t first = r / kTile * kTile, pairs = ceil_div(min_size(rows.count - first, kTile), 2);
            auto *to = reinterpret_cast<uint16_t *>(wide.lhs + first / 2 * pair_bytes(steps)) + (r - first) / 2 * 8;
            const bool both = r + 1 < rows.count;
            const uint16_t *a = reinterpret_cast<const uint16_t *>(rows.row(args, r)) + k0;
            const uint16_t *b = both ? reinterpret_cast<const uint16_t *>(rows.row(args, r + 1)) + k0 : a;
            const uint64x2_t keep = vdupq_n_u64(both ? ~uint64_t{0} : 0);
            const auto put = [&](const uint16_t *x, const uint16_t *y) {
                const uint64x2_t above = vreinterpretq_u64_u16(vld1q_u16(x));
                const uint64x2_t below = vandq_u64(vreinterpretq_u64_u16(vld1q_u16(y)), keep);
                vst1q_u16(to, vreinterpretq_u16_u64(vzip1q_u64(above, below)));
                vst1q_u16(to + pairs * 8, vreinterpretq_u16_u64(vzip2q_u64(above, below)));
                to += pairs * 16;
            };
            size_t i = 0;
            for (; i + 8 <= k; i += 8) put(a + i, b + i);
            for (; i < steps * kStep; i += 8) {
                uint16_t x[8] = {}, y[8] = {};
                for (size_t j = i; j < k; ++j) x[j - i] = a[j], y[j - i] = b[j];
                put(x, y);
            }
        }
    }

    // [k / 4][4 vectors of 2 columns x 4 k] of value - zero point as BF16.
    static void widen(const Wide &wide, const char *rhs, size_t panel, size_t step, size_t steps) {
        static constexpr uint8_t kOrder[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
        const uint8x16_t order = vld1q_u8(kOrder);
        const uint8x16x2_t low_bytes = {{vld1q_u8(kLowBytes), vld1q_u8(kLowBytes + 16)}};
        const uint8x16x2_t high_bytes = {{vld1q_u8(kHighBytes), vld1q_u8(kHighBytes + 16)}};
        for (size_t s = 0; s < steps; s += wide.group_steps) {
            const size_t group = wide.packed.groups == 1 ? 0 : (step + s) / wide.group_steps;
            const PanelAt at = panel_at(wide.packed, rhs, panel, step + s, group);
            const size_t count = min_size(wide.group_steps, steps - s);
            for (size_t j = 0; j < 4; ++j) {
                // 16 - zero point of the two columns, 4 bytes each, twice.
                const auto offset_of = [&](size_t c) {
                    return vdup_n_u8(static_cast<uint8_t>(8 - (at.zero_points ? at.zero_points[2 * j + c] : 0)));
                };
                const uint32x2_t pair = vzip1_u32(vreinterpret_u32_u8(offset_of(0)), vreinterpret_u32_u8(offset_of(1)));
                const uint8x16_t offset = vreinterpretq_u8_u32(vcombine_u32(pair, pair));
                const uint8_t *from = at.values + 16 * j;
                auto *to = reinterpret_cast<uint8_t *>(wide.widened) + s * 256 + 16 * j;
                for (size_t i = 0; i < count; ++i, from += kStepBytes, to += 256) {
                    const uint8x16_t v =
                        veorq_u8(vqtbl1q_u8(vld1q_u8(from), order), vdupq_n_u8(0x80));  // both as 0 .. 15
                    const uint8x16_t high = vaddq_u8(vshrq_n_u8(v, 4), offset);
                    const uint8x16_t low = vaddq_u8(vandq_u8(v, vdupq_n_u8(15)), offset);
                    uint8x16_t a = vqtbl2q_u8(low_bytes, high), c = vqtbl2q_u8(low_bytes, low);
                    const uint8x16_t b = vqtbl2q_u8(high_bytes, high), d = vqtbl2q_u8(high_bytes, low);
                    // Clang 19 makes one TBL of the ZIP2 of two, and takes indices that are not constant for such:
                    // it must not see where these come from. Nor what is stored, or it would be ST2, at half speed.
                    asm("" : "+w"(a), "+w"(c));
                    uint8x16_t first = vzip1q_u8(a, b), third = vzip1q_u8(c, d);
                    asm("" : "+w"(first), "+w"(third));
                    vst1q_u8(to, first);
                    vst1q_u8(to + 64, vzip2q_u8(a, b));
                    vst1q_u8(to + 128, third);
                    vst1q_u8(to + 192, vzip2q_u8(c, d));
                }
            }
        }
    }

    // R pairs x 8 columns, U sums each, over the groups of a block.
    template <int R, int U>
    static void tile(const Wide &wide, const char *lhs, const char *rhs_scales, size_t steps, bool first, size_t rows,
                     float *out) {
        float32x4_t totals[R][4];
        for (auto &r : totals) {
            for (auto &total : r) total = vdupq_n_f32(0);
        }
        const auto *a = reinterpret_cast<const uint16_t *>(lhs);
        const auto *b = reinterpret_cast<const uint16_t *>(wide.widened);
        for (size_t s = 0, g = 0; s < steps; s += wide.group_steps, ++g) {
            const size_t count = min_size(wide.group_steps, steps - s);
            float32x4_t sums[U][R][4];
            for (auto &u : sums) {
                for (auto &r : u) {
                    for (auto &sum : r) sum = vdupq_n_f32(0);
                }
            }
            for (size_t i = 0; i < count; ++i) {
                for (size_t q = 0; q < 4; ++q) {
                    bfloat16x8_t x[R];
                    for (size_t r = 0; r < R; ++r) x[r] = vreinterpretq_bf16_u16(vld1q_u16(a + 8 * (R * q + r)));
                    for (size_t j = 0; j < 4; ++j) {
                        const bfloat16x8_t y = vreinterpretq_bf16_u16(vld1q_u16(b + 32 * q + 8 * j));
                        for (size_t r = 0; r < R; ++r) sums[q % U][r][j] = vbfmmlaq_f32(sums[q % U][r][j], x[r], y);
                    }
                }
                a += 32 * R;
                b += 128;
            }
            for (size_t j = 0; j < 4; ++j) {
                const float64x2_t four =
                    vreinterpretq_f64_f32(scales_at(wide.packed, rhs_scales, g * kPanelColumns + j / 2 * 4));
                const float32x4_t scale =
                    vreinterpretq_f32_f64(j % 2 ? vdupq_laneq_f64(four, 1) : vdupq_laneq_f64(four, 0));
                for (size_t r = 0; r < R; ++r) {
                    float32x4_t sum = sums[0][r][j];
                    for (size_t u = 1; u < U; ++u) sum = vaddq_f32(sum, sums[u][r][j]);
                    totals[r][j] = vfmaq_f32(totals[r][j], sum, scale);
                }
            }
        }
        for (size_t r = 0; r < R; ++r) {
            for (size_t j = 0; j < 4; j += 2) {
                const float64x2_t x = vreinterpretq_f64_f32(totals[r][j]), y = vreinterpretq_f64_f32(totals[r][j + 1]);
                const float32x4_t row[2] = {vreinterpretq_f32_f64(vzip1q_f64(x, y)),
                                            vreinterpretq_f32_f64(vzip2q_f64(x, y))};
                for (size_t i = 0; i < 2 && 2 * r + i < rows; ++i) {
                    float *to = out + (2 * r + i) * kPanelColumns + 2 * j;
                    vst1q_f32(to, first ? row[i] : vaddq_f32(vld1q_f32(to), row[i]));
                }
            }
        }
    }

    static void multiply(const Wide &wide, size_t rows, size_t panel, const char *rhs, size_t step, size_t steps,
                         bool first, float *totals) {
        const size_t group = wide.packed.groups == 1 ? 0 : step / wide.group_steps;
        const char *scales = panel_at(wide.packed, rhs, panel, step, group).scales;
        for (size_t row = 0; row < rows; row += kTile) {
            using Kernel = void (*)(const Wide &, const char *, const char *, size_t, bool, size_t, float *);
            // Enough sums for the latency of BFMMLA.
            static constexpr Kernel kernels[] = {tile<1, 4>, tile<2, 2>, tile<3, 1>,
                                                 tile<4, 1>, tile<5, 1>, tile<6, 1>};
            const size_t count = min_size(rows - row, kTile);
            kernels[(count - 1) / 2](wide, wide.lhs + row / 2 * pair_bytes(steps), scales, steps, first, count,
                                     totals + row * kPanelColumns);
        }
    }
};
#endif

// --- blocks ------------------------------------------------------------------------

// A block of <= 96 rows.
template <class Kind>
void run_wide_block(const Wide &wide, const WideRows &rows, const Range &panels) {
    const size_t steps_of_k = wide.packed.steps;
    for (size_t begin = panels.begin; begin < panels.end; begin += kBlockPanels) {
        const size_t end = min_size(begin + kBlockPanels, panels.end);
        if (steps_of_k == 0) {
            for (size_t i = 0; i < rows.count * kPanelColumns; ++i) wide.partial[i] = 0;
            for (size_t panel = begin; panel < end; ++panel)
                finish(wide.args, rows, wide.partial, kPanelColumns, 1, {panel, panel + 1});
        }
        for (size_t step = 0; step < steps_of_k; step += wide.k_steps) {
            const size_t steps = min_size(wide.k_steps, steps_of_k - step);
            // One block of K stays packed for all panels.
            if (steps < steps_of_k || begin == panels.begin) Kind::pack_lhs(wide, rows, step, steps);
            for (size_t panel = begin; panel < end; ++panel) {
                float *totals = wide.partial + (panel - begin) * rows.count * kPanelColumns;
                Kind::widen(wide, rows.rhs, panel, step, steps);
                Kind::multiply(wide, rows.count, panel, rows.rhs, step, steps, step == 0, totals);
                if (step + steps == steps_of_k) finish(wide.args, rows, totals, kPanelColumns, 1, {panel, panel + 1});
            }
        }
    }
}

template <class Kind>
void run_wide(const Wide &wide, WideRows rows, const Range &panels) {
    for (size_t left = rows.count; left; left -= rows.count) {
        rows.count = min_size(left, kBlockRows);
        run_wide_block<Kind>(wide, rows, panels);
        rows.first += rows.count;
        rows.out += rows.count;
        if (rows.index) rows.index += rows.count;
    }
}

// --- few rows ----------------------------------------------------------------------

// Up to so many rows the integer tiles are faster than widening the weight.
size_t most_digit_rows(const Wide &wide) {
    const vac_int4_gemm_args &args = wide.args;
    if (args.dtype == VAC_F32 || args.k == 0) return 0;
    if (wide.packed.groups == 1 && args.k > VAC_INT4_MAX_K_PER_CHANNEL) return 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (args.dtype == VAC_BF16) return min_size(kDigitRowsOfBf16, digit_rows_of(args.k));
#endif
    return digit_rows_of(args.k);
}

void run_digits(const Wide &wide, const WideRows &rows, const Range &panels) {
    const vac_int4_gemm_args &args = wide.args;
    const size_t count = kDigits * rows.count;
    const Quantized digits = quantized_at(wide.lhs, count, args.k, wide.packed.groups);
    for (size_t r = 0; r < rows.count; ++r) {
        const auto *row = reinterpret_cast<const uint16_t *>(rows.row(args, r));
        if (args.dtype == VAC_BF16)
            split_row<StoredBF16>(row, args.k, args.group, digits, kDigits * r);
        else
            split_row<StoredF16>(row, args.k, args.group, digits, kDigits * r);
    }
    if (count % 2) clear_row(digits, count, args.k);
    vac_int4_gemm_args inner = args;
    inner.out_dtype = VAC_F32;
    inner.out = wide.partial;
    inner.out_stride = kBlockPanels * kPanelColumns;
    const int kind = Tiles::kind(wide.packed.groups > 1, wide.packed.scale_bytes == 2);
    for (size_t begin = panels.begin; begin < panels.end; begin += kBlockPanels) {
        const Range block = {begin, min_size(begin + kBlockPanels, panels.end)};
        inner.n = min_size(args.n - begin * kPanelColumns, block.size() * kPanelColumns);
        run_small({inner, wide.packed, kind}, {digits, 0, count, 0, rows.rhs, nullptr, begin}, block);
        finish(args, rows, wide.partial, inner.out_stride, kDigits, block);
    }
}

void run_any(const Wide &wide, const WideRows &rows, const Range &panels) {
    if (rows.count == 0 || panels.size() == 0) return;
    if (rows.count <= most_digit_rows(wide)) return run_digits(wide, rows, panels);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (wide.args.dtype == VAC_BF16) return run_wide<WideBfmmla>(wide, rows, panels);
#endif
    run_wide<WideFmla>(wide, rows, panels);
}

}  // namespace

namespace vac::VAC_TIER_NS {

void int4_w4a16(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_gemm_args *>(opaque);
    if (args.m == 0 || args.n == 0 || (args.num_experts && args.num_rows == 0)) return;
    const PackedInt4 packed = packed_int4(args.scale_dtype, args.n, args.k, args.group, args.has_zero_points);
    const W4a16Workspace layout = w4a16_workspace(args.num_experts ? kBlockRows : args.m, args.k, args.group);
    char *own = align_line(args.workspace) + thread_index * layout.thread;
    const size_t group_steps = packed.groups == 1 ? kWideK / kStep : packed.group / kStep;
    const Wide wide = {args,
                       packed,
                       group_steps,
                       wide_steps(group_steps),
                       own,
                       own + layout.widened,
                       reinterpret_cast<float *>(own + layout.partial)};
    const char *rhs = static_cast<const char *>(args.rhs);
    if (!args.num_experts) {
        const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
        return run_any(wide, {part.rows.begin, part.rows.begin, part.rows.size(), nullptr, rhs, args.bias},
                       part.panels);
    }
    share_experts(args, packed.panels, thread_index, thread_count, [&](size_t expert, const Range &panels) {
        const size_t first = static_cast<size_t>(args.expert_start[expert]);
        const size_t count = static_cast<size_t>(args.expert_start[expert + 1]) - first;
        const char *bias = static_cast<const char *>(args.bias);
        if (bias) bias += expert * args.n * element_size(args.bias_dtype);
        run_any(wide,
                {first, first, count, args.row_index ? args.row_index + first : nullptr,
                 rhs + expert * args.rhs_expert_stride, bias},
                panels);
    });
}

}  // namespace vac::VAC_TIER_NS
