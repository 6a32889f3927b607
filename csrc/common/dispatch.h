// How an exported kernel finds its variant for the CPU at hand.
//
// A file named `*.tier.cc` is compiled once per tier, with that tier's -march
// and with VAC_TIER_NS set to the tier's namespace. A plain `*.cc` file is
// compiled once for Armv8.0 and may run on any CPU.
#pragma once

#include "common/export.h"
#include "vac/base.h"

namespace vac {

// The tier in use; an index into every kernel's table of variants.
extern int current_tier;

}  // namespace vac

// In a plain .cc file: defines the exported `vac_<name>` which forwards to
// vac::dotprod::<name> or vac::bf16_i8mm::<name>, each defined in a .tier.cc.
#define VAC_DEFINE_KERNEL(name)                                                                             \
    namespace vac::dotprod {                                                                                \
    void name(const void *args, uint32_t thread_index, uint32_t thread_count);                              \
    }                                                                                                       \
    namespace vac::bf16_i8mm {                                                                              \
    void name(const void *args, uint32_t thread_index, uint32_t thread_count);                              \
    }                                                                                                       \
    extern "C" VAC_EXPORT void vac_##name(const void *args, uint32_t thread_index, uint32_t thread_count) { \
        static constexpr vac_kernel variants[] = {nullptr, vac::dotprod::name, vac::bf16_i8mm::name};       \
        variants[vac::current_tier](args, thread_index, thread_count);                                      \
    }
