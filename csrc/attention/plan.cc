// Divides a step's attention into tasks of about equal cost.
//
// Cost is counted in row x token units: what a row tile's rows (in fours)
// spend on the keys they see, and a constant for packing and finishing them.
#include "attention/layout.h"
#include "common/export.h"

namespace vac {
namespace {

// Packing four queries, storing their output and the calls for it, in tokens.
constexpr double kRowTileTokens = 48;
// Storing and merging one more partial result, in tokens.
constexpr double kSplitTokensCost = 32;
// A division that comes this close to even is not improved upon.
constexpr double kGoodEnough = 1.08;

int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
int32_t round_up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }

// The number of pieces to divide a cost into; a little above target is fine.
int32_t pieces_of(double cost, double target, int32_t most) {
    const double n = cost / target + 0.75;
    return n >= most ? most : larger(1, static_cast<int32_t>(n));
}

float cost_of(const int32_t *task) {
    float cost;
    __builtin_memcpy(&cost, task + VAC_TASK_COST, sizeof(cost));
    return cost;
}

struct Request {
    int32_t index, num_rows, query_len, seq_len;
    bool causal;
    double cost;  // of one KV head
};

class Planner {
  public:
    Planner(const vac_attention_plan_args &args, int32_t *plan)
        : args_(args),
          plan_(plan),
          group_(static_cast<int32_t>(args.num_heads / args.num_kv_heads)),
          capacity_(plan_task_capacity(args.num_reqs, args.num_threads)) {
        order_ = plan + kPlanHeader;
        tasks_ = order_ + capacity_;
        spare_ = tasks_ + static_cast<size_t>(VAC_TASK_SIZE) * capacity_;
    }

    void run() {
        double total = 0;
        if (args_.num_threads > 1)
            for (uint32_t r = 0; r < args_.num_reqs; ++r) total += request(r).cost * args_.num_kv_heads;
        // Finer divisions balance better and cost more: the first that is
        // good enough, or else the best.
        static constexpr int kDivisions[] = {1, 2, 3, 4};
        int best = 1;
        double best_time = 0;
        if (args_.num_threads == 1 || total == 0) {
            divide(1e300);
        } else {
            const double even = total / args_.num_threads;
            for (int division : kDivisions) {
                divide(even / division);
                const double time = makespan();
                if (division == 1 || time < 0.98 * best_time) {
                    best = division;
                    best_time = time;
                }
                if (time <= kGoodEnough * even) break;
            }
            divide(even / best);
        }
        sort_longest_first();
        for (uint32_t i = 0; i < kPlanHeader; ++i) plan_[i] = 0;
        plan_[0] = static_cast<int32_t>(num_tasks_);
        plan_[1] = static_cast<int32_t>(args_.num_threads);
        plan_[2] = partial_rows_;
        plan_[3] = num_groups_;
        plan_[4] = static_cast<int32_t>(tasks_ - plan_);
    }

  private:
    Request request(uint32_t r) const {
        Request request;
        request.index = static_cast<int32_t>(r);
        request.query_len = args_.query_start_loc[r + 1] - args_.query_start_loc[r];
        request.seq_len = args_.seq_lens[r];
        request.num_rows = request.query_len * group_;
        request.causal = args_.request_causal != nullptr ? args_.request_causal[r] != 0 : args_.causal != 0;
        request.cost = 0;
        if (args_.num_threads > 1)
            for (int32_t row = 0; row < request.num_rows; row += kTileRows) request.cost += tile_cost(request, row);
        return request;
    }

    // Keys that the rows of the tile from `row` on see: [begin, end).
    void visible(const Request &request, int32_t row, int32_t &begin, int32_t &end) const {
        const int32_t context = request.seq_len - request.query_len;
        const int32_t last_row = smaller(row + kTileRows, request.num_rows) - 1;
        end = request.causal ? context + last_row / group_ + 1 : request.seq_len;
        if (args_.sliding_window_ahead > 0)
            end = smaller(end, context + last_row / group_ + args_.sliding_window_ahead);
        begin = args_.sliding_window > 0 ? larger(0, context + row / group_ + 1 - args_.sliding_window) : 0;
    }

    double tile_cost(const Request &request, int32_t row) const {
        int32_t begin, end;
        visible(request, row, begin, end);
        const int32_t rows = round_up(smaller(kTileRows, request.num_rows - row), kRows);
        return rows * (larger(0, end - begin) + kRowTileTokens);
    }

