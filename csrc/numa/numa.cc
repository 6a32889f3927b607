// Exports of the collectives, their checks, and the segment's making; the kernels are in numa.tier.cc.
#include "vac/numa.h"

#include "common/dispatch.h"
#include "numa/segment.h"

VAC_DEFINE_KERNEL(all_reduce)
VAC_DEFINE_KERNEL(all_reduce_rms_norm)
VAC_DEFINE_KERNEL(all_gather)
VAC_DEFINE_KERNEL(gather)
VAC_DEFINE_KERNEL(broadcast)
VAC_DEFINE_KERNEL(rank_barrier)

namespace {

constexpr size_t kMaxSlot = size_t{1} << 30;

bool valid(const vac_communicator *communicator) {
    if (communicator == nullptr || communicator->segment == nullptr) return false;
    const vac::Head *head = vac::head_of(communicator->segment);
    return head->magic == vac::kMagic && communicator->rank < head->world_size;
}

bool known_dtype(int32_t dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

bool known_phases(int32_t phases) { return phases >= VAC_PHASES_AUTO && phases <= VAC_PHASES_TWO; }

}  // namespace

extern "C" {

VAC_EXPORT size_t vac_segment_size(uint32_t world_size, size_t slot_bytes) {
    if (world_size < 1 || world_size > VAC_MAX_RANKS || slot_bytes < 1 || slot_bytes > kMaxSlot) return 0;
    return vac::kPart + world_size * vac::region_bytes(slot_bytes);
}

VAC_EXPORT int vac_segment_create(void *segment, uint32_t world_size, size_t slot_bytes) {
    if (segment == nullptr || vac_segment_size(world_size, slot_bytes) == 0) return VAC_INVALID_ARGUMENT;
    vac::Head *head = vac::head_of(segment);
    head->world_size = world_size;
    // Whole parts: what the page rounding leaves over is used, too.
    head->slot_bytes = vac::parts(slot_bytes);
    head->state.value = VAC_LOSS_NONE;
    __atomic_store_n(&head->magic, vac::kMagic, __ATOMIC_RELEASE);
    return VAC_OK;
}

VAC_EXPORT int vac_segment_join(const vac_communicator *communicator) {
    if (!valid(communicator)) return VAC_INVALID_ARGUMENT;
    const size_t bytes = vac::region_bytes(vac::head_of(communicator->segment)->slot_bytes);
    __builtin_memset(vac::region_of(communicator->segment, communicator->rank), 0, bytes);
    return VAC_OK;
}

VAC_EXPORT void vac_segment_abort(void *segment, uint32_t loss, uint32_t rank) {
    uint32_t none = VAC_LOSS_NONE;
    __atomic_compare_exchange_n(&vac::head_of(segment)->state.value, &none, loss | rank << 8, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_RELAXED);
}

VAC_EXPORT uint32_t vac_segment_state(const void *segment) {
    return __atomic_load_n(&vac::head_of(segment)->state.value, __ATOMIC_ACQUIRE);
}

VAC_EXPORT int vac_all_reduce_check(const vac_all_reduce_args *args) {
    const bool memory = args->num_rows * args->row_size == 0 || (args->in != nullptr && args->out != nullptr);
    const bool good = valid(args->communicator) && known_dtype(args->dtype) && known_phases(args->phases);
    return good && args->num_rows >= 0 && args->row_size >= 0 && memory ? VAC_OK : VAC_INVALID_ARGUMENT;
}

VAC_EXPORT int vac_all_reduce_rms_norm_check(const vac_all_reduce_rms_norm_args *args) {
    if (!valid(args->communicator) || !known_dtype(args->dtype) || !known_phases(args->phases))
        return VAC_INVALID_ARGUMENT;
    if (args->weight != nullptr && args->weight_dtype != args->dtype && args->weight_dtype != VAC_F32)
        return VAC_INVALID_ARGUMENT;
    if (args->num_tokens < 0 || args->hidden_size < 1) return VAC_INVALID_ARGUMENT;
    const size_t row_bytes = static_cast<size_t>(args->hidden_size) * (args->dtype == VAC_F32 ? 4 : 2);
    if (row_bytes > vac::head_of(args->communicator->segment)->slot_bytes) return VAC_INVALID_ARGUMENT;
    if (args->num_tokens == 0) return VAC_OK;
    const bool apart = args->num_tokens == 1 || (args->out_token_stride >= args->hidden_size &&
                                                 args->residual_token_stride >= args->hidden_size);
    const bool memory = args->in != nullptr && args->out != nullptr && args->residual != nullptr;
    return apart && memory ? VAC_OK : VAC_INVALID_ARGUMENT;
}

VAC_EXPORT int vac_gather_check(const vac_gather_args *args) {
    if (!valid(args->communicator) || args->num_rows < 0 || args->row_bytes < 0) return VAC_INVALID_ARGUMENT;
    if (args->root >= vac::head_of(args->communicator->segment)->world_size) return VAC_INVALID_ARGUMENT;
    const bool apart =
        args->num_rows <= 1 || (args->in_row_stride >= args->row_bytes && args->out_row_stride >= args->row_bytes);
    const bool memory = args->num_rows * args->row_bytes == 0 || args->in != nullptr;
    return apart && memory ? VAC_OK : VAC_INVALID_ARGUMENT;
}

VAC_EXPORT int vac_broadcast_check(const vac_broadcast_args *args) {
    if (!valid(args->communicator) || args->num_bytes < 0) return VAC_INVALID_ARGUMENT;
    if (args->root >= vac::head_of(args->communicator->segment)->world_size) return VAC_INVALID_ARGUMENT;
    return args->num_bytes == 0 || args->buffer != nullptr ? VAC_OK : VAC_INVALID_ARGUMENT;
}

}  // extern "C"
