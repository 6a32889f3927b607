// Attention over the paged cache: one loop for every kind of step, on the
// matrix products and softmax of the element type's format.
//
// A task is a (request, KV head, rows, KV range); its rows are worked on 32 at
// a time (a tile), in row tiles of 4. Per tile and chunk of keys, all in L1:
//
//   scores   for each K panel (16 tokens): for each row tile: 4 x 16 += query [4 x head] * panel
//   weights  for each row tile: maximum, rescaling, 2^(s - M), left operand of the next
//   output   for each V panel (16 dimensions): for each row tile: 4 x 16 += weights [4 x chunk] * panel
//
// so a panel of the cache is read once into L1 for all 32 rows.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "attention/formats.h"
#include "attention/layout.h"
#include "attention/quantized.h"
#include "common/dispatch.h"

// The functions that hold the loops each lie within a page, as most are shorter than that: one entry of the
// instruction TLB, and a tracer that works by pages sees a loop in one piece.
#define VAC_HOT(size) __attribute__((noinline, aligned(size)))

namespace vac::VAC_TIER_NS {
namespace {

constexpr float kInfinity = __builtin_inff();

#if defined(__clang__)
#define VAC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define VAC_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr int kMaxTiles = kTileRows / kRows;
constexpr int kMaxPanels = 512 / kPanel;

// Keys of a chunk, so that its scores fit into kScores.
VAC_INLINE int32_t chunk_tokens(int num_tiles) { return num_tiles <= 4 ? 512 : 256; }

// V of a run of tokens within one page.
template <class Cache>
struct SegmentOf {
    const Cache *base;      // panel 0 at the chunk's first token, were the page to reach there
    uint32_t panel_stride;  // to the next 16 dimensions
    int32_t end;            // tokens from the chunk's first
};

template <class Element, class Cache>
struct RowTileOf {
    int num_rows;
    Element *output[4];
    int32_t low[4], high[4];          // keys that each row sees: [low, high)
    int32_t begin, end;               // union over the rows
    int32_t full_begin, full_end;     // intersection
    int32_t chunk_begin, chunk_end;   // the same within the current chunk, from its first token, in whole steps
    int32_t whole_end;                // of the blocks of 16 tokens in front, all of whose tokens are seen
    const SegmentOf<Cache> *segment;  // that chunk_begin lies in
    bool started, finishes;           // output holds earlier chunks; this one is the last
    float32x4_t exponent;             // M of each row: the running maximum, rounded up to a power of two
    float32x4_t sum;                  // of the weights 2^(s - M)
    float32x4_t inverse;              // of the sum
    float32x4_t rescale;              // of the output so far, when M has grown
    float32x4_t running[4];           // maximum of the chunk's scores, in the format's order
    // INT8 only: the queries' scales, what makes a score an exponent and its
    // inverse, and the unit of the chunk's integer sums of values.
    float32x4_t query_scale, factor, factor_inverse, unit;
};

// 2^(from - to) for integers from <= to; 0 from -infinity.
inline float32x4_t power_of_difference(float32x4_t from, float32x4_t to) {
    const float32x4_t d = vmaxq_f32(vsubq_f32(from, to), vdupq_n_f32(-127.0f));
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(d), vdupq_n_s32(127)), 23));
}

// A maximum that is safe to subtract: rows without any key have -infinity.
inline float32x4_t finite_or_zero(float32x4_t v) {
    const uint32x4_t none = vceqq_f32(v, vdupq_n_f32(-kInfinity));
    return vbslq_f32(none, vdupq_n_f32(0), v);
}

// 1 / v, 0 for 0.
inline float32x4_t inverse_or_zero(float32x4_t v) {
    const uint32x4_t none = vceqzq_f32(v);
    return vbslq_f32(none, vdupq_n_f32(0), vdivq_f32(vdupq_n_f32(1.0f), v));
}

// e^x to FP32's precision for the softcap, whose error is a logit's error.
inline float32x4_t tanh_f32(float32x4_t x) {
    const float32x4_t limit = vdupq_n_f32(20.0f);
    const float32x4_t two_x = vmulq_n_f32(vminq_f32(vabsq_f32(x), limit), -2.0f);
    const float32x4_t e = exp2_scores<6>(two_x, exp_scale(kNatural, vdupq_n_f32(0)));
    const float32x4_t one = vdupq_n_f32(1.0f);
    const float32x4_t t = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
    return vbslq_f32(vdupq_n_u32(0x80000000u), x, t);
}

template <int Count>
struct RowCount {
    static constexpr int value = Count;
};

template <class F>
class Tile {
    using Element = typename F::Element;
    using Cache = typename F::Cache;
    using Packed = typename F::Packed;
    using Weight = typename F::Weight;
    using Wide = typename F::Wide;
    using RowTile = RowTileOf<Element, Cache>;
    using Segment = SegmentOf<Cache>;
    static constexpr bool kInt8 = F::kStorage == Storage::kInt8, kFp8 = F::kStorage == Storage::kFp8;

