// Collectives over a shared segment. All have one shape: write into the own slot, meet, read the
// slots of the others; a message longer than a slot passes in pieces.
//
// All-reduce in two phases, 3 ranks, a piece of three slices a, b, c:
//
//   rank 0             rank 1             rank 2
//   slot A  .  b0 c0   slot A  a1 .  c1   slot A  a2 b2 .     copied from the input
//                        -- meet --
//   slot B  sum a      slot B  sum b      slot B  sum c       each sums its slice: reads w-1 slices
//                        -- meet --
//   reads sums b, c    reads sums a, c    reads sums a, b     and reads w-1 sums
#include "vac/numa.h"

#include <arm_neon.h>

#include "numa/meet.h"

namespace vac::VAC_TIER_NS {
namespace {

struct F32x8 {
    float32x4_t lo, hi;
};

inline F32x8 operator+(F32x8 a, F32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }

// How eight elements of a data type are read as FP32 and written, rounded to nearest even.
struct F32 {
    using Element = float;
    static F32x8 load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static void store(float *p, F32x8 v) {
        vst1q_f32(p, v.lo);
        vst1q_f32(p + 4, v.hi);
    }
};

struct F16 {
    using Element = uint16_t;
    static F32x8 load(const uint16_t *p) {
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(p));
        return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
    }
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.lo), v.hi)));
    }
};

struct BF16 {
    using Element = uint16_t;
    static F32x8 load(const uint16_t *p) {
        const uint16x8_t v = vld1q_u16(p), zero = vdupq_n_u16(0);
        return {vreinterpretq_f32_u16(vzip1q_u16(zero, v)), vreinterpretq_f32_u16(vzip2q_u16(zero, v))};
    }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.lo), v.hi)));
    }
#else
    // A NaN is kept and made quiet.
    static uint32x4_t round(float32x4_t v) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        const uint32x4_t rounded = vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), vshlq_n_u32(bits, 15), 31);
        return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    }
    static void store(uint16_t *p, F32x8 v) {
        vst1q_u16(p, vuzp2q_u16(vreinterpretq_u16_u32(round(v.lo)), vreinterpretq_u16_u32(round(v.hi))));
    }
#endif
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Range {
    int64_t begin, end;
};

// Part `index` of `count` parts of a range, cut at multiples of `unit` from its beginning.
inline Range part_of(Range range, int64_t unit, uint32_t index, uint32_t count) {
    const int64_t units = (range.end - range.begin + unit - 1) / unit;
    return {smaller(range.begin + units * index / count * unit, range.end),
            smaller(range.begin + units * (index + 1) / count * unit, range.end)};
}

inline void copy(char *out, const char *in, int64_t bytes) {
    if (bytes > 0) __builtin_memcpy(out, in, static_cast<size_t>(bytes));
}

// Elements of a cache line or more, so that no two threads write to one.
constexpr int64_t kUnit = 64;

// out[i] = sums[i] = source 0 + source 1 + ...; `sums` may be null. The order of additions is the
// order of ranks, on every rank.
template <class Type>
void sum_sources(const typename Type::Element *const *sources, uint32_t world_size, typename Type::Element *out,
                 typename Type::Element *sums, int64_t count) {
    using Element = typename Type::Element;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        F32x8 a = Type::load(sources[0] + i), b = Type::load(sources[0] + i + 8);
        for (uint32_t r = 1; r < world_size; ++r) {
            a = a + Type::load(sources[r] + i);
            b = b + Type::load(sources[r] + i + 8);
        }
        Type::store(out + i, a);
        Type::store(out + i + 8, b);
        if (sums == nullptr) continue;
        Type::store(sums + i, a);
        Type::store(sums + i + 8, b);
    }
    for (; i < count; i += 8) {
        const int64_t left = smaller(count - i, 8);
        Element buffer[8] = {};
        for (int64_t k = 0; k < left; ++k) buffer[k] = sources[0][i + k];
        F32x8 sum = Type::load(buffer);
        for (uint32_t r = 1; r < world_size; ++r) {
            for (int64_t k = 0; k < left; ++k) buffer[k] = sources[r][i + k];
            sum = sum + Type::load(buffer);
        }
        Type::store(buffer, sum);
        for (int64_t k = 0; k < left; ++k) out[i + k] = buffer[k];
        for (int64_t k = 0; k < left && sums != nullptr; ++k) sums[i + k] = buffer[k];
    }
}

