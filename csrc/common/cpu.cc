// Asks the kernel what the CPU can do, once, when the library is loaded.
#include <sys/auxv.h>

#include "common/dispatch.h"

namespace {

// Bits of AT_HWCAP / AT_HWCAP2 from the Linux arm64 ABI; spelled out because
// the headers of older C libraries lack the newer ones.
constexpr unsigned long kHwcapAtomics = 1ul << 8, kHwcapFphp = 1ul << 9, kHwcapAsimdhp = 1ul << 10,
                        kHwcapAsimddp = 1ul << 20, kHwcapSve = 1ul << 22, kHwcapAsimdfhm = 1ul << 23;
constexpr unsigned long kHwcap2Sve2 = 1ul << 1, kHwcap2I8mm = 1ul << 13, kHwcap2Bf16 = 1ul << 14,
                        kHwcap2Sme2 = 1ul << 37;

uint32_t read_features() {
    const unsigned long cap = getauxval(AT_HWCAP), cap2 = getauxval(AT_HWCAP2);
    uint32_t features = 0;
    if (cap & kHwcapAtomics) features |= VAC_FEATURE_LSE;
    if ((cap & kHwcapFphp) && (cap & kHwcapAsimdhp)) features |= VAC_FEATURE_FP16;
    if (cap & kHwcapAsimddp) features |= VAC_FEATURE_DOTPROD;
    if (cap & kHwcapAsimdfhm) features |= VAC_FEATURE_FHM;
    if (cap & kHwcapSve) features |= VAC_FEATURE_SVE;
    if (cap2 & kHwcap2Bf16) features |= VAC_FEATURE_BF16;
    if (cap2 & kHwcap2I8mm) features |= VAC_FEATURE_I8MM;
    if (cap2 & kHwcap2Sve2) features |= VAC_FEATURE_SVE2;
    if (cap2 & kHwcap2Sme2) features |= VAC_FEATURE_SME2;
    return features;
}

int tier_of(uint32_t features) {
    constexpr uint32_t dotprod = VAC_FEATURE_LSE | VAC_FEATURE_FP16 | VAC_FEATURE_DOTPROD;
    // FHM (FMLAL) comes with Armv8.4, so with every core that has BF16.
    constexpr uint32_t bf16_i8mm = dotprod | VAC_FEATURE_FHM | VAC_FEATURE_BF16 | VAC_FEATURE_I8MM;
    if ((features & bf16_i8mm) == bf16_i8mm) return VAC_TIER_BF16_I8MM;
    if ((features & dotprod) == dotprod) return VAC_TIER_DOTPROD;
    return VAC_TIER_NONE;
}

}  // namespace

namespace vac {
int current_tier = tier_of(read_features());
}

extern "C" {

VAC_EXPORT uint32_t vac_cpu_features(void) { return read_features(); }

VAC_EXPORT int vac_cpu_tier(void) { return tier_of(read_features()); }

VAC_EXPORT int vac_tier(void) { return vac::current_tier; }

VAC_EXPORT int vac_set_tier(int tier) {
    if (tier < VAC_TIER_DOTPROD || tier > vac_cpu_tier()) return VAC_UNSUPPORTED;
    vac::current_tier = tier;
    return VAC_OK;
}

VAC_EXPORT const char *vac_version(void) { return VAC_VERSION; }

}  // extern "C"