    // Tasks of about `target`; as coarse as the division of heads, rows and
    // keys makes them.
    void divide(double target) {
        num_tasks_ = 0;
        num_groups_ = partial_rows_ = 0;
        for (uint32_t r = 0; r < args_.num_reqs; ++r) {
            const Request request = this->request(r);
            if (request.num_rows == 0) continue;
            const auto heads = static_cast<int32_t>(args_.num_kv_heads);
            if (request.cost <= 1.25 * target) {
                const int32_t pieces = pieces_of(request.cost * heads, target, heads);
                for (int32_t i = 0; i < pieces; ++i)
                    add(request, i * heads / pieces, (i + 1) * heads / pieces, 0, request.num_rows,
                        request.cost * heads / pieces);
            } else {
                for (int32_t head = 0; head < heads; ++head) divide_rows(request, head, target);
            }
        }
    }

    void divide_rows(const Request &request, int32_t head, double target) {
        const int32_t num_tiles = round_up(request.num_rows, kTileRows) / kTileRows;
        const int32_t pieces = pieces_of(request.cost, target, num_tiles);
        int32_t begin = 0;
        double cost = 0, done = 0;
        for (int32_t tile = 0, piece = 1; tile < num_tiles; ++tile) {
            const double last = tile_cost(request, tile * kTileRows);
            cost += last;
            const int32_t end = smaller((tile + 1) * kTileRows, request.num_rows);
            // The boundary between tiles that is nearest to the even one.
            const bool enough = done + cost + last / 2 > request.cost * piece / pieces;
            if (!enough && end != request.num_rows) continue;
            if (end - begin <= kTileRows)
                divide_keys(request, head, begin, end, cost, target);
            else
                add(request, head, head + 1, begin, end, cost);
            done += cost;
            while (piece < pieces && done + last / 2 > request.cost * piece / pieces) ++piece;
            begin = end;
            cost = 0;
        }
    }

    void divide_keys(const Request &request, int32_t head, int32_t row_begin, int32_t row_end, double cost,
                     double target) {
        int32_t key_begin, key_end;
        visible(request, row_begin, key_begin, key_end);
        const int32_t padded = round_up(row_end - row_begin, kRows);
        const auto capacity = static_cast<int32_t>(kPartialRowsPerThread * args_.num_threads) - partial_rows_;
        const int32_t unit = static_cast<int32_t>(kSplitTokens), first = key_begin / unit;
        const int32_t units = (key_end + unit - 1) / unit - first;
        int32_t splits = smaller(pieces_of(cost, target, larger(1, units)), capacity / padded);
        // Where tasks run out, requests still to come need theirs.
        const uint32_t left = capacity_ - num_tasks_, reserved = args_.num_reqs - request.index;
        if (static_cast<int64_t>(splits) > static_cast<int64_t>(left) - reserved - args_.num_kv_heads) splits = 1;
        if (splits < 2 || num_groups_ == static_cast<int32_t>(kMaxGroups)) {
            add(request, head, head + 1, row_begin, row_end, cost);
            return;
        }
        for (int32_t i = 0; i < splits; ++i) {
            int32_t *task = add(request, head, head + 1, row_begin, row_end, cost / splits + padded * kSplitTokensCost);
            const auto boundary = [&](int32_t s) {
                return (first + static_cast<int32_t>(static_cast<int64_t>(units) * s / splits)) * unit;
            };
            task[VAC_TASK_KV_BEGIN] = i == 0 ? 0 : boundary(i);
            task[VAC_TASK_KV_END] = i + 1 == splits ? INT32_MAX : boundary(i + 1);
            task[VAC_TASK_GROUP] = num_groups_;
            task[VAC_TASK_PARTIAL_ROW] = partial_rows_ + i * padded;
            task[VAC_TASK_SPLIT] = i;
            task[VAC_TASK_NUM_SPLITS] = splits;
        }
        ++num_groups_;
        partial_rows_ += splits * padded;
    }

    int32_t *add(const Request &request, int32_t head_begin, int32_t head_end, int32_t row_begin, int32_t row_end,
                 double cost) {
        int32_t *task = tasks_ + static_cast<size_t>(VAC_TASK_SIZE) * num_tasks_++;
        const float single = static_cast<float>(cost);
        const int32_t values[] = {request.index, head_begin, head_end, row_begin, row_end, 0, INT32_MAX, -1, 0, 0, 1};
        for (int i = 0; i < 11; ++i) task[i] = values[i];
        __builtin_memcpy(task + VAC_TASK_COST, &single, sizeof(single));
        return task;
    }