// Bytes that cross in the time of one meeting: about 1.5 us at 20 GB/s.
constexpr int64_t kBytesPerMeeting = 32768;

// With one phase a rank reads (w-1) n bytes of others, with two 2 (w-1) n / w.
inline bool one_phase(int32_t phases, int64_t bytes, int64_t world_size) {
    if (phases != VAC_PHASES_AUTO) return phases == VAC_PHASES_ONE;
    return bytes <= kBytesPerMeeting * world_size / larger((world_size - 1) * (world_size - 2), 1) || world_size <= 2;
}

template <class Type>
class AllReduce {
  public:
    using Element = typename Type::Element;

    AllReduce(const vac_all_reduce_args &args, const Member &member)
        : in_(static_cast<const Element *>(args.in)), out_(static_cast<Element *>(args.out)), member_(member) {}

    // Elements [0, count) of the arrays, through slots of `capacity` elements.
    void run(int64_t count, int64_t capacity, bool one) {
        uint32_t step = current_step(member_);
        for (int64_t begin = 0; begin < count; begin += capacity) {
            const int64_t size = smaller(count - begin, capacity);
            if (!(one ? in_one_phase(begin, size, step) : in_two_phases(begin, size, step))) return;
        }
    }

  private:
    Element *slot(uint32_t rank, uint32_t step) const {
        return reinterpret_cast<Element *>(slot_of(member_.segment, rank, step));
    }

    // This rank's input is read where it is, the others' in their slots.
    void set_sources(const Element **sources, int64_t in_begin, int64_t slot_begin, uint32_t step) const {
        for (uint32_t r = 0; r < member_.world_size; ++r)
            sources[r] = r == member_.rank ? in_ + in_begin : slot(r, step) + slot_begin;
    }

    void copy_elements(Element *out, const Element *in, int64_t count) const {
        copy(reinterpret_cast<char *>(out), reinterpret_cast<const char *>(in),
             count * static_cast<int64_t>(sizeof(Element)));
    }

    bool in_one_phase(int64_t begin, int64_t size, uint32_t &step) {
        const Range share = part_of({0, size}, kUnit, member_.thread_index, member_.thread_count);
        const int64_t count = share.end - share.begin;
        ++step;
        copy_elements(slot(member_.rank, step) + share.begin, in_ + begin + share.begin, count);
        if (!meet(member_, step)) return false;
        const Element *sources[VAC_MAX_RANKS];
        set_sources(sources, begin + share.begin, share.begin, step);
        sum_sources<Type>(sources, member_.world_size, out_ + begin + share.begin, nullptr, count);
        return true;
    }

    bool in_two_phases(int64_t begin, int64_t size, uint32_t &step) {
        const Range slice = part_of({0, size}, kUnit, member_.rank, member_.world_size);
        const int64_t slice_size = slice.end - slice.begin;
        // The own slice is read by nobody else: the share is one of the piece without it.
        const Range share = part_of({0, size - slice_size}, kUnit, member_.thread_index, member_.thread_count);
        const Range before = {share.begin, smaller(share.end, slice.begin)};
        const Range behind = {larger(share.begin, slice.begin) + slice_size, share.end + slice_size};
        ++step;
        const Range ranges[] = {before, behind};
        for (const Range &range : ranges)
            copy_elements(slot(member_.rank, step) + range.begin, in_ + begin + range.begin, range.end - range.begin);
        if (!meet(member_, step)) return false;

        const Range mine = part_of(slice, kUnit, member_.thread_index, member_.thread_count);
        const Element *sources[VAC_MAX_RANKS];
        set_sources(sources, begin + mine.begin, mine.begin, step);
        ++step;
        sum_sources<Type>(sources, member_.world_size, out_ + begin + mine.begin, slot(member_.rank, step) + mine.begin,
                          mine.end - mine.begin);
        if (!meet(member_, step)) return false;

        for (uint32_t i = 1; i < member_.world_size; ++i) {
            const uint32_t peer = (member_.rank + i) % member_.world_size;
            const Range sums = part_of({0, size}, kUnit, peer, member_.world_size);
            const Range part = part_of(sums, kUnit, member_.thread_index, member_.thread_count);
            copy_elements(out_ + begin + part.begin, slot(peer, step) + part.begin, part.end - part.begin);
        }
        return true;
    }