  public:
    Tile(const vac_attention_args &args, uint8_t *scratch, uint32_t thread_scratch)
        : args_(args), group_(args.num_heads / args.num_kv_heads) {
        const Scratch layout(args.head_size, args.v_head_size);
        scratch += layout.size * thread_scratch;
        query_ = reinterpret_cast<Packed *>(scratch + layout.query);
        scores_ = reinterpret_cast<float *>(scratch + layout.scores);
        weights_ = reinterpret_cast<Weight *>(scratch + layout.weights);
        own_output_ = reinterpret_cast<float *>(scratch + layout.output);
        wide_ = reinterpret_cast<Wide *>(scratch + layout.wide);
        tail_ = reinterpret_cast<Cache *>(scratch + layout.tail);
        scale_ = args.scale * (kFp8 && args.k_scale != 0.0f ? args.k_scale : 1.0f);
        value_scale_ = kFp8 && args.v_scale != 0.0f ? args.v_scale : 1.0f;
        transforms_ = args.softcap != 0.0f || args.alibi_slopes != nullptr || !(scale_ > 0.0f);
        exponent_of_ = transforms_ ? kNatural : Factor{scale_ * kLog2E, 1 / (scale_ * kLog2E)};
    }

    // Rows [row_begin, row_begin + num_rows) of a KV head against keys
    // [kv_begin, kv_end). Without partial_output the result goes to the output.
    void run(uint32_t request, uint32_t kv_head, int32_t row_begin, int32_t num_rows, int32_t kv_begin, int32_t kv_end,
             float *partial_output, float *partial_state) {
        place(request, kv_head, row_begin, num_rows);
        prepare_rows(kv_begin, kv_end);
        partial_ = partial_output != nullptr;
        output_ = partial_ ? partial_output : own_output_;
        int32_t begin = INT32_MAX, end = 0;
        for (int t = 0; t < num_tiles_; ++t)
            if (tiles_[t].begin < tiles_[t].end) {
                begin = min_of(begin, tiles_[t].begin);
                end = max_of(end, tiles_[t].end);
            }
        const int32_t step = chunk_tokens(num_tiles_);
        tile_scores_ = kRows * step;
        for (int32_t at = begin / step * step; at < end; at += step)
            chunk(max_of(at, begin & ~15), min_of(at + step, end));
        for (int t = 0; t < num_tiles_; ++t)
            if (!tiles_[t].started) output_nothing(t);
        if (partial_)
            for (int t = 0; t < num_tiles_; ++t) {
                vst1q_f32(partial_state + 8 * t, tiles_[t].exponent);
                vst1q_f32(partial_state + 8 * t + 4, tiles_[t].sum);
            }
    }

    // Adds up the partial results of num_splits KV ranges of the same rows.
    void merge(uint32_t request, uint32_t kv_head, int32_t row_begin, int32_t num_rows, const float *partial_output,
               const float *partial_state, int32_t num_splits) {
        place(request, kv_head, row_begin, num_rows);
        const size_t output_step = static_cast<size_t>(num_tiles_) * kRows * args_.v_head_size;
        const size_t state_step = static_cast<size_t>(num_tiles_) * 8;
        for (int t = 0; t < num_tiles_; ++t) {
            const float *state = partial_state + 8 * t;
            float32x4_t exponent = vdupq_n_f32(-kInfinity), sum = vdupq_n_f32(0);
            for (int32_t s = 0; s < num_splits; ++s) exponent = vmaxq_f32(exponent, vld1q_f32(state + s * state_step));
            exponent = finite_or_zero(exponent);
            for (int32_t s = 0; s < num_splits; ++s)
                sum = vfmaq_f32(sum, vld1q_f32(state + s * state_step + 4),
                                power_of_difference(vld1q_f32(state + s * state_step), exponent));
            const float32x4_t inverse = vmulq_n_f32(inverse_or_zero(sum), value_scale_);
            for (uint32_t panel = 0; panel < args_.v_head_size / kPanel; ++panel) {
                const float *from = partial_output + output_offset(t, panel);
                float32x4_t acc[16];
                for (int i = 0; i < 16; ++i) acc[i] = vdupq_n_f32(0);
                for (int32_t s = 0; s < num_splits; ++s) {
                    const float32x4_t f =
                        vmulq_f32(inverse, power_of_difference(vld1q_f32(state + s * state_step), exponent));
                    for (int i = 0; i < 16; ++i)
                        acc[i] = vfmaq_f32(acc[i], vld1q_f32(from + s * output_step + 4 * i), F::spread(f, i));
                }
                store(acc, tiles_[t], panel);
            }
        }
    }

  private:
    void place(uint32_t request, uint32_t kv_head, int32_t row_begin, int32_t num_rows) {
        request_ = request;
        kv_head_ = kv_head;
        row_begin_ = row_begin;
        num_rows_ = num_rows;
        num_tiles_ = (num_rows + kRows - 1) / kRows;
        query_start_ = args_.query_start_loc[request];
        seq_len_ = args_.seq_lens[request];
        context_ = seq_len_ - (args_.query_start_loc[request + 1] - query_start_);
        causal_ = args_.request_causal != nullptr ? args_.request_causal[request] != 0 : args_.causal != 0;
        Row row = first_row();
        for (int t = 0; t < num_tiles_; ++t) {
            tiles_[t].num_rows = min_of(kRows, num_rows - kRows * t);
            for (int r = 0; r < tiles_[t].num_rows; ++r, next(row))
                tiles_[t].output[r] = static_cast<Element *>(args_.output) + row.token * args_.output_token_stride +
                                      row.head * args_.output_head_stride;
        }
    }

    struct Row {
        int64_t token, head;
        uint32_t head_in_group;
    };

    Row first_row() const {
        const auto row = static_cast<uint32_t>(row_begin_);
        return {query_start_ + static_cast<int64_t>(row / group_),
                static_cast<int64_t>(kv_head_) * group_ + row % group_, row % group_};
    }

    void next(Row &row) const {
        ++row.head;
        if (++row.head_in_group < group_) return;
        row.head_in_group = 0;
        row.head -= group_;
        ++row.token;
    }

