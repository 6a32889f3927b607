// Softmax of rows with a temperature each: maximum, exponentials and their sum, scaling.
#include "vac/sampling.h"

#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

void fill(float *probs, int64_t size, float value) {
    for (int64_t i = 0; i < size; ++i) probs[i] = value;
}

void softmax_row(float *probs, const float *logits, int64_t size, float temperature) {
    const float largest = max_of<F32>(logits, size);
    if (temperature < kGreedyTemperature) {
        const int64_t best = first_index_of<F32>(logits, size, largest);
        fill(probs, size, 0.0f);
        probs[best] = 1.0f;
        return;
    }
    if (!(__builtin_fabsf(largest) < kInfinity)) return fill(probs, size, __builtin_nanf(""));
    const float32x4_t shift = vdupq_n_f32(largest);
    const float scale = 1.0f / temperature;
    auto exponential = [&](float32x4_t v) { return exp_negative(vmulq_n_f32(vsubq_f32(v, shift), scale)); };
    double total = 0;
    for (int64_t begin = 0; begin < size;) {
        // FP32 sums stay short, so that their rounding does not grow with the vocabulary.
        const int64_t end = smaller(size, begin + 2048);
        float32x4_t sum[4];
        for (auto &v : sum) v = vdupq_n_f32(0);
        int64_t i = begin;
        for (; i + 16 <= end; i += 16)
            for (int j = 0; j < 4; ++j) {
                const float32x4_t e = exponential(vld1q_f32(logits + i + 4 * j));
                vst1q_f32(probs + i + 4 * j, e);
                sum[j] = vaddq_f32(sum[j], e);
            }
        for (; i < end; ++i) {
            const float e = vgetq_lane_f32(exponential(vdupq_n_f32(logits[i])), 0);
            probs[i] = e;
            total += static_cast<double>(e);
        }
        total += static_cast<double>(vaddvq_f32(vaddq_f32(vaddq_f32(sum[0], sum[1]), vaddq_f32(sum[2], sum[3]))));
        begin = end;
    }
    const auto inverse = static_cast<float>(1.0 / total);
    for (int64_t i = 0; i < size; ++i) probs[i] *= inverse;
}

}  // namespace

void softmax_rows(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_softmax_rows_args *>(untyped);
    if (args.vocab_size <= 0) return;
    const Share share = share_of(args.num_reqs, thread_index, thread_count);
    for (int64_t req = share.begin; req < share.end; ++req)
        softmax_row(args.probs + req * args.probs_row_stride, args.logits + req * args.logits_row_stride,
                    args.vocab_size, args.temperature == nullptr ? 1.0f : args.temperature[req]);
}

}  // namespace vac::VAC_TIER_NS
