// How the ranks wait for each other: included by .tier.cc files only, private to each of them.
//
// A step is reached by a team when its last thread arrives; that thread publishes the step in
// the rank's flag, waits for the flags of the others, and lets its team go on. So one thread of a
// rank reads remote flags, and the other threads wait on a line of their own node.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "numa/segment.h"

namespace vac::VAC_TIER_NS {
namespace {

// About 2 to 10 microseconds: longer than the skew of ranks with equal work.
constexpr uint32_t kSpins = 400;
// How long a sleeper goes without looking whether a rank is lost.
constexpr uint32_t kSleepMs = 50;

// One thread of one rank, for the length of a kernel.
struct Member {
    const void *segment;
    uint32_t rank, world_size, thread_index, thread_count, timeout_ms;
};

inline Member member_of(const vac_communicator &communicator, uint32_t thread_index, uint32_t thread_count) {
    const void *segment = communicator.segment;
    return {segment,      communicator.rank, head_of(segment)->world_size,
            thread_index, thread_count,      communicator.timeout_ms};
}

inline bool lost(const void *segment) {
    return __atomic_load_n(&head_of(segment)->state.value, __ATOMIC_ACQUIRE) != VAC_LOSS_NONE;
}

inline bool reached(uint32_t value, uint32_t step) { return static_cast<int32_t>(value - step) >= 0; }

enum class Sleepers { kOtherProcesses, kThisProcess };

// Waits until `word` has reached the step; false when a rank is lost. `awaited` is the rank to
// blame for a time out, if there is a limit.
inline bool wait_for(const Member &member, Word &word, Word &sleepers, uint32_t step, Sleepers kind, uint32_t awaited,
                     uint32_t timeout_ms) {
    for (uint32_t spin = 0; spin < kSpins; ++spin) {
        if (reached(__atomic_load_n(&word.value, __ATOMIC_ACQUIRE), step)) return true;
        // ISB stalls for a few tens of cycles on Neoverse; YIELD is a NOP there.
        asm volatile("isb" ::: "memory");
    }
    // Counted before the value is looked at again: whoever changes it afterwards sees the sleeper.
    __atomic_fetch_add(&sleepers.value, 1u, __ATOMIC_SEQ_CST);
    bool alive = true;
    for (uint32_t slept_ms = 0;;) {
        const uint32_t value = __atomic_load_n(&word.value, __ATOMIC_SEQ_CST);
        if (reached(value, step)) break;
        if (timeout_ms != 0 && slept_ms >= timeout_ms) {
            uint32_t none = VAC_LOSS_NONE;
            __atomic_compare_exchange_n(&head_of(member.segment)->state.value, &none, VAC_LOSS_TIMEOUT | awaited << 8,
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
        }
        alive = !lost(member.segment);
        if (!alive) break;
        const timespec duration = {0, kSleepMs * 1000000L};
        const int operation = kind == Sleepers::kThisProcess ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
        const long result = syscall(SYS_futex, &word.value, operation, value, &duration, nullptr, 0);
        if (result != 0 && errno == ETIMEDOUT) slept_ms += kSleepMs;
    }
    __atomic_fetch_sub(&sleepers.value, 1u, __ATOMIC_RELAXED);
    return alive;
}

inline void publish(Word &word, Word &sleepers, uint32_t step, Sleepers kind) {
    __atomic_store_n(&word.value, step, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers.value, __ATOMIC_SEQ_CST) == 0) return;
    const int operation = kind == Sleepers::kThisProcess ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
    syscall(SYS_futex, &word.value, operation, INT32_MAX, nullptr, nullptr, 0);
}

// Where the next kernel begins; asked by every thread before its first meeting.
inline uint32_t current_step(const Member &member) {
    return __atomic_load_n(&control_of(member.segment, member.rank)->current_step.value, __ATOMIC_RELAXED);
}

// Returns once every thread of every rank has arrived at the step: what they wrote before is then
// seen, and what they read before may be overwritten. False when a rank is lost.
inline bool meet(const Member &member, uint32_t step) {
    Control &own = *control_of(member.segment, member.rank);
    if (__atomic_add_fetch(&own.arrived.value, 1u, __ATOMIC_ACQ_REL) != member.thread_count)
        return wait_for(member, own.go, own.go_sleepers, step, Sleepers::kThisProcess, member.rank, 0);
    __atomic_store_n(&own.arrived.value, 0u, __ATOMIC_RELAXED);
    __atomic_store_n(&own.current_step.value, step, __ATOMIC_RELAXED);
    publish(own.flag, own.sleepers, step, Sleepers::kOtherProcesses);
    // Each begins with its neighbour, so that not all read one rank's line at once.
    for (uint32_t i = 1; i < member.world_size; ++i) {
        const uint32_t peer = (member.rank + i) % member.world_size;
        Control &control = *control_of(member.segment, peer);
        if (!wait_for(member, control.flag, control.sleepers, step, Sleepers::kOtherProcesses, peer, member.timeout_ms))
            return false;
    }
    publish(own.go, own.go_sleepers, step, Sleepers::kThisProcess);
    return true;
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