    // Finds what each row sees and packs the queries. The last row stands in
    // for those that the last row tile lacks.
    void prepare_rows(int32_t kv_begin, int32_t kv_end) {
        const bool with_sinks = args_.sinks != nullptr && kv_begin == 0;
        const auto *query = static_cast<const Element *>(args_.query);
        // Keys that a row sees in front of its own and from it on; positions are below 2^30 in magnitude.
        const int32_t before = args_.sliding_window > 0 ? args_.sliding_window - 1 : 1 << 30;
        const int32_t ahead = args_.sliding_window_ahead > 0 ? args_.sliding_window_ahead : 1 << 30;
        Row row = first_row();
        for (int t = 0; t < num_tiles_; ++t) {
            RowTile &tile = tiles_[t];
            const Element *rows[4];
            float sink[4];
            int32_t begin = INT32_MAX, end = 0, full_begin = 0, full_end = INT32_MAX;
            for (int r = 0; r < tile.num_rows; ++r, next(row)) {
                rows[r] = query + row.token * args_.query_token_stride + row.head * args_.query_head_stride;
                const int32_t position = context_ + static_cast<int32_t>(row.token - query_start_);
                const int32_t low = max_of(position - before, kv_begin);
                const int32_t high = min_of(min_of(causal_ ? position + 1 : seq_len_, position + ahead), kv_end);
                tile.low[r] = low;
                tile.high[r] = high;
                if (with_sinks) sink[r] = args_.sinks[row.head];
                begin = min_of(begin, low);
                end = max_of(end, high);
                full_begin = max_of(full_begin, low);
                full_end = min_of(full_end, high);
            }
            tile.begin = begin;
            tile.end = end;
            tile.full_begin = full_begin;
            tile.full_end = full_end;
            for (int r = tile.num_rows; r < 4; ++r) {
                rows[r] = rows[r - 1];
                tile.low[r] = tile.low[r - 1];
                tile.high[r] = tile.high[r - 1];
                sink[r] = sink[r - 1];
            }
            Packed *packed = query_ + kRows * args_.head_size * t;
            if constexpr (kInt8) {
                float scales[4];
                F::pack(rows, args_.head_size, packed, scales);
                tile.query_scale = vld1q_f32(scales);
                tile.factor = vmulq_n_f32(transforms_ ? vdupq_n_f32(1.0f) : tile.query_scale, exponent_of_.value);
                tile.factor_inverse = vdivq_f32(vdupq_n_f32(1.0f), tile.factor);
            } else {
                F::pack(rows, args_.head_size, packed);
            }
            tile.started = false;
            tile.exponent = vdupq_n_f32(-kInfinity);
            tile.sum = tile.rescale = vdupq_n_f32(0);
            if (with_sinks) start_with_sink(tile, vld1q_f32(sink));
        }
    }

    static void start_with_sink(RowTile &tile, float32x4_t sink) {
        tile.exponent = vrndpq_f32(vmulq_n_f32(sink, kLog2E));
        const float32x4_t weight = exp2_scores<F::kDegree>(sink, exp_scale(kNatural, finite_or_zero(tile.exponent)));
        tile.sum = vmulq_n_f32(weight, F::kWeightBias);
    }

    // The cache's panels for tokens [begin, end) of the sequence; begin is a
    // multiple of 16. Positions are relative to begin from here on.
    void find_panels(int32_t begin, int32_t end) {
        const auto block_size = static_cast<int32_t>(args_.block_size);
        const Cache *cache = static_cast<const Cache *>(args_.kv_cache) + kv_head_ * args_.cache_head_stride;
        const int32_t first = begin / block_size;
        const int32_t *block = args_.block_table + request_ * args_.block_table_stride + first;
        int32_t offset = begin - first * block_size;
        num_segments_ = 0;
        int panel = 0;
        for (int32_t token = begin; token < end; offset = 0) {
            const Cache *base = cache + *block++ * args_.cache_block_stride;
            const int32_t stop = min_of(end, token + block_size - offset);
            const Cache *k = base + static_cast<size_t>(offset) * args_.head_size;
            for (int32_t i = token; i < stop; i += kPanel, k += kPanel * args_.head_size, ++panel) {
                k_panels_[panel] = k;
                if constexpr (kInt8)
                    key_scales_[panel] = reinterpret_cast<const float *>(base + page_elements()) + offset + (i - token);
            }
            // The page's V as if its first panel began at the chunk's first token.
            const Cache *v = base + static_cast<size_t>(block_size) * args_.head_size + 16 * offset;
            add_segment(v - 16 * (token - begin), kPanel * args_.block_size, stop - begin);
            token = stop;
        }
        if (F::kPadsDepth && ((end + 3) & ~3) > seq_len_) take_tail(end - begin, seq_len_ & 3);
        if constexpr (kInt8) take_value_scales(end - begin);
    }

    // Elements of a page, in front of its scales.
    size_t page_elements() const {
        return static_cast<size_t>(args_.block_size) * (args_.head_size + args_.v_head_size);
    }

    // The scales of the chunk's values, so that the largest weight they could
    // have is the largest integer. Tokens behind the end have the scale 0.
    void take_value_scales(int32_t end) {
        const int32_t num_panels = (end + kPanel - 1) / kPanel;
        float32x4_t most = vdupq_n_f32(0x1p-100f);
        for (int32_t panel = 0; panel < num_panels; ++panel) {
            float32x4_t v[4];
            value_scales(panel, end, v);
            most = vmaxq_f32(vmaxq_f32(vmaxq_f32(v[0], v[1]), vmaxq_f32(v[2], v[3])), most);
        }
        const float largest = vmaxvq_f32(most);
        const float units = F::kLargestWeight / largest;
        // The integer sums count in 256 units.
        unit_ = largest * (256.0f / F::kLargestWeight);
        for (int32_t panel = 0; panel < num_panels; ++panel) {
            float32x4_t v[4];
            value_scales(panel, end, v);
            for (int i = 0; i < 4; ++i) v[i] = vmulq_n_f32(v[i], units);
            F::store_scales(weight_scales() + F::kScaleCopies * kPanel * panel, v);
        }
    }

