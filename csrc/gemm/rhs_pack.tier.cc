// Weights into panels of 8 columns and single rows back out of them; the layouts are drawn in vac/gemm.h.
#include <arm_neon.h>

#include "gemm/blocking.h"

namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kBfmmla = true;
#else
constexpr bool kBfmmla = false;
#endif

// Copies 16 bytes of each of 8 rows, as far as rows and bytes are there; the rest is zero.
inline void load_rows(const char *from, size_t stride, size_t rows, size_t bytes, uint8x16_t (&x)[8]) {
    if (rows == 8 && bytes >= 16) {
        for (size_t r = 0; r < 8; ++r) x[r] = vld1q_u8(reinterpret_cast<const uint8_t *>(from + r * stride));
        return;
    }
    uint8_t buffer[8][16] = {};
    for (size_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < min_size(bytes, 16); ++i) buffer[r][i] = static_cast<uint8_t>(from[r * stride + i]);
    }
    for (size_t r = 0; r < 8; ++r) x[r] = vld1q_u8(buffer[r]);
}

inline uint8x16_t zip1_64(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline uint8x16_t zip2_64(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// y[i]: element i of x[0 .. 3], as 32-bit elements.
inline void transpose_32(const uint8x16_t *x, uint8x16_t *y) {
    const auto word = [](uint8x16_t v) { return vreinterpretq_u32_u8(v); };
    const auto byte = [](uint32x4_t v) { return vreinterpretq_u8_u32(v); };
    const uint8x16_t a = byte(vzip1q_u32(word(x[0]), word(x[2]))), b = byte(vzip2q_u32(word(x[0]), word(x[2])));
    const uint8x16_t c = byte(vzip1q_u32(word(x[1]), word(x[3]))), d = byte(vzip2q_u32(word(x[1]), word(x[3])));
    y[0] = byte(vzip1q_u32(word(a), word(c)));
    y[1] = byte(vzip2q_u32(word(a), word(c)));
    y[2] = byte(vzip1q_u32(word(b), word(d)));
    y[3] = byte(vzip2q_u32(word(b), word(d)));
}

// y[i]: element i of x[order[0]], x[order[1]], ..., as 16-bit elements.
inline void transpose_16(const uint8x16_t (&x)[8], const uint8_t (&order)[8], uint8x16_t (&y)[8]) {
    const auto half = [](uint8x16_t v) { return vreinterpretq_u16_u8(v); };
    const auto byte = [](uint16x8_t v) { return vreinterpretq_u8_u16(v); };
    // Elements of two neighbours side by side: pairs of them are 32-bit elements to transpose.
    uint8x16_t low[4], high[4];
    for (int i = 0; i < 4; ++i) {
        low[i] = byte(vzip1q_u16(half(x[order[2 * i]]), half(x[order[2 * i + 1]])));
        high[i] = byte(vzip2q_u16(half(x[order[2 * i]]), half(x[order[2 * i + 1]])));
    }
    transpose_32(low, y);
    transpose_32(high, y + 4);
}

constexpr uint8_t kInOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr uint8_t kWidenOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// One panel; `k` elements of `size` bytes in a row, 16 bytes of every row at a time.
inline void pack_panel(int dtype, const char *from, size_t stride, size_t rows, size_t k, uint8_t *to) {
    const size_t size = element_size(dtype), bytes = k * size;
    const uint8_t *end = to + panel_bytes(dtype, k);
    for (size_t at = 0; at < bytes; at += 16) {
        uint8x16_t x[8], y[8];
        load_rows(from + at, stride, rows, bytes - at, x);
        if (dtype == VAC_F32) {
            uint8x16_t first[4], second[4];
            transpose_32(x, first);
            transpose_32(x + 4, second);
            for (int i = 0; i < 4; ++i) y[2 * i] = first[i], y[2 * i + 1] = second[i];
        } else if (dtype == VAC_F16) {
            transpose_16(x, kInOrder, y);
        } else if (kBfmmla) {
            for (int i = 0; i < 4; ++i) {
                y[i] = zip1_64(x[2 * i], x[2 * i + 1]);
                y[i + 4] = zip2_64(x[2 * i], x[2 * i + 1]);
            }
        } else {
            transpose_16(x, kWidenOrder, y);
        }
        for (int i = 0; i < 8 && to < end; ++i, to += 16) vst1q_u8(to, y[i]);
    }
}

// Where column c of a panel keeps its elements: runs of `run` elements from `first` on, one run every 8 * run.
struct Column {
    size_t first, run;
};

inline Column column_place(int dtype, size_t c) {
    if (dtype == VAC_BF16 && kBfmmla) return {4 * c, 4};
    if (dtype == VAC_BF16) return {c % 4 * 2 + c / 4, 1};
    return {c, 1};
}

// Elements begin .. end of one row of the weight.
template <class Element>
inline void gather(const Element *panel, Column place, size_t begin, size_t end, Element *out) {
    if (place.run == 4) {
        const Element *from = panel + place.first + begin / 4 * 32;
        size_t i = begin;  // a multiple of 4
        for (; i + 4 <= end; i += 4, from += 32) __builtin_memcpy(out + i, from, 4 * sizeof(Element));
        for (; i < end; ++i) out[i] = *from++;
        return;
    }
    for (size_t i = begin; i < end; ++i) out[i] = panel[8 * i + place.first];
}

// Pieces of 1024 elements: the lookup of a single token is spread over a team too.
constexpr size_t kPiece = 1024;

void gather_rows(const vac_gemm_rhs_gather_rows_args &args, bool all, uint32_t thread_index, uint32_t thread_count) {
    const size_t pieces = ceil_div(args.k, kPiece), size = element_size(args.dtype);
    const Range work = share((all ? args.n : args.num_rows) * pieces, thread_index, thread_count);
    for (size_t w = work.begin; w < work.end; ++w) {
        const size_t i = w / pieces, begin = w % pieces * kPiece, end = min_size(begin + kPiece, args.k);
        char *out = static_cast<char *>(args.out) + i * args.out_stride * size;
        int64_t id = static_cast<int64_t>(i);
        if (!all && args.id_bytes == 8) id = static_cast<const int64_t *>(args.ids)[i];
        if (!all && args.id_bytes == 4) id = static_cast<const int32_t *>(args.ids)[i];
        if (!all) id -= args.first_id;
        if (id < 0 || static_cast<uint64_t>(id) >= args.n) {
            __builtin_memset(out + begin * size, 0, (end - begin) * size);
            continue;
        }
        const size_t n = static_cast<size_t>(id);
        const char *panel = static_cast<const char *>(args.packed) + n / 8 * panel_bytes(args.dtype, args.k);
        const Column place = column_place(args.dtype, n % 8);
        if (size == 4)
            gather(reinterpret_cast<const uint32_t *>(panel), place, begin, end, reinterpret_cast<uint32_t *>(out));
        else
            gather(reinterpret_cast<const uint16_t *>(panel), place, begin, end, reinterpret_cast<uint16_t *>(out));
    }
}

}  // namespace

namespace vac::VAC_TIER_NS {

void gemm_rhs_pack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gemm_rhs_pack_args *>(opaque);
    const size_t stride = args.rhs_stride * element_size(args.dtype), bytes = panel_bytes(args.dtype, args.k);
    const Range panels = part_of_thread(1, args.n, thread_index, thread_count).panels;
    for (size_t panel = panels.begin; panel < panels.end; ++panel) {
        const size_t row = panel * kPanelColumns;
        pack_panel(args.dtype, static_cast<const char *>(args.rhs) + row * stride, stride,
                   min_size(args.n - row, kPanelColumns), args.k, static_cast<uint8_t *>(args.packed) + panel * bytes);
    }
}

void gemm_rhs_gather_rows(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    gather_rows(*static_cast<const vac_gemm_rhs_gather_rows_args *>(opaque), false, thread_index, thread_count);
}

void gemm_rhs_unpack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    gather_rows(*static_cast<const vac_gemm_rhs_gather_rows_args *>(opaque), true, thread_index, thread_count);
}

}  // namespace vac::VAC_TIER_NS
