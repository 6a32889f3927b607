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

#include "common/rms_norm.h"
#include "numa/meet.h"

namespace vac::VAC_TIER_NS {
namespace {

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

// out[i] = source 0 + source 1 + ..., and so sums[i] unless it is null. The order of additions is
// the order of ranks, on every rank.
template <class Type>
void sum_sources(const typename Type::Element *const *sources, uint32_t world_size, typename Type::Element *out,
                 typename Type::Element *sums, int64_t count) {
    for_columns(0, count, [&](int64_t i, auto part) {
        F32x8 sum = load<Type>(sources[0] + i, part);
        for (uint32_t r = 1; r < world_size; ++r) sum = sum + load<Type>(sources[r] + i, part);
        store<Type>(out + i, sum, part);
        if (sums != nullptr) store<Type>(sums + i, sum, part);
    });
}

// Bytes that cross in the time of one meeting: about 1.5 us at 20 GB/s.
constexpr int64_t kBytesPerMeeting = 32768;

// With one phase a rank reads (w-1) n bytes of others, with two 2 (w-1) n / w.
inline bool one_phase(int32_t phases, int64_t bytes, int64_t world_size) {
    if (phases != VAC_PHASES_AUTO) return phases == VAC_PHASES_ONE;
    return bytes <= kBytesPerMeeting * world_size / larger((world_size - 1) * (world_size - 2), 1) || world_size <= 2;
}

// A message of one rank, and how its pieces pass through the slots.
template <class Type>
class Message {
  public:
    using Element = typename Type::Element;

    Message(const void *in, const Member &member) : in_(static_cast<const Element *>(in)), member_(member) {}

    // Where the elements from `begin` on of each rank's piece are read: this rank's input where it is, the
    // others' in their slots. `begin` counts from the piece's first element, which is the input's `piece`-th.
    void set_sources(const Element **sources, int64_t piece, int64_t begin, uint32_t step) const {
        for (uint32_t r = 0; r < member_.world_size; ++r)
            sources[r] = r == member_.rank ? in_ + piece + begin : slot(r, step) + begin;
    }

    Element *slot(uint32_t rank, uint32_t step) const {
        return reinterpret_cast<Element *>(slot_of(member_.segment, rank, step));
    }

    // A rank's slice of a piece when it is divided.
    Range slice_of(int64_t size, uint32_t rank) const { return part_of({0, size}, kUnit, rank, member_.world_size); }

    // One phase: the whole piece lies in everyone's slot behind it.
    bool show(int64_t piece, int64_t size, uint32_t &step) const {
        const Range share = part_of({0, size}, kUnit, member_.thread_index, member_.thread_count);
        ++step;
        copy_elements(slot(member_.rank, step) + share.begin, in_ + piece + share.begin, share.end - share.begin);
        return meet(member_, step);
    }

    // Two phases, the first: every rank's sum of its slice lies in its slot behind it, and in `out`, the piece's
    // place in an array, unless that is null.
    bool reduce_scatter(int64_t piece, int64_t size, Element *out, uint32_t &step) const {
        const Range slice = slice_of(size, member_.rank);
        const int64_t slice_size = slice.end - slice.begin;
        // The own slice is read by nobody else: the share is one of the piece without it.
        const Range share = part_of({0, size - slice_size}, kUnit, member_.thread_index, member_.thread_count);
        const Range before = {share.begin, smaller(share.end, slice.begin)};
        const Range behind = {larger(share.begin, slice.begin) + slice_size, share.end + slice_size};
        ++step;
        const Range ranges[] = {before, behind};
        for (const Range &range : ranges)
            copy_elements(slot(member_.rank, step) + range.begin, in_ + piece + range.begin, range.end - range.begin);
        if (!meet(member_, step)) return false;

        const Range mine = part_of(slice, kUnit, member_.thread_index, member_.thread_count);
        const Element *sources[VAC_MAX_RANKS];
        set_sources(sources, piece, mine.begin, step);
        ++step;
        sum_sources<Type>(sources, member_.world_size, slot(member_.rank, step) + mine.begin,
                          out == nullptr ? nullptr : out + mine.begin, mine.end - mine.begin);
        return meet(member_, step);
    }

    static void copy_elements(Element *out, const Element *in, int64_t count) {
        copy(reinterpret_cast<char *>(out), reinterpret_cast<const char *>(in),
             count * static_cast<int64_t>(sizeof(Element)));
    }