    VAC_INLINE void value_scales(int32_t panel, int32_t end, float32x4_t v[4]) const {
        const float *scales = key_scales_[panel] + args_.block_size;
        for (int i = 0; i < 4; ++i) v[i] = vld1q_f32(scales + 4 * i);
        if (kPanel * (panel + 1) <= end) return;
        for (int i = 0; i < 4; ++i) {
            const uint32x4_t valid = vcltq_s32(FmlaOrder::position(i), vdupq_n_s32(end - kPanel * panel));
            v[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v[i]), valid));
        }
    }

    float *weight_scales() const { return reinterpret_cast<float *>(wide_); }

    void add_segment(const Cache *base, uint32_t panel_stride, int32_t end) {
        segments_[num_segments_++] = {base, panel_stride, end};
    }

    // The last step of V reaches over the sequence's end, into slots that may
    // hold anything; a weight of 0 would not stop a NaN. Zeros are put there.
    void take_tail(int32_t end, int valid) {
        const int32_t first = (end - 1) & ~3;
        const Segment last = segments_[num_segments_ - 1];
        constexpr int kBytes = 64 * sizeof(Cache);  // of 4 tokens of a panel
        uint8_t mask[16];
        for (int i = 0; i < 16; ++i) mask[i] = (i / static_cast<int>(sizeof(Cache)) & 3) < valid ? 0xFF : 0;
        const uint8x16_t keep = vld1q_u8(mask);
        const auto *from = reinterpret_cast<const uint8_t *>(last.base + 16 * first);
        auto *to = reinterpret_cast<uint8_t *>(tail_);
        for (uint32_t panel = 0; panel < args_.v_head_size / kPanel; ++panel)
            for (int i = 0; i < kBytes; i += 16)
                vst1q_u8(to + kBytes * panel + i,
                         vandq_u8(vld1q_u8(from + sizeof(Cache) * panel * last.panel_stride + i), keep));
        segments_[num_segments_ - 1].end = first;
        add_segment(tail_ - 16 * first, 64, first + 4);
    }

    void chunk(int32_t begin, int32_t end) {
        find_panels(begin, end);
        chunk_begin_ = begin;
        const int32_t num_panels = (end - begin + kPanel - 1) / kPanel;
        for (RowTile *tile = tiles_; tile != tiles_ + num_tiles_; ++tile) {
            for (int i = 0; i < F::kMaxima; ++i) tile->running[i] = vdupq_n_f32(-kInfinity);
            tile->chunk_begin = max_of(tile->begin - begin, 0) / F::kStep * F::kStep;
            tile->chunk_end = min_of(tile->end, end) - begin;
            tile->finishes = tile->end <= end && !partial_;
            // Blocks of the smallest size, all of whose tokens are seen, have a loop of their own in the
            // products with V: there is nothing to find out about each.
            const bool small = args_.block_size == kPanel && tile->chunk_begin % kPanel == 0;
            tile->whole_end = small ? tile->chunk_end / kPanel * kPanel : tile->chunk_begin;
            tile->segment = segments_;
            while (tile->segment->end <= tile->chunk_begin && tile->chunk_begin < tile->chunk_end) ++tile->segment;
        }
        by_rows([&](auto rows, int first, int last) { scores<decltype(rows)::value>(first, last, num_panels); });
        by_rows([&](auto rows, int first, int last) {
            for (int t = first; t < last; ++t)
                if (tiles_[t].chunk_begin < tiles_[t].chunk_end) weigh<decltype(rows)::value>(t);
        });
        by_rows([&](auto rows, int first, int last) {
            if constexpr (kInt8)
                add_integer_values<decltype(rows)::value>(first, last);
            else
                add_values<decltype(rows)::value>(first, last);
        });
        for (int t = 0; t < num_tiles_; ++t) tiles_[t].started |= tiles_[t].chunk_begin < tiles_[t].chunk_end;
    }

    // Calls body for the row tiles [first, last) with 4 rows, then for the rest.
    template <class Body>
    VAC_INLINE void by_rows(Body body) {
        const int whole = num_rows_ / kRows;
        if (whole != 0) body(RowCount<4>{}, 0, whole);
        if (whole == num_tiles_) return;
        switch (F::rows_used(num_rows_ % kRows)) {
            case 1:
                return body(RowCount<1>{}, whole, num_tiles_);
            case 2:
                return body(RowCount<2>{}, whole, num_tiles_);
            default:
                return body(RowCount<4>{}, whole, num_tiles_);
        }
    }

    float *scores_of(int t) const { return scores_ + tile_scores_ * t; }
    Weight *weights_of(int t) const { return weights_ + tile_scores_ * t; }
    size_t output_offset(int t, uint32_t panel) const {
        return static_cast<size_t>(t) * kRows * args_.v_head_size + 64 * panel;
    }

    // Each of the chunk's K panels for the row tiles [first, last) that see it.
    template <int Rows>
    VAC_HOT(2048)
    void scores(int first, int last, int32_t num_panels) {
        for (int32_t panel = 0; panel < num_panels; ++panel) score_panel<Rows>(first, last, panel);
    }

    template <int Rows>
    VAC_INLINE void score_panel(int first, int last, int32_t panel) {
        const int32_t token = chunk_begin_ + kPanel * panel;
        const Cache *keys = k_panels_[panel];
        const auto depth = static_cast<int32_t>(args_.head_size);
        const Packed *query = query_ + kRows * depth * first;
        float *out = scores_of(first) + 64 * panel;
        bool wide = false;
        if constexpr (F::kWidens) {
            // A single row tile would not gain from it.
            const int others = kFp8 ? last : last - 1;
            for (int t = first; t < others; ++t) wide |= tiles_[t].begin < token + kPanel && tiles_[t].end > token;
            if (wide) F::widen(keys, wide_, depth);
        }
        for (RowTile *tile = tiles_ + first; tile != tiles_ + last;
             ++tile, query += kRows * depth, out += tile_scores_) {
            if (tile->begin >= token + kPanel || tile->end <= token) continue;
            float32x4_t acc[16];
            if constexpr (kInt8)
                F::template score<Rows>(acc, query, keys, depth, key_scales_[panel]);
            else
                multiply_keys<Rows>(acc, query, keys, wide, tile->end - token <= kPanel / 2);
            if constexpr (!kInt8) F::template join_sums<Rows>(acc);
            for (int i = 0; i < 4 * Rows; ++i) vst1q_f32(out + 4 * i, acc[i]);
            // Found beside the stores, which are what takes time here.
            float32x4_t maximum[4];
            F::template maximum<Rows>(maximum, acc);
            for (int i = 0; i < F::kMaxima; ++i) asm volatile("" : "+w"(maximum[i]));
            if (transforms_ || token < tile->full_begin || token + kPanel > tile->full_end)
                finish_scores<Rows>(out, *tile, token);
            else
                for (int i = 0; i < F::kMaxima; ++i) tile->running[i] = vmaxq_f32(tile->running[i], maximum[i]);
        }
    }

    template <int Rows>
    VAC_INLINE void multiply_keys(float32x4_t acc[16], const Packed *query, const Cache *keys, bool wide, bool half) {
        const int32_t steps = static_cast<int32_t>(args_.head_size) / F::kStep;
        for (int i = 0; i < 16; ++i) acc[i] = vdupq_n_f32(0);
        if constexpr (kFp8 && F::kHalves) {
            if (half) return F::template multiply_half<Rows>(acc, query, wide_, steps);
            F::template multiply_wide<Rows>(acc, query, wide_, steps);
        } else if constexpr (kFp8) {
            F::template multiply_wide<Rows>(acc, query, wide_, steps);
        } else {
            if constexpr (F::kHalves)
                if (half) return F::template multiply_half<Rows>(acc, query, keys, steps);
            if constexpr (F::kWidens)
                if (wide) return F::template multiply_wide<Rows>(acc, query, wide_, steps);
            F::template multiply<Rows>(acc, query, keys, steps);
        }
    }

    // What most panels need not: another function, as its constants would
    // take registers from the product.
    template <int Rows>
    __attribute__((noinline)) void finish_scores(float *scores, RowTile &tile, int32_t token) {
        if (transforms_) transform(scores, static_cast<int>(&tile - tiles_), token);
        const int32x4_t low = vsubq_s32(vld1q_s32(tile.low), vdupq_n_s32(token));
        const int32x4_t high = vsubq_s32(vld1q_s32(tile.high), vdupq_n_s32(token));
        const bool has_low = token < tile.full_begin;
        const float32x4_t masked = vdupq_n_f32(-kInfinity);
        float32x4_t acc[16], maximum[4];
        VAC_UNROLL
        for (int i = 0; i < 4 * Rows; ++i)
            acc[i] = vbslq_f32(vcltq_s32(F::position(i), F::spread(high, i)), vld1q_f32(scores + 4 * i), masked);
        if (has_low) {
            VAC_UNROLL
            for (int i = 0; i < 4 * Rows; ++i)
                acc[i] = vbslq_f32(vcgeq_s32(F::position(i), F::spread(low, i)), acc[i], masked);
        }
        VAC_UNROLL
        for (int i = 0; i < 4 * Rows; ++i) vst1q_f32(scores + 4 * i, acc[i]);
        F::template maximum<Rows>(maximum, acc);
        for (int i = 0; i < F::kMaxima; ++i) tile.running[i] = vmaxq_f32(tile.running[i], maximum[i]);
    }

    // Scores become logits: scale, softcap, then the bias of each head.
    __attribute__((noinline)) void transform(float *scores, int t, int32_t token) const {
        float slope[4] = {0, 0, 0, 0};
        int32_t position[4] = {0, 0, 0, 0};
        for (int r = 0; r < tiles_[t].num_rows; ++r) {
            const uint32_t row = static_cast<uint32_t>(row_begin_) + kRows * t + r;
            position[r] = context_ + static_cast<int32_t>(row / group_);
            if (args_.alibi_slopes != nullptr) slope[r] = args_.alibi_slopes[kv_head_ * group_ + row % group_];
        }
        for (int i = 0; i < 16; ++i) {
            float32x4_t v = vmulq_n_f32(vld1q_f32(scores + 4 * i), scale_);
            if constexpr (kInt8) v = vmulq_f32(v, F::spread(tiles_[t].query_scale, i));
            if (args_.softcap != 0.0f) {
                const float32x4_t cap = vdupq_n_f32(args_.softcap);
                v = vmulq_f32(tanh_f32(vdivq_f32(v, cap)), cap);
            }
            if (args_.alibi_slopes != nullptr) {
                const int32x4_t key = vaddq_s32(F::position(i), vdupq_n_s32(token));
                const float32x4_t distance = vcvtq_f32_s32(vsubq_s32(key, F::spread(vld1q_s32(position), i)));
                v = vfmaq_f32(v, F::spread(vld1q_f32(slope), i), distance);
            }
            vst1q_f32(scores + 4 * i, v);
        }
    }

    template <int Rows>
    VAC_HOT(4096)
    void weigh(int t) {
        RowTile &tile = tiles_[t];
        float32x4_t maximum = F::reduce_maximum(tile.running);
        if constexpr (kInt8)
            maximum = vmulq_f32(maximum, tile.factor);
        else
            maximum = vmulq_n_f32(maximum, exponent_of_.value);
        const float32x4_t highest = vrndpq_f32(maximum);
        const float32x4_t exponent = vmaxq_f32(tile.exponent, highest);
        const float32x4_t finite = finite_or_zero(exponent);
        tile.rescale = power_of_difference(tile.exponent, finite);
        tile.exponent = exponent;
        const int32_t first = tile.chunk_begin / kPanel * kPanel, end = tile.chunk_end;
        const float *scores = scores_of(t) + kRows * first;
        Weight *weights = weights_of(t) + kRows * first;
        float32x4_t sum;
        if constexpr (kInt8) {
            // Integers are relative to the chunk's own maximum.
            F::template weights<Rows>(scores, weights, end - first, tile.factor, tile.factor_inverse,
                                      finite_or_zero(highest), weight_scales() + F::kScaleCopies * first, sum);
            const float32x4_t rescale = power_of_difference(highest, finite);
            tile.unit = vmulq_n_f32(rescale, unit_);
            sum = vmulq_f32(sum, rescale);
        } else {
            F::template weights<Rows>(scores, weights, end - first, exponent_of_, finite, sum);
        }
        tile.sum = vfmaq_f32(sum, tile.sum, tile.rescale);
        tile.inverse = inverse_or_zero(tile.sum);
        if constexpr (kFp8) tile.inverse = vmulq_n_f32(tile.inverse, value_scale_);
    }

    // Each V panel for the row tiles [first, last).
    template <int Rows>
    VAC_HOT(2048)
    void add_values(int first, int last) {
        for (uint32_t panel = 0; panel < args_.v_head_size / kPanel; ++panel) add_panel<Rows>(first, last, panel);
    }

    template <int Rows>
    VAC_INLINE void add_panel(int first, int last, uint32_t panel) {
        const bool wide = F::kWidens && (kFp8 || last - first > 1);
        if constexpr (F::kWidens)
            if (wide) widen_values(first, last, panel);
        for (int t = first; t < last; ++t) {
            const RowTile &tile = tiles_[t];
            const int32_t end = tile.chunk_end;
            int32_t token = tile.chunk_begin;
            if (token >= end) continue;
            float32x4_t acc[16];
            for (int i = 0; i < 16; ++i) acc[i] = vdupq_n_f32(0);
            if (tile.started) {
                const float *output = output_ + output_offset(t, panel);
                for (int i = 0; i < 4 * Rows; ++i)
                    acc[i] = vmulq_f32(vld1q_f32(output + 4 * i), F::spread(tile.rescale, i));
            }
            const Weight *weights = weights_of(t);
            if constexpr (F::kWidens)
                if (wide) {
                    F::template multiply_wide<Rows>(acc, weights + kRows * token, wide_ + 16 * token,
                                                    (end - token + F::kStep - 1) / F::kStep);
                    token = end;
                }
            if constexpr (!kFp8) {
                const Segment *segment = tile.segment;
                for (const size_t offset = kPanel * kPanel * panel; token < tile.whole_end; ++segment, token += kPanel)
                    F::template multiply<Rows>(acc, weights + kRows * token, segment->base + offset + 16 * token,
                                               kPanel / F::kStep);
                for (; token < end; token = segment++->end)
                    F::template multiply<Rows>(acc, weights + kRows * token,
                                               segment->base + panel * segment->panel_stride + 16 * token,
                                               (min_of(end, segment->end) - token + F::kStep - 1) / F::kStep);
            }
            F::template join_sums<Rows>(acc);
            if (!tile.finishes) {
                float *output = output_ + output_offset(t, panel);
                for (int i = 0; i < 16; ++i) vst1q_f32(output + 4 * i, acc[i]);
            } else {
                for (int i = 0; i < 4 * Rows; ++i) acc[i] = vmulq_f32(acc[i], F::spread(tile.inverse, i));
                F::template store_rows<typename F::Store, Rows>(acc, tile.output, tile.num_rows, panel * kPanel);
            }
        }
    }

    template <int Rows>
    VAC_HOT(2048)
    void add_integer_values(int first, int last) {
        for (uint32_t panel = 0; panel < args_.v_head_size / kPanel; ++panel)
            add_integer_panel<Rows>(first, last, panel);
    }

    // As add_panel, in passes that have 16 integer accumulators, and these scaled at the end.
    template <int Rows>
    VAC_INLINE void add_integer_panel(int first, int last, uint32_t panel) {
        constexpr int kColumns = F::template kPassColumns<Rows>, kRegisters = kColumns * Rows / 4;
        for (int pass = 0; pass < kPanel / kColumns; ++pass)
            for (int t = first; t < last; ++t) {
                const RowTile &tile = tiles_[t];
                const int32_t end = tile.chunk_end;
                int32_t token = tile.chunk_begin;
                if (token >= end) continue;
                int32x4_t acc[16];
                for (int i = 0; i < 16; ++i) acc[i] = vdupq_n_s32(0);
                const Weight *weights = weights_of(t);
                const Segment *segment = tile.segment;
                const int pass_offset = kColumns * kInt8Group * pass;
                for (const size_t offset = kPanel * kPanel * panel + pass_offset; token < tile.whole_end;
                     ++segment, token += kPanel)
                    F::template multiply_values<Rows>(acc, weights + kRows * token, segment->base + offset + 16 * token,
                                                      kPanel / F::kStep);
                for (; token < end; token = segment++->end)
                    F::template multiply_values<Rows>(
                        acc, weights + kRows * token,
                        segment->base + panel * segment->panel_stride + 16 * token + pass_offset,
                        (min_of(end, segment->end) - token + F::kStep - 1) / F::kStep);
                float *output = output_ + output_offset(t, panel);
                float32x4_t sums[kRegisters];
                // Straight code in between the branches, so that its latencies overlap.
                VAC_UNROLL
                for (int i = 0; i < kRegisters; ++i)
                    sums[i] = vmulq_f32(F::template combine<Rows>(acc, i),
                                        F::spread(tile.unit, F::template index<Rows>(i, pass)));
                if (tile.started) {
                    VAC_UNROLL
                    for (int i = 0; i < kRegisters; ++i) {
                        const int at = F::template index<Rows>(i, pass);
                        sums[i] = vfmaq_f32(sums[i], vld1q_f32(output + 4 * at), F::spread(tile.rescale, at));
                    }
                }
                if (!tile.finishes) {
                    VAC_UNROLL
                    for (int i = 0; i < kRegisters; ++i)
                        vst1q_f32(output + 4 * F::template index<Rows>(i, pass), sums[i]);
                    continue;
                }
                VAC_UNROLL
                for (int i = 0; i < kRegisters; ++i)
                    sums[i] = vmulq_f32(sums[i], F::spread(tile.inverse, F::template index<Rows>(i, pass)));
                F::template store_pass<typename F::Store, Rows>(sums, tile.output, tile.num_rows,
                                                                panel * kPanel + kColumns * pass);
            }
    }

    // What the row tiles read of a V panel, converted and in one piece.
    void widen_values(int first, int last, uint32_t panel) {
        int32_t begin = INT32_MAX, end = 0;
        for (int t = first; t < last; ++t) {
            if (tiles_[t].chunk_begin >= tiles_[t].chunk_end) continue;
            begin = min_of(begin, tiles_[t].chunk_begin);
            end = max_of(end, tiles_[t].chunk_end);
        }
        const Segment *segment = segments_;
        for (int32_t token = begin; token < end; ++segment) {
            const int32_t stop = min_of(end, segment->end);
            if (stop <= token) continue;
            F::widen(segment->base + panel * segment->panel_stride + 16 * token, wide_ + 16 * token,
                     (stop - token + F::kStep - 1) / F::kStep * F::kStep);
            token = stop;
        }
    }

    static void store(const float32x4_t acc[16], const RowTile &tile, uint32_t panel) {
        if (F::rows_used(tile.num_rows) <= 2)
            F::template store_rows<typename F::Store, 2>(acc, tile.output, tile.num_rows, panel * kPanel);
        else
            F::template store_rows<typename F::Store, 4>(acc, tile.output, tile.num_rows, panel * kPanel);
    }

    void output_nothing(int t) {
        for (uint32_t panel = 0; panel < args_.v_head_size / kPanel; ++panel) {
            float32x4_t acc[16];
            for (int i = 0; i < 16; ++i) acc[i] = vdupq_n_f32(0);
            if (partial_)
                for (int i = 0; i < 16; ++i) vst1q_f32(output_ + output_offset(t, panel) + 4 * i, acc[i]);
            else
                store(acc, tiles_[t], panel);
        }
    }

    const vac_attention_args &args_;
    const uint32_t group_;
    Packed *query_;
    Weight *weights_;
    float *scores_, *own_output_, *output_;
    Wide *wide_;
    Cache *tail_;
    bool transforms_, partial_, causal_;
    float scale_, value_scale_;  // with E4M3's scales of K and V
    float unit_;                 // INT8: of the chunk's weights
    Factor exponent_of_;         // a score times this is an exponent of 2

    uint32_t request_, kv_head_;
    int32_t row_begin_, num_rows_, query_start_, seq_len_, context_, chunk_begin_;
    ptrdiff_t tile_scores_;  // a row tile's share of scores and weights
    int num_tiles_, num_segments_;
    RowTile tiles_[kMaxTiles];
    const Cache *k_panels_[kMaxPanels];
    const float *key_scales_[kMaxPanels];  // INT8; V's lie block_size further on
    Segment segments_[kMaxPanels + 2];
};