    // When the last thread ends, if each takes the next task when it is free.
    double makespan() {
        auto *busy_until = reinterpret_cast<float *>(spare_);
        for (uint32_t i = 0; i < args_.num_threads; ++i) busy_until[i] = 0;
        float latest = 0;
        for (uint32_t i = 0; i < num_tasks_; ++i) {
            const float end = busy_until[0] + cost_of(tasks_ + static_cast<size_t>(VAC_TASK_SIZE) * i);
            sift(busy_until, args_.num_threads, end);
            latest = end > latest ? end : latest;
        }
        return latest;
    }

    // Replaces the smallest entry of a heap.
    static void sift(float *heap, uint32_t size, float value) {
        uint32_t at = 0;
        for (;;) {
            uint32_t child = 2 * at + 1;
            if (child >= size) break;
            if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
            if (heap[child] >= value) break;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = value;
    }

    // Heap sort of (cost, task) keys; about equal tasks stay in order, which
    // keeps a request's tasks together.
    void sort_longest_first() {
        float least = 0, most = 0;
        for (uint32_t i = 0; i < num_tasks_; ++i) {
            const float cost = cost_of(tasks_ + static_cast<size_t>(VAC_TASK_SIZE) * i);
            least = i == 0 || cost < least ? cost : least;
            most = cost > most ? cost : most;
            order_[i] = static_cast<int32_t>(i);
        }
        if (args_.num_threads == 1 || most <= 1.25f * least) return;
        auto *keys = reinterpret_cast<uint64_t *>(spare_);
        for (uint32_t i = 0; i < num_tasks_; ++i) {
            uint32_t bits;
            __builtin_memcpy(&bits, tasks_ + static_cast<size_t>(VAC_TASK_SIZE) * i + VAC_TASK_COST, sizeof(bits));
            keys[i] = static_cast<uint64_t>(bits) << 32 | (UINT32_MAX - i);
        }
        for (uint32_t i = num_tasks_ / 2; i-- > 0;) sift_key(keys, i, num_tasks_, keys[i]);
        for (uint32_t size = num_tasks_; size > 1;) {
            const uint64_t last = keys[--size];
            keys[size] = keys[0];
            sift_key(keys, 0, size, last);
        }
        // A heap with the smallest on top leaves the largest in front.
        for (uint32_t i = 0; i < num_tasks_; ++i)
            order_[i] = static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(keys[i]));
    }

    static void sift_key(uint64_t *heap, uint32_t at, uint32_t size, uint64_t value) {
        for (;;) {
            uint32_t child = 2 * at + 1;
            if (child >= size) break;
            if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
            if (heap[child] >= value) break;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = value;
    }

    const vac_attention_plan_args &args_;
    int32_t *plan_, *order_, *tasks_, *spare_;
    const int32_t group_;
    const uint32_t capacity_;
    uint32_t num_tasks_ = 0;
    int32_t num_groups_ = 0, partial_rows_ = 0;
};

bool valid(const vac_attention_plan_args &args) {
    if (args.num_heads == 0 || args.num_kv_heads == 0 || args.num_heads % args.num_kv_heads != 0) return false;
    if (args.num_threads == 0) return false;
    for (uint32_t r = 0; r < args.num_reqs; ++r) {
        const int64_t query_len = static_cast<int64_t>(args.query_start_loc[r + 1]) - args.query_start_loc[r];
        const bool causal = args.request_causal != nullptr ? args.request_causal[r] != 0 : args.causal != 0;
        if (query_len < 0 || args.seq_lens[r] < 0 || (causal && query_len > args.seq_lens[r])) return false;
    }
    return true;
}

}  // namespace
}  // namespace vac

extern "C" {

VAC_EXPORT size_t vac_attention_plan_size(uint32_t num_reqs, uint32_t num_threads) {
    const size_t tasks = vac::plan_task_capacity(num_reqs, num_threads);
    // Header, order and tasks; then what planning itself needs: a 64-bit key
    // per task, or a time per thread.
    return sizeof(int32_t) * (vac::kPlanHeader + tasks * (1 + VAC_TASK_SIZE + 2));
}

VAC_EXPORT int vac_attention_plan(const vac_attention_plan_args *args, int32_t *plan, size_t plan_bytes) {
    if (args == nullptr || plan == nullptr || args->query_start_loc == nullptr || args->seq_lens == nullptr)
        return VAC_INVALID_ARGUMENT;
    if (!vac::valid(*args) || plan_bytes < vac_attention_plan_size(args->num_reqs, args->num_threads))
        return VAC_INVALID_ARGUMENT;
    vac::Planner(*args, plan).run();
    return VAC_OK;
}

}  // extern "C"
