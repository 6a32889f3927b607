// Binds the OpenMP team's threads to CPUs. It has to happen inside a region:
// libgomp's own settings are read when it is loaded, before anyone can set them
// in a process that is already running.
#include "vac/threads.h"

#include <errno.h>
#include <sched.h>

#include <atomic>

#include "common/export.h"
#include "vac/base.h"

namespace {

struct PinArgs {
    const int32_t *cpus;
    uint32_t num_threads;
    std::atomic<int> bound{0}, error{0};
};

void pin(const void *data, uint32_t thread_index, uint32_t) {
    auto &args = *static_cast<PinArgs *>(const_cast<void *>(data));
    if (thread_index >= args.num_threads) return;
    // Allocated for up to 4096 CPUs: more than cpu_set_t's 1024.
    constexpr int kMaxCpus = 4096;
    alignas(unsigned long) unsigned char set[kMaxCpus / 8] = {};
    const int32_t cpu = args.cpus[thread_index];
    if (cpu < 0 || cpu >= kMaxCpus) {
        args.error.store(EINVAL);
        return;
    }
    set[cpu / 8] = static_cast<unsigned char>(1u << (cpu % 8));
    if (sched_setaffinity(0, sizeof set, reinterpret_cast<const cpu_set_t *>(set)) == 0)
        args.bound.fetch_add(1);
    else
        args.error.store(errno);
}

struct CpuArgs {
    int32_t *cpus;
    uint32_t num_threads;
};

void where(const void *data, uint32_t thread_index, uint32_t) {
    const auto &args = *static_cast<const CpuArgs *>(data);
    if (thread_index < args.num_threads) args.cpus[thread_index] = sched_getcpu();
}

}  // namespace

extern "C" {

VAC_EXPORT int vac_pin_threads(const int32_t *cpus, uint32_t num_threads) {
    PinArgs args{cpus, num_threads, {}, {}};
    const vac_op op{pin, &args, 0};
    vac_execute(&op, 1, num_threads);
    return args.error.load() != 0 ? -args.error.load() : args.bound.load();
}

VAC_EXPORT void vac_thread_cpus(int32_t *cpus, uint32_t num_threads) {
    for (uint32_t i = 0; i < num_threads; ++i) cpus[i] = -1;
    const CpuArgs args{cpus, num_threads};
    const vac_op op{where, &args, 0};
    vac_execute(&op, 1, num_threads);
}

}  // extern "C"
