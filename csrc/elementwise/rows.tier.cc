// Rows moved or added: embedding lookup, gathering by index, addition.
#include "vac/elementwise.h"

#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

inline int64_t element_size(int32_t dtype) {
    return dtype == VAC_F32 ? 4 : dtype == VAC_F16 || dtype == VAC_BF16 ? 2 : 0;
}

// Copies bytes, or clears them where there is no source.
inline void copy_or_clear(char *out, const char *source, int64_t bytes) {
    if (source == nullptr)
        __builtin_memset(out, 0, static_cast<size_t>(bytes));
    else
        __builtin_memcpy(out, source, static_cast<size_t>(bytes));
}

}  // namespace

void embedding(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_embedding_args *>(untyped);
    const int64_t size = element_size(args.dtype);
    if (size == 0) return;
    for_row_pieces(args.num_tokens, args.hidden_size, thread_index, thread_count,
                   [&](int64_t token, int64_t begin, int64_t end) {
                       const int64_t id = args.ids_are_int64 ? static_cast<const int64_t *>(args.ids)[token]
                                                             : static_cast<const int32_t *>(args.ids)[token];
                       const bool ours = id >= args.vocab_start && id < args.vocab_end;
                       const int64_t row = (id - args.vocab_start) * args.table_row_stride;
                       copy_or_clear(static_cast<char *>(args.out) + (token * args.out_token_stride + begin) * size,
                                     ours ? static_cast<const char *>(args.table) + (row + begin) * size : nullptr,
                                     (end - begin) * size);
                   });
}

void copy_rows(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_copy_rows_args *>(untyped);
    const int64_t size = element_size(args.dtype);
    if (size == 0) return;
    for_row_pieces(
        args.num_indices, args.num_columns, thread_index, thread_count, [&](int64_t i, int64_t begin, int64_t end) {
            const int64_t row = args.index[i];
            const bool valid = row >= 0 && row < args.num_rows;
            copy_or_clear(
                static_cast<char *>(args.out) + (i * args.out_row_stride + begin) * size,
                valid ? static_cast<const char *>(args.x) + (row * args.x_row_stride + begin) * size : nullptr,
                (end - begin) * size);
        });
}

void add(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_add_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        for_row_pieces(args.num_rows, args.num_columns, thread_index, thread_count,
                       [&](int64_t row, int64_t begin, int64_t end) {
                           const Element *a = static_cast<const Element *>(args.a) + row * args.a_row_stride;
                           const Element *b = static_cast<const Element *>(args.b) + row * args.b_row_stride;
                           Element *out = static_cast<Element *>(args.out) + row * args.out_row_stride;
                           for_columns(begin, end, [&](int64_t i, auto part) {
                               store<Type>(out + i, load<Type>(a + i, part) + load<Type>(b + i, part), part);
                           });
                       });
    });
}

}  // namespace vac::VAC_TIER_NS
