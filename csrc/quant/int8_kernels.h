// What the INT8 kernels of one tier call in each other's files.
#pragma once

#include "vac/quant_int8.h"

namespace vac::VAC_TIER_NS {

// Of part of a row or a whole one: the bits of its largest positive value and of its negative value of largest
// magnitude, sign included; 0 for none. A NaN is larger than an infinity either way.
struct Int8Extremes {
    uint32_t high, low;
};

Int8Extremes int8_extremes(int32_t dtype, const void *x, size_t begin, size_t end);

// Quantizes elements begin .. end of row `row` of `rows` (m, k), whose first element is at x; begin is a multiple of 8,
// and so is end unless it is k. The part that begins at 0 writes scale and zero point.
void int8_quantize_part(const vac_int8_quantization &quantization, int32_t dtype, const void *x, size_t begin,
                        size_t end, Int8Extremes extremes, void *rows, size_t m, size_t k, size_t row);

// The same for all of rows `row` (even) and row + 1, at a and b; finds the extremes itself.
void int8_quantize_pair(const vac_int8_quantization &quantization, int32_t dtype, const void *a, const void *b,
                        void *rows, size_t m, size_t k, size_t row);

// A thread's part of args.x to `rows`.
void int8_quantize_to(const vac_int8_quantize_rows_args &args, void *rows, uint32_t thread_index,
                      uint32_t thread_count);

}  // namespace vac::VAC_TIER_NS
