// W4A8: activations to int8, then integer products with the packed int4 weight, for one layer or for experts.
//
//   rows      up to 16: the weight passes by once, widened in registers; all of K in one go
//             else blocks of 96, a panel of <= 4096 k widened into L1 for all tiles of a block
//   K         blocks of <= 4096 for many rows; partial sums of 32 panels wait in the workspace
//   panels    8 columns each
//   tiles     int4_smmla.h, int4_sdot.h, given their rows by int4_rows.h
#include "quant/int4_rows.h"

namespace {

// One thread's view of a call.
struct Context : Int4Layer {
    W4a8Workspace layout;
    char *own;      // its part of the workspace
    Quantized lhs;  // of all rows
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
void run_lone(const Context &context, const Int4Rows &rows, const Range &panels) {
    int8_t *lone = reinterpret_cast<int8_t *>(context.own + context.layout.lone);
    pack_lone(rows.lhs, rows.first, context.args.k, lone);
    for (size_t panel = panels.begin; panel < panels.end;) {
        const Tiles::Choice choice = Tiles::lone(context.kind, panels.end - panel);
        Int4Tile tile = tile_at(context, rows, 0, panel, 0);
        tile.lhs = lone;
        tile.sums += rows.first % 2 * 2;
        choice.kernel(tile, 0);
        panel += choice.panels;
    }
}
#endif

// A block of <= 96 rows.
void run_block(const Context &context, const Int4Rows &rows, const Range &panels) {
    const PackedInt4 &packed = context.packed;
    const size_t group_steps = packed.groups == 1 ? 1 : packed.group / kStep;
    const size_t k_steps = max_size(kBlockK / kStep / group_steps, 1) * group_steps;
    const size_t most = Tiles::most_rows(context.kind != 0, true);
    auto *widened = reinterpret_cast<uint8_t *>(context.own + context.layout.widened);
    float *partial = reinterpret_cast<float *>(context.own + context.layout.partial);
    for (size_t first = panels.begin; first < panels.end; first += kBlockPanels) {
        const size_t end = min_size(first + kBlockPanels, panels.end);
        // K = 0 is one empty block.
        for (size_t step = 0; step == 0 || step < packed.steps; step += k_steps) {
            const size_t steps = min_size(k_steps, packed.steps - step);
            for (size_t panel = first; panel < end; ++panel) {
                Int4Tile tile = tile_at(context, rows, 0, panel, step);
                tile.values = Tiles::widen(tile.values, steps, widened);
                tile.steps = steps;
                tile.first = step == 0;
                tile.last = step + steps == packed.steps;
                float *to = partial + (panel - first) * kBlockRows * kPanelColumns;
                for (size_t row = 0; row < rows.count; row += most) {
                    tile.rows = min_size(most, rows.count - row);
                    const Tiles::Choice choice = Tiles::widened(context.kind, tile.rows);
                    for (size_t part = 0; part < choice.parts; ++part) {
                        tile.partial = to + (row + part * most / choice.parts) * kPanelColumns;
                        choice.kernel(tile, part * (kPanelColumns / choice.parts));
                    }
                    tile.lhs += most / 2 * tile.pair_stride;
                    tile.sums += most / 2 * tile.sums_stride;
                    tile.row_scales += most;
                    tile.row += most;
                }
            }
        }
    }
}

void run_rows(const Context &context, Int4Rows rows, const Range &panels) {
    if (panels.size() == 0) return;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (rows.count == 1) return run_lone(context, rows, panels);
#endif
    if (rows.count <= kSmallRows) return run_small(context, rows, panels);
    for (size_t left = rows.count; left; left -= rows.count) {
        rows.count = min_size(left, kBlockRows);
        run_block(context, rows, panels);
        rows.first += rows.count;
        rows.out += rows.count;
    }
}

// Rows of an expert, gathered a block at a time.
void run_expert(const Context &context, size_t expert, const Range &panels) {
    const vac_int4_gemm_args &args = context.args;
    const size_t end = static_cast<size_t>(args.expert_start[expert + 1]);
    const size_t block = gather_rows_of(args.k), groups = context.packed.groups;
    Int4Rows rows;
    rows.rhs = static_cast<const char *>(args.rhs) + expert * args.rhs_expert_stride;
    rows.bias =
        args.bias ? static_cast<const char *>(args.bias) + expert * args.n * element_size(args.bias_dtype) : nullptr;
    for (size_t row = static_cast<size_t>(args.expert_start[expert]); row < end; row += rows.count) {
        rows.out = row;
        rows.count = min_size(block, end - row);
        const auto source = [&](size_t r) { return args.row_index ? static_cast<size_t>(args.row_index[r]) : r; };
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if (rows.count == 1) {
            rows.lhs = context.lhs;
            rows.first = source(row);
            run_rows(context, rows, panels);
            continue;
        }
#endif
        rows.lhs = quantized_at(context.own + context.layout.gathered, block, args.k, groups);
        rows.first = 0;
        for (size_t r = 0; r < rows.count; ++r) copy_row(context.lhs, source(row + r), rows.lhs, r, args.k);
        if (rows.count % 2) clear_row(rows.lhs, rows.count, args.k);
        run_rows(context, rows, panels);
    }
}

}  // namespace

namespace vac::VAC_TIER_NS {

void int4_w4a8_quantize(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_gemm_args *>(opaque);
    const Range pairs = share(ceil_div(args.m, 2), thread_index, thread_count);
    quantize_pairs(args, pairs.begin, pairs.end,
                   quantized_at(align_line(args.workspace), args.m, args.k, groups_of(args.k, args.group)));
}

void int4_w4a8(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_int4_gemm_args *>(opaque);
    if (args.m == 0 || args.n == 0 || (args.num_experts && args.num_rows == 0)) return;
    const PackedInt4 packed = packed_int4(args.scale_dtype, args.n, args.k, args.group, args.has_zero_points);
    const W4a8Workspace layout = w4a8_workspace(args.m, args.k, args.group, args.num_experts);
    char *base = align_line(args.workspace), *own = base + layout.lhs + thread_index * layout.thread;
    const Quantized lhs = quantized_at(args.lhs_quantized ? base : own, args.m, args.k, packed.groups);
    const Context context = {{args, packed, Tiles::kind(packed.groups > 1, packed.scale_bytes == 2)}, layout, own, lhs};
    const Part part = args.num_experts ? Part{} : part_of_thread(args.m, args.n, thread_index, thread_count);
    if (!args.num_experts && (part.rows.size() == 0 || part.panels.size() == 0)) return;
    if (!args.lhs_quantized) quantize_pairs(args, 0, ceil_div(args.m, 2), lhs);
    if (args.num_experts)
        return share_experts(args, packed.panels, thread_index, thread_count,
                             [&](size_t expert, const Range &panels) { run_expert(context, expert, panels); });
    const Int4Rows rows = {
        lhs, part.rows.begin, part.rows.size(), part.rows.begin, static_cast<const char *>(args.rhs), args.bias};
    run_rows(context, rows, part.panels);
}

}  // namespace vac::VAC_TIER_NS
