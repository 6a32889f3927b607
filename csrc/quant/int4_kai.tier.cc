// Drives KleidiAI's W4A8 kernels: packing of weights, quantization of activations and products, split over a team.
//
// A thread has columns (and, for many rows, a part of the rows). Per call of a kernel:
//   rows      all up to 8, else blocks whose packed activations stay in L2
//   columns   as many panels of 8 as stay in L1 while the rows of the block pass by
// What the kernel does not write in out's own type goes into a tile of 32 KiB and is rounded from there.
#include <float.h>

#include "quant/int4_elements.h"

namespace {

// The structs of parameters that KleidiAI's packers take.
struct PackParamsCx {
    int8_t lhs_zero_point;
    uint8_t rhs_zero_point;
};
struct PackParamsC32 {
    int8_t lhs_zero_point;
    uint8_t rhs_zero_point;
    uint32_t scale_dtype;
};
constexpr uint32_t kKaiBf16 = 0x0213;

constexpr size_t kL1Bytes = 32 * 1024, kL2Bytes = 256 * 1024;

struct Thread {
    char *lhs;  // packed activations that it reads
    size_t mr;
    int kernel;         // 0: M = 1 or no I8MM; 1: I8MM
    float *row, *tile;  // its own scratch
};

Thread thread_of(const vac_int4_kai_args &args, uint32_t thread_index) {
    const KaiWorkspace w = kai_workspace(args.m, args.k);
    char *base = align_line(args.workspace), *own = base + w.lhs + thread_index * w.thread;
    const bool i8mm = args.group == 0 ? args.kai->matmul_cx_f32[1] != nullptr : args.kai->matmul_c32_f32[1] != nullptr;
    Thread t;
    t.lhs = args.lhs_packed ? base : own;
    t.mr = kai_mr(args.m, i8mm);
    t.kernel = t.mr == 1 ? 0 : 1;
    t.row = reinterpret_cast<float *>(own + w.own_lhs);
    t.tile = reinterpret_cast<float *>(own + w.own_lhs + w.row);
    return t;
}

// Rows [begin, end) of lhs, begin a multiple of mr, into `packed`, which holds row 0 first.
void pack_rows(const vac_int4_kai_args &args, const Thread &thread, size_t begin, size_t end, char *packed) {
    const size_t size = element_size(args.dtype), k = args.k, mr = thread.mr;
    const char *lhs = static_cast<const char *>(args.lhs) + begin * args.lhs_stride * size;
    char *to = packed + begin / mr * kai_lhs_tile_bytes(k, mr);
    // KleidiAI's BF16 packer takes whole vectors of 8.
    const bool bf16 = args.dtype == VAC_BF16 && args.kai->lhs_pack_bf16 != nullptr && k % 8 == 0;
    if (bf16 || args.dtype == VAC_F32) {
        const vac_kai_lhs_pack pack = bf16 ? args.kai->lhs_pack_bf16 : args.kai->lhs_pack_f32;
        return pack(end - begin, k, mr, kKaiKr, kKaiSr, 0, lhs, args.lhs_stride * size, to);
    }
    for (size_t row = begin; row < end; ++row, lhs += args.lhs_stride * size) {
        widen_row(args.dtype, lhs, k, thread.row);
        to = packed + row / mr * kai_lhs_tile_bytes(k, mr);
        args.kai->lhs_pack_f32(1, k, mr, kKaiKr, kKaiSr, row % mr, thread.row, k * sizeof(float), to);
    }
}

void round_tile(const vac_int4_kai_args &args, const float *tile, size_t row, size_t rows, size_t column,
                size_t columns) {
    with_stored(args.out_dtype, [&](auto stored) {
        using Stored = decltype(stored);
        for (size_t r = 0; r < rows; ++r, tile += columns) {
            auto *out = static_cast<typename Stored::Element *>(args.out) + (row + r) * args.out_stride + column;
            size_t c = 0;
            for (; c + 16 <= columns; c += 16) {
                for (size_t i = 0; i < 16; i += 4) Stored::store4(out + c + i, vld1q_f32(tile + c + i));
            }
            for (; c < columns; c += 4)
                store_some<Stored>(out + c, load_some<StoredF32>(tile + c, columns - c), columns - c);
        }
    });
}

// rows x columns of out in one call of a kernel.
void multiply(const vac_int4_kai_args &args, const Thread &thread, size_t row, size_t rows, size_t column,
              size_t columns) {
    const vac_kai_int4 &kai = *args.kai;
    const char *lhs = thread.lhs + row / thread.mr * kai_lhs_tile_bytes(args.k, thread.mr);
    const char *rhs = static_cast<const char *>(args.rhs) + column / kKaiNr * kai_panel_bytes(args.k, args.group);
    const vac_kai_matmul_cx direct = args.group == 0 && args.out_dtype == VAC_BF16  ? kai.matmul_cx_bf16[thread.kernel]
                                     : args.group == 0 && args.out_dtype == VAC_F32 ? kai.matmul_cx_f32[thread.kernel]
                                                                                    : nullptr;
    const size_t size = element_size(args.out_dtype), stride = args.out_stride * size;
    char *out = static_cast<char *>(args.out) + row * stride + column * size;
    if (direct) return direct(rows, columns, args.k, lhs, rhs, out, stride, size, -FLT_MAX, FLT_MAX);
    const bool in_place = args.out_dtype == VAC_F32;
    float *to = in_place ? reinterpret_cast<float *>(out) : thread.tile;
    const size_t to_stride = in_place ? stride : columns * sizeof(float);
    if (args.group == 0)
        kai.matmul_cx_f32[thread.kernel](rows, columns, args.k, lhs, rhs, to, to_stride, 4, -FLT_MAX, FLT_MAX);
    else
        kai.matmul_c32_f32[thread.kernel](rows, columns, args.k, args.group, lhs, rhs, to, to_stride, 4, -FLT_MAX,
                                          FLT_MAX);
    if (!in_place) round_tile(args, to, row, rows, column, columns);
}

}  // namespace

