// A barrier for one team: spins briefly, then sleeps in a futex, so that a
// team larger than the cores it got does not burn them waiting.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace vac {

class Barrier {
  public:
    // Returns once all thread_count threads of the team have called it.
    void wait(uint32_t thread_count) {
        const uint32_t generation = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == thread_count) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_seq_cst);
            if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
            return;
        }
        // About 2 to 10 microseconds on the cores in question: longer than the
        // skew of a balanced op, shorter than a scheduler's time slice.
        for (uint32_t spin = 0; spin < kSpins; ++spin) {
            if (generation_.load(std::memory_order_acquire) != generation) return;
            pause();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (generation_.load(std::memory_order_seq_cst) == generation) futex(FUTEX_WAIT_PRIVATE, generation);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

  private:
    static constexpr uint32_t kSpins = 400;

    // ISB stalls for a few tens of cycles on Neoverse; YIELD is a NOP there.
    static void pause() { asm volatile("isb" ::: "memory"); }

    void futex(int operation, uint32_t value) {
        static_assert(sizeof(generation_) == sizeof(uint32_t));
        syscall(SYS_futex, &generation_, operation, value, nullptr, nullptr, 0);
    }

    // Arrivals write one line while waiters read the other.
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
};

}  // namespace vac
