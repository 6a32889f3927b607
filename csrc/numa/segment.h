// What lies where in a segment. Every rank has a region of its own, which it alone
// writes (but for the counts of sleepers), so that its pages are on its node.
//
//   head | rank 0: control, slot A, slot B | rank 1: ... | ...
//
// Parts begin at multiples of 64 KiB, the largest base page of Arm kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vac/numa.h"

namespace vac {
namespace {

constexpr size_t kPart = 65536;
// Kunpeng's last-level cache has lines of 128 bytes, the others of 64.
constexpr size_t kLine = 128;
constexpr uint64_t kMagic = 0x7661636172636831;  // "vacarch1"

struct alignas(kLine) Word {
    uint32_t value;
};

struct Head {
    uint64_t magic;
    uint64_t slot_bytes;
    uint32_t world_size;
    Word state;  // vac_segment_state()
};

struct Control {
    Word flag;      // the step that the whole team has reached; peers wait for it
    Word sleepers;  // peers that sleep on it
    // The rest is the team's own.
    Word arrived;       // threads that have reached the next step
    Word go;            // the step that all ranks have reached
    Word go_sleepers;   // threads of the team that sleep on it
    Word current_step;  // where the next kernel goes on
};

inline size_t parts(size_t bytes) { return (bytes + kPart - 1) / kPart * kPart; }
inline size_t region_bytes(size_t slot_bytes) { return kPart + 2 * parts(slot_bytes); }
inline Head *head_of(const void *segment) { return static_cast<Head *>(const_cast<void *>(segment)); }
inline char *region_of(const void *segment, uint32_t rank) {
    const size_t begin = kPart + rank * region_bytes(head_of(segment)->slot_bytes);
    return static_cast<char *>(const_cast<void *>(segment)) + begin;
}
inline Control *control_of(const void *segment, uint32_t rank) {
    return reinterpret_cast<Control *>(region_of(segment, rank));
}
// The slot for what is read behind step `step`. What was written for one step may be read until
// all have reached the next, so two slots that take turns need no further waiting.
inline char *slot_of(const void *segment, uint32_t rank, uint32_t step) {
    return region_of(segment, rank) + kPart + (step & 1) * parts(head_of(segment)->slot_bytes);
}

static_assert(sizeof(Control) <= kPart && sizeof(Head) <= kPart);

}  // namespace
}  // namespace vac