namespace vac::VAC_TIER_NS {

void int4_kai_rhs_pack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_kai_rhs_pack_args *>(opaque);
    const Range panels = part_of_thread(1, args.n, thread_index, thread_count).panels;
    if (panels.size() == 0) return;
    const size_t column = panels.begin * kKaiNr, columns = min_size(panels.end * kKaiNr, args.n) - column;
    const size_t row_bytes = args.k / 2;
    const uint8_t *rhs = args.rhs + column * row_bytes;
    const float *bias = args.bias ? args.bias + column : nullptr;
    char *packed = static_cast<char *>(args.packed) + panels.begin * kai_panel_bytes(args.k, args.group);
    if (args.group == 0) {
        const PackParamsCx params = {1, 8};
        args.kai->rhs_pack_cx(1, columns, args.k, kKaiNr, kKaiKr, kKaiSr, rhs, bias,
                              static_cast<const float *>(args.scales) + column, packed, 0, &params);
        return;
    }
    const PackParamsC32 params = {1, 8, kKaiBf16};
    const size_t groups = args.k / args.group;
    args.kai->rhs_pack_c32(1, columns, args.k, kKaiNr, kKaiKr, kKaiSr, args.group, rhs, row_bytes, bias,
                           static_cast<const uint16_t *>(args.scales) + column * groups, groups * sizeof(uint16_t),
                           packed, 0, &params);
}

void int4_kai_lhs_pack(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_kai_args *>(opaque);
    if (args.m == 0) return;
    const Thread thread = thread_of(args, thread_index);
    const Range tiles = share(ceil_div(args.m, thread.mr), thread_index, thread_count);
    if (tiles.size() == 0) return;
    pack_rows(args, thread, tiles.begin * thread.mr, min_size(tiles.end * thread.mr, args.m),
              align_line(args.workspace));
}

void int4_kai(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_kai_args *>(opaque);
    const Part part = part_of_thread(args.m, args.n, thread_index, thread_count);
    if (part.rows.size() == 0 || part.panels.size() == 0) return;
    const Thread thread = thread_of(args, thread_index);
    if (!args.lhs_packed) pack_rows(args, thread, 0, args.m, thread.lhs);

    // Rows of a call: a multiple of 8, the tallest tile of a kernel.
    constexpr size_t kRows = 8;
    const size_t row_block = max_size(kL2Bytes / kai_lhs_tile_bytes(args.k, 1) / kRows, 1) * kRows;
    for (size_t row = part.rows.begin; row < part.rows.end; row += row_block) {
        const size_t rows = min_size(part.rows.end - row, row_block);
        // Few rows pass by the weight once, so it need not stay in L1.
        size_t panels = rows <= kRows ? ~size_t{0} : max_size(kL1Bytes / kai_panel_bytes(args.k, args.group), 1);
        panels = min_size(panels, max_size(kKaiTileFloats / (kKaiNr * round_up(rows, kRows)), 1));
        const size_t tall = min_size(row_block, kKaiTileFloats / (kKaiNr * panels) / kRows * kRows);
        for (size_t panel = part.panels.begin; panel < part.panels.end; panel += panels) {
            const size_t column = panel * kKaiNr;
            const size_t columns = min_size(min_size(panel + panels, part.panels.end) * kKaiNr, args.n) - column;
            for (size_t r = 0; r < rows; r += tall)
                multiply(args, thread, row + r, min_size(rows - r, tall), column, columns);
        }
    }
}

}  // namespace vac::VAC_TIER_NS