  private:
    const Element *in_;
    const Member member_;
};

// The sum of piece [begin, begin + size) in `out`.
template <class Type>
bool all_reduce_piece(const Message<Type> &message, const Member &member, typename Type::Element *out, int64_t begin,
                      int64_t size, bool one, uint32_t &step) {
    out += begin;
    if (one) {
        if (!message.show(begin, size, step)) return false;
        const Range share = part_of({0, size}, kUnit, member.thread_index, member.thread_count);
        const typename Type::Element *sources[VAC_MAX_RANKS];
        message.set_sources(sources, begin, share.begin, step);
        sum_sources<Type>(sources, member.world_size, out + share.begin, nullptr, share.end - share.begin);
        return true;
    }
    if (!message.reduce_scatter(begin, size, out, step)) return false;
    for (uint32_t i = 1; i < member.world_size; ++i) {
        const uint32_t peer = (member.rank + i) % member.world_size;
        const Range part = part_of(message.slice_of(size, peer), kUnit, member.thread_index, member.thread_count);
        message.copy_elements(out + part.begin, message.slot(peer, step) + part.begin, part.end - part.begin);
    }
    return true;
}

template <class Type>
void all_reduce_of(const vac_all_reduce_args &args, const Member &member) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(typename Type::Element));
    const int64_t count = args.num_rows * args.row_size;
    const bool one = one_phase(args.phases, count * kSize, member.world_size);
    const int64_t capacity = static_cast<int64_t>(head_of(member.segment)->slot_bytes) / kSize;
    const Message<Type> message(args.in, member);
    auto *out = static_cast<typename Type::Element *>(args.out);
    uint32_t step = current_step(member);
    for (int64_t begin = 0; begin < count; begin += capacity)
        if (!all_reduce_piece(message, member, out, begin, smaller(count - begin, capacity), one, step)) return;
}

// Elements [begin, begin + count) of a piece's sum, into a row.
template <class Type>
void read_sums(const Message<Type> &message, const Member &member, typename Type::Element *out, int64_t piece,
               int64_t piece_size, int64_t begin, int64_t count, bool one, uint32_t step) {
    if (one) {
        const typename Type::Element *sources[VAC_MAX_RANKS];
        message.set_sources(sources, piece, begin, step);
        sum_sources<Type>(sources, member.world_size, out, nullptr, count);
        return;
    }
    for (uint32_t rank = 0; rank < member.world_size; ++rank) {
        const Range slice = message.slice_of(piece_size, rank);
        const int64_t first = larger(slice.begin, begin), last = smaller(slice.end, begin + count);
        if (first < last) message.copy_elements(out + (first - begin), message.slot(rank, step) + first, last - first);
    }
}

// Pieces are whole rows: behind the last meeting a thread reads its rows' sums into `out`, and adds and norms
// them there while they are in L1.
template <class Type, class WeightType, Factor kFactor>
void all_reduce_norm_of(const vac_all_reduce_rms_norm_args &args, const Member &member) {
    using Element = typename Type::Element;
    constexpr auto kSize = static_cast<int64_t>(sizeof(Element));
    const int64_t size = args.hidden_size, tokens = args.num_tokens;
    const bool one = one_phase(args.phases, tokens * size * kSize, member.world_size);
    const int64_t capacity = static_cast<int64_t>(head_of(member.segment)->slot_bytes) / (size * kSize);
    const Message<Type> message(args.in, member);
    uint32_t step = current_step(member);
    for (int64_t begin = 0; begin < tokens; begin += capacity) {
        const int64_t rows = smaller(tokens - begin, capacity), piece = begin * size;
        const bool alive =
            one ? message.show(piece, rows * size, step) : message.reduce_scatter(piece, rows * size, nullptr, step);
        if (!alive) return;
        const Share share = share_of(rows, member.thread_index, member.thread_count);
        for (int64_t row = share.begin; row < share.end; ++row) {
            Element *out = static_cast<Element *>(args.out) + (begin + row) * args.out_token_stride;
            read_sums(message, member, out, piece, rows * size, row * size, size, one, step);
            add_norm_row<Type, WeightType, kFactor>(
                out, out, static_cast<Element *>(args.residual) + (begin + row) * args.residual_token_stride,
                static_cast<const typename WeightType::Element *>(args.weight), size, args.eps);
        }
    }
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
    with_dtype(args.dtype, [&](auto type) { all_reduce_of<decltype(type)>(args, member); });
}

void all_reduce_rms_norm(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_all_reduce_rms_norm_args *>(untyped);
    const Member member = member_of(*args.communicator, thread_index, thread_count);
    if (lost(member.segment)) return;
    with_norm_types(args, [&](auto type, auto weight_type, auto factor) {
        all_reduce_norm_of<decltype(type), decltype(weight_type), factor.value>(args, member);
    });
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