    const Element *in_;
    Element *out_;
    const Member member_;
};

template <class Type>
void all_reduce_of(const vac_all_reduce_args &args, const Member &member) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(typename Type::Element));
    const bool one = one_phase(args.phases, args.count * kSize, member.world_size);
    const auto slot_bytes = static_cast<int64_t>(head_of(member.segment)->slot_bytes);
    AllReduce<Type>(args, member).run(args.count, slot_bytes / kSize, one);
}

// body(row, column, length, offset) for the parts of rows that bytes [begin, end) of the matrix are.
template <class Body>
inline void for_rows(Range range, int64_t row_bytes, Body body) {
    int64_t row = range.begin / row_bytes, column = range.begin % row_bytes;
    for (int64_t offset = range.begin; offset < range.end; ++row, column = 0) {
        const int64_t length = smaller(row_bytes - column, range.end - offset);
        body(row, column, length, offset);
        offset += length;
    }
}

void gather_to(const vac_gather_args &args, const Member &member, bool receives) {
    const int64_t total = args.num_rows * args.row_bytes;
    const auto capacity = static_cast<int64_t>(head_of(member.segment)->slot_bytes);
    const auto *in = static_cast<const char *>(args.in);
    auto *out = static_cast<char *>(args.out);
    uint32_t step = current_step(member);
    for (int64_t begin = 0; begin < total; begin += capacity) {
        const Range piece = {begin, smaller(begin + capacity, total)};
        const Range share = part_of(piece, kLine, member.thread_index, member.thread_count);
        ++step;
        char *own = slot_of(member.segment, member.rank, step);
        for_rows(share, args.row_bytes, [&](int64_t row, int64_t column, int64_t length, int64_t offset) {
            copy(own + (offset - begin), in + row * args.in_row_stride + column, length);
        });
        if (!meet(member, step)) return;
        for (uint32_t i = 0; i < member.world_size && receives; ++i) {
            const uint32_t peer = (member.rank + i) % member.world_size;
            const char *slot = slot_of(member.segment, peer, step);
            char *target = out + peer * args.out_rank_stride;
            for_rows(share, args.row_bytes, [&](int64_t row, int64_t column, int64_t length, int64_t offset) {
                copy(target + row * args.out_row_stride + column, slot + (offset - begin), length);
            });
        }
    }
}

}  // namespace

void all_reduce(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_all_reduce_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (lost(member.segment)) return;
    if (args.dtype == VAC_F32) all_reduce_of<F32>(args, member);
    if (args.dtype == VAC_F16) all_reduce_of<F16>(args, member);
    if (args.dtype == VAC_BF16) all_reduce_of<BF16>(args, member);
}

void all_gather(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gather_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (!lost(member.segment)) gather_to(args, member, true);
}

void gather(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gather_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (!lost(member.segment)) gather_to(args, member, member.rank == args.root);
}

void broadcast(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_broadcast_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (lost(member.segment)) return;
    const auto capacity = static_cast<int64_t>(head_of(member.segment)->slot_bytes);
    auto *buffer = static_cast<char *>(args.buffer);
    uint32_t step = current_step(member);
    for (int64_t begin = 0; begin < args.num_bytes; begin += capacity) {
        const Range piece = {begin, smaller(begin + capacity, args.num_bytes)};
        const Range share = part_of(piece, kLine, thread_index, thread_count);
        ++step;
        char *slot = slot_of(member.segment, args.root, step) + (share.begin - begin);
        const int64_t length = share.end - share.begin;
        if (member.rank == args.root) copy(slot, buffer + share.begin, length);
        if (!meet(member, step)) return;
        if (member.rank != args.root) copy(buffer + share.begin, slot, length);
    }
}

void rank_barrier(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_rank_barrier_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (!lost(member.segment)) meet(member, current_step(member) + 1);
}

}  // namespace vac::VAC_TIER_NS
