// Rows of activations, scales and results as FP32 and back, whatever they are stored as.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include <arm_neon.h>

#include "common/stored.h"
#include "quant/int4_layout.h"

namespace {

// Calls body(StoredF32{}), body(StoredF16{}) or body(StoredBF16{}).
template <class Body>
inline void with_stored(int dtype, Body body) {
    if (dtype == VAC_F32) return body(StoredF32{});
    if (dtype == VAC_F16) return body(StoredF16{});
    body(StoredBF16{});
}

// `count` elements as FP32.
inline void widen_row(int dtype, const void *from, size_t count, float *to) {
    with_stored(dtype, [&](auto stored) {
        using Stored = decltype(stored);
        const auto *p = static_cast<const typename Stored::Element *>(from);
        size_t i = 0;
        for (; i + 4 <= count; i += 4) vst1q_f32(to + i, Stored::load4(p + i));
        if (i < count) store_some<StoredF32>(to + i, load_some<Stored>(p + i, count - i), count - i);
    });
}

}  // namespace
