// Int4 weights into panels of 8 columns, and back as FP32; the layout is drawn in vac/quant_int4.h.
#include "quant/int4_elements.h"

namespace {

// 16 values of a row from k on as 0 .. 15, 8 where there are none.
inline uint8x16_t load_values(int format, const uint8_t *row, size_t k, size_t count) {
    uint8_t buffer[16];
    if (format == VAC_INT4_NIBBLES) {
        const uint8_t *from = row + k / 2;
        if (count < 16) {
            __builtin_memset(buffer, 0x88, 8);
            for (size_t i = 0; i < count / 2; ++i) buffer[i] = from[i];
            if (count % 2) buffer[count / 2] = static_cast<uint8_t>((from[count / 2] & 15) | 0x80);
            from = buffer;
        }
        const uint8x8_t both = vld1_u8(from);
        const uint8x8_t even = vand_u8(both, vdup_n_u8(15)), odd = vshr_n_u8(both, 4);
        return vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
    }
    const uint8_t flip = format == VAC_INT4_S8 ? 8 : 0;
    const uint8_t *from = row + k;
    if (count < 16) {
        __builtin_memset(buffer, 8 ^ flip, 16);
        for (size_t i = 0; i < count; ++i) buffer[i] = from[i];
        from = buffer;
    }
    return vandq_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(flip)), vdupq_n_u8(15));
}

// 8 bytes of a column: k + i in the high nibble, k + 8 + i in the low one.
inline uint8x8_t interleave(uint8x16_t values) {
    const uint8x8_t high = veor_u8(vget_low_u8(values), vdup_n_u8(8));
    return vsli_n_u8(vget_high_u8(values), high, 4);
}

// Where the 8 bytes of column c lie in a step of 64 bytes: as they are, or 4 bytes `kWordStride` apart from the others.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr size_t kColumnStride = 8, kWordStride = 4;
#else
constexpr size_t kColumnStride = 4, kWordStride = 32;
#endif

inline void store_column(uint8_t *step, size_t column, uint8x8_t bytes) {
    uint8_t *to = step + column * kColumnStride;
    const uint32x2_t words = vreinterpret_u32_u8(bytes);
    const uint32_t low = vget_lane_u32(words, 0), high = vget_lane_u32(words, 1);
    __builtin_memcpy(to, &low, 4);
    __builtin_memcpy(to + kWordStride, &high, 4);
}

void pack_values(const vac_int4_rhs_pack_args &args, size_t row, size_t rows, uint8_t *to) {
    const auto *rhs = static_cast<const uint8_t *>(args.rhs) + row * args.rhs_stride;
    const uint8x8_t nothing = interleave(vdupq_n_u8(8));
    for (size_t k = 0; k < args.k; k += kStep, to += kStepBytes) {
        const size_t count = min_size(args.k - k, kStep);
        for (size_t c = 0; c < kPanelColumns; ++c)
            store_column(
                to, c, c < rows ? interleave(load_values(args.format, rhs + c * args.rhs_stride, k, count)) : nothing);
    }
}

void pack_scales(const vac_int4_rhs_pack_args &args, const PackedInt4 &packed, size_t row, size_t rows, char *to) {
    for (size_t g = 0; g < packed.groups; ++g) {
        for (size_t c = 0; c < kPanelColumns; ++c) {
            const size_t at = g * kPanelColumns + c, from = (row + c) * args.scale_stride + g;
            if (packed.scale_bytes == 2) {
                const auto *scales = static_cast<const uint16_t *>(args.scales);
                reinterpret_cast<uint16_t *>(to)[at] = c < rows ? scales[from] : uint16_t{0};
            } else {
                const float32x4_t scale = c < rows ? load_some(args.scale_dtype, args.scales, from, 1) : vdupq_n_f32(0);
                reinterpret_cast<float *>(to)[at] = vgetq_lane_f32(scale, 0);
            }
        }
    }
}

void pack_zero_points(const vac_int4_rhs_pack_args &args, const PackedInt4 &packed, size_t row, size_t rows,
                      int8_t *to) {
    const int middle = args.format == VAC_INT4_S8 ? 0 : 8;
    for (size_t g = 0; g < packed.groups; ++g) {
        for (size_t c = 0; c < kPanelColumns; ++c)
            *to++ =
                static_cast<int8_t>(c < rows ? args.zero_points[(row + c) * args.zero_point_stride + g] - middle : 0);
    }
}

}  // namespace

namespace vac::VAC_TIER_NS {

void int4_rhs_pack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_rhs_pack_args *>(opaque);
    const PackedInt4 packed = packed_int4(args.scale_dtype, args.n, args.k, args.group, args.zero_points != nullptr);
    const Range panels = part_of_thread(1, args.n, thread_index, thread_count).panels;
    char *to = static_cast<char *>(args.packed);
    for (size_t panel = panels.begin; panel < panels.end; ++panel) {
        const size_t row = panel * kPanelColumns, rows = min_size(args.n - row, kPanelColumns);
        pack_values(args, row, rows, reinterpret_cast<uint8_t *>(to + panel * packed.values_panel));
        pack_scales(args, packed, row, rows, to + packed.scales + panel * packed.scales_panel);
        if (args.zero_points)
            pack_zero_points(args, packed, row, rows,
                             reinterpret_cast<int8_t *>(to + packed.zero_points + panel * packed.zero_points_panel));
    }
    const size_t end = packed.zero_points + packed.panels * packed.zero_points_panel;
    if (thread_index == 0) __builtin_memset(to + end, 0, packed.size - end);
}

void int4_rhs_unpack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_rhs_unpack_args *>(opaque);
    const PackedInt4 packed = packed_int4(args.scale_dtype, args.n, args.k, args.group, args.has_zero_points);
    const Range rows = share(args.n, thread_index, thread_count);
    const char *base = static_cast<const char *>(args.packed);
    for (size_t row = rows.begin; row < rows.end; ++row) {
        const size_t panel = row / kPanelColumns, c = row % kPanelColumns;
        const auto *values = reinterpret_cast<const uint8_t *>(base + panel * packed.values_panel);
        const char *scales = base + packed.scales + panel * packed.scales_panel;
        const auto *zero_points =
            reinterpret_cast<const int8_t *>(base + packed.zero_points + panel * packed.zero_points_panel);
        float *out = args.out + row * args.out_stride;
        for (size_t k = 0; k < args.k; ++k) {
            const size_t i = k % 8, g = packed.groups == 1 ? 0 : k / packed.group;
            const uint8_t both = values[k / kStep * kStepBytes + c * kColumnStride + i / 4 * kWordStride + i % 4];
            const int value = (k % kStep < 8 ? (both >> 4) ^ 8 : both & 15) - 8;
            const size_t at = g * kPanelColumns + c;
            const int zero_point = args.has_zero_points ? zero_points[at] : 0;
            const int scale_dtype = packed.scale_bytes == 2 ? VAC_BF16 : VAC_F32;
            out[k] = vgetq_lane_f32(load_some(scale_dtype, scales, at, 1), 0) * static_cast<float>(value - zero_point);
        }
    }
}

}  // namespace vac::VAC_TIER_NS
