// The driver: runs a list of ops in one parallel region of the OpenMP team
// that torch uses too, so that the process has one set of worker threads.
#include "common/barrier.h"
#include "common/dispatch.h"

extern "C" {
// libgomp's ABI for `#pragma omp parallel`. Called directly because clang's
// -fopenmp would emit calls into LLVM's runtime, a second one in the process.
void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
}

namespace {

struct Region {
    const vac_op *ops;
    uint32_t num_ops;
    vac::Barrier barrier;
};

void run_region(void *data) {
    Region &region = *static_cast<Region *>(data);
    // The team may be smaller than asked for: its real size counts.
    const auto thread_index = static_cast<uint32_t>(omp_get_thread_num());
    const auto thread_count = static_cast<uint32_t>(omp_get_num_threads());
    for (uint32_t i = 0; i < region.num_ops; ++i) {
        const vac_op &op = region.ops[i];
        op.kernel(op.args, thread_index, thread_count);
        // The end of the region is a barrier already.
        const bool last = i + 1 == region.num_ops;
        if ((op.flags & VAC_OP_BARRIER_AFTER) && !last && thread_count > 1) region.barrier.wait(thread_count);
    }
}

}  // namespace

extern "C" {

VAC_EXPORT uint32_t vac_max_threads(void) { return static_cast<uint32_t>(omp_get_max_threads()); }

VAC_EXPORT int vac_execute(const vac_op *ops, uint32_t num_ops, uint32_t num_threads) {
    if (vac::current_tier == VAC_TIER_NONE) return VAC_UNSUPPORTED;
    if (num_threads == 0) num_threads = vac_max_threads();
    if (num_threads == 1) {
        for (uint32_t i = 0; i < num_ops; ++i) ops[i].kernel(ops[i].args, 0, 1);
        return VAC_OK;
    }
    Region region{ops, num_ops, {}};
    GOMP_parallel(run_region, &region, num_threads, 0);
    return VAC_OK;
}

}  // extern "C"
