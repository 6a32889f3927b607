// Exports of the kernels of recurrent layers, and the checks of their arguments.
#include "vac/recurrent.h"

#include "common/dispatch.h"

VAC_DEFINE_KERNEL(causal_conv)
VAC_DEFINE_KERNEL(delta_inputs)
VAC_DEFINE_KERNEL(gated_delta)

namespace {

bool known(int dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

bool good(const vac_requests &requests) {
    return requests.num_requests == 0 ||
           (requests.query_start_loc != nullptr && requests.slots != nullptr && requests.has_state != nullptr);
}

int status(bool good) { return good ? VAC_OK : VAC_INVALID_ARGUMENT; }

}  // namespace

extern "C" {

VAC_EXPORT int vac_causal_conv_check(const vac_causal_conv_args *args) {
    const bool empty = args->requests.num_requests == 0 || args->channels == 0;
    const bool pointers = empty || (args->x != nullptr && args->out != nullptr && args->out != args->x &&
                                    args->weight != nullptr && args->state != nullptr);
    const bool strides = args->x_stride >= args->channels && args->out_stride >= args->channels &&
                         args->state_row_stride >= args->channels;
    return status(known(args->dtype) && good(args->requests) && args->width >= 2 && args->width <= 4 && strides &&
                  pointers);
}

VAC_EXPORT int vac_delta_inputs_check(const vac_delta_inputs_args *args) {
    const bool pointers = args->num_tokens == 0 ||
                          (args->x != nullptr && args->a != nullptr && args->b != nullptr && args->rate != nullptr &&
                           args->dt_bias != nullptr && args->directions != nullptr && args->gates != nullptr);
    const bool strides = args->x_stride >= 2 * args->num_k_heads * args->k_dim && args->a_stride >= args->num_v_heads &&
                         args->b_stride >= args->num_v_heads;
    return status(known(args->dtype) && args->k_dim != 0 && args->k_dim % 8 == 0 && strides && pointers);
}

VAC_EXPORT int vac_gated_delta_check(const vac_gated_delta_args *args) {
    const bool heads = args->num_k_heads != 0 && args->num_v_heads % args->num_k_heads == 0;
    const bool sizes = args->k_dim != 0 && args->k_dim % 8 == 0 && args->k_dim <= 256 && args->v_dim % 8 == 0;
    const bool strides = args->value_stride >= args->num_v_heads * args->v_dim &&
                         args->out_stride >= args->num_v_heads * args->v_dim &&
                         args->state_slot_stride >= args->num_v_heads * args->v_dim * args->k_dim;
    const bool pointers =
        args->requests.num_requests == 0 || (args->directions != nullptr && args->gates != nullptr &&
                                             args->value != nullptr && args->out != nullptr && args->state != nullptr);
    return status(known(args->dtype) && known(args->state_dtype) && good(args->requests) && heads && sizes && strides &&
                  pointers);
}

}  // extern "C"