template <class F>
void run_task(const vac_attention_args &args, Tile<F> &tile, const int32_t *task, const Workspace &layout) {
    auto *workspace = static_cast<uint8_t *>(args.workspace);
    const auto request = static_cast<uint32_t>(task[VAC_TASK_REQUEST]);
    const int32_t row_begin = task[VAC_TASK_ROW_BEGIN], row_end = task[VAC_TASK_ROW_END];
    const int32_t group = task[VAC_TASK_GROUP];
    if (group < 0) {
        for (int32_t head = task[VAC_TASK_KV_HEAD_BEGIN]; head < task[VAC_TASK_KV_HEAD_END]; ++head)
            for (int32_t row = row_begin; row < row_end; row += kTileRows)
                tile.run(request, static_cast<uint32_t>(head), row, min_of(kTileRows, row_end - row), 0, INT32_MAX,
                         nullptr, nullptr);
        return;
    }
    const auto head = static_cast<uint32_t>(task[VAC_TASK_KV_HEAD_BEGIN]);
    const int32_t padded = (row_end - row_begin + 3) & ~3;
    auto *output = reinterpret_cast<float *>(workspace + layout.partial_output);
    auto *state = reinterpret_cast<float *>(workspace + layout.partial_state);
    const auto row = static_cast<size_t>(task[VAC_TASK_PARTIAL_ROW]);
    tile.run(request, head, row_begin, row_end - row_begin, task[VAC_TASK_KV_BEGIN], task[VAC_TASK_KV_END],
             output + row * args.v_head_size, state + row * 2);
    auto *arrivals = reinterpret_cast<uint32_t *>(workspace + layout.arrivals) + group;
    const int32_t num_splits = task[VAC_TASK_NUM_SPLITS];
    if (__atomic_add_fetch(arrivals, 1u, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(num_splits)) return;
    __atomic_store_n(arrivals, 0u, __ATOMIC_RELAXED);
    const size_t first = row - static_cast<size_t>(task[VAC_TASK_SPLIT]) * padded;
    tile.merge(request, head, row_begin, row_end - row_begin, output + first * args.v_head_size, state + first * 2,
               num_splits);
}

template <class F>
void run_plan(const vac_attention_args &args, uint32_t thread_index, uint32_t thread_count) {
    const int32_t *plan = args.plan;
    const auto num_tasks = static_cast<uint32_t>(plan[0]), num_threads = static_cast<uint32_t>(plan[1]);
    const Workspace layout(args.head_size, args.v_head_size, num_threads);
    auto *workspace = static_cast<uint8_t *>(args.workspace);
    auto *counters = reinterpret_cast<uint32_t *>(workspace + layout.counters);
    uint32_t *next = counters, *finished = counters + 16;  // on a cache line each
    const int32_t *order = plan + kPlanHeader, *tasks = plan + plan[4];
    if (thread_index < num_threads) {
        Tile<F> tile(args, workspace + layout.scratch, thread_index);
        for (;;) {
            const uint32_t i = __atomic_fetch_add(next, 1u, __ATOMIC_RELAXED);
            if (i >= num_tasks) break;
            run_task<F>(args, tile, tasks + VAC_TASK_SIZE * order[i], layout);
        }
    }
    // Nobody takes a task any more once all threads have come here.
    if (__atomic_add_fetch(finished, 1u, __ATOMIC_ACQ_REL) == thread_count) {
        __atomic_store_n(next, 0u, __ATOMIC_RELAXED);
        __atomic_store_n(finished, 0u, __ATOMIC_RELAXED);
    }
}

template <class Bf16, class F16, class F32>
void run_type(const vac_attention_args &args, uint32_t thread_index, uint32_t thread_count) {
    switch (args.dtype) {
        case VAC_BF16:
            return run_plan<Bf16>(args, thread_index, thread_count);
        case VAC_F16:
            return run_plan<F16>(args, thread_index, thread_count);
        default:
            return run_plan<F32>(args, thread_index, thread_count);
    }
}

template <class Exp>
void exp_range(const vac_exp_f32_args &args, uint64_t begin, uint64_t end, const Exp &exp) {
    const float32x4_t least = vdupq_n_f32(0x1p-126f);
    for (uint64_t i = begin; i < end; i += 4) {
        float lanes[4] = {0, 0, 0, 0};
        const uint64_t n = end - i < 4 ? end - i : 4;
        for (uint64_t j = 0; j < n; ++j) lanes[j] = args.input[i + j];
        const float32x4_t v = exp(vld1q_f32(lanes));
        // What BFMMLA does with its inputs.
        vst1q_f32(lanes, vbslq_f32(vcltq_f32(v, least), vdupq_n_f32(0), v));
        for (uint64_t j = 0; j < n; ++j) args.output[i + j] = lanes[j];
    }
}

template <int Degree>
struct GenericExp {
    ExpScale scale = exp_scale(kNatural, vdupq_n_f32(0));
    float32x4_t operator()(float32x4_t s) const { return exp2_scores<Degree>(s, scale); }
};

}  // namespace

void attention(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_attention_args *>(args);
    switch (a.cache_format) {
        case VAC_KV_INT8:
            return run_type<Int8Format<StoreBf16>, Int8Format<StoreF16>, Int8Format<StoreF32>>(a, thread_index,
                                                                                               thread_count);
        case VAC_KV_FP8_E4M3:
            return run_type<Fp8Bf16, Fp8F16, Fp8F32>(a, thread_index, thread_count);
        default:
            return run_type<FormatBf16, FormatF16, FormatF32>(a, thread_index, thread_count);
    }
}

void exp_f32(const void *args, uint32_t thread_index, uint32_t thread_count) {
    const auto &a = *static_cast<const vac_exp_f32_args *>(args);
    const uint64_t begin = a.size * thread_index / thread_count, end = a.size * (thread_index + 1) / thread_count;
    switch (a.dtype) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        case VAC_BF16:
            return exp_range(a, begin, end, WeightExp(kNatural, vdupq_n_f32(0)));
#else
        case VAC_BF16:
            return exp_range(a, begin, end, GenericExp<FormatBf16::kDegree>());
#endif
        case VAC_F16:
            return exp_range(a, begin, end, GenericExp<FormatF16::kDegree>());
        default:
            return exp_range(a, begin, end, GenericExp<FormatF32::kDegree>());
    }
}

}  // namespace vac::VAC_TIER_NS
