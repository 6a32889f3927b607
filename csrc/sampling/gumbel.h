// Sampling by the Gumbel-max trick with counter-based noise: the best of a piece of a row, whose log weights may be
// logits or something made of them. A token's noise depends on its index and the request's key only, so tokens that
// cannot win need none: a block whose log weights are further below the best score than noise can reach is skipped, and
// elsewhere the two logarithms are left out where the random words are too large to matter.
// Included by .tier.cc files only, private to each of them.
#pragma once

#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

constexpr int64_t kBlock = 64;
// -log(-log(1 - 2^-33)) is 22.87.
constexpr float kMaxGumbel = 23.0f;

struct Product {
    uint32x4_t lo, hi;
};
// Of 32-bit integers: the halves of their 64-bit products.
inline Product multiply(uint32x4_t a, uint32x4_t b) {
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(b)));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(a, b));
    return {vuzp1q_u32(first, second), vuzp2q_u32(first, second)};
}

// A constant that the compiler cannot see through: it would build it anew in each round.
inline uint32x4_t register_of(uint32_t value) {
    uint32x4_t v = vdupq_n_u32(value);
    asm("" : "+w"(v));
    return v;
}

struct Words {
    uint32x4_t word[4];
};

// Philox4x32-10 of eight consecutive counters (block + j, 0, offset): lane j % 4 of
// words[j / 4].word[i] is word i of counter j. Two sets of four hide each other's latency.
inline void philox(uint32_t block, uint64_t seed, uint64_t offset, Words words[2]) {
    constexpr uint32_t kLanes[4] = {0, 1, 2, 3};
    uint32x4_t c[2][4];
    for (int set = 0; set < 2; ++set) {
        c[set][0] = vaddq_u32(vdupq_n_u32(block + 4 * static_cast<uint32_t>(set)), vld1q_u32(kLanes));
        c[set][1] = vdupq_n_u32(0);
        c[set][2] = vdupq_n_u32(static_cast<uint32_t>(offset));
        c[set][3] = vdupq_n_u32(static_cast<uint32_t>(offset >> 32));
    }
    uint32x4_t key0 = vdupq_n_u32(static_cast<uint32_t>(seed)), key1 = vdupq_n_u32(static_cast<uint32_t>(seed >> 32));
    const uint32x4_t multiplier0 = register_of(0xD2511F53), multiplier1 = register_of(0xCD9E8D57);
    const uint32x4_t increment0 = register_of(0x9E3779B9), increment1 = register_of(0xBB67AE85);
    for (int round = 0; round < 10; ++round) {
        for (int set = 0; set < 2; ++set) {
            const Product p0 = multiply(c[set][0], multiplier0), p1 = multiply(c[set][2], multiplier1);
            c[set][0] = veorq_u32(p1.hi, veorq_u32(c[set][1], key0));
            c[set][2] = veorq_u32(p0.hi, veorq_u32(c[set][3], key1));
            c[set][1] = p1.lo;
            c[set][3] = p0.lo;
        }
        key0 = vaddq_u32(key0, increment0);
        key1 = vaddq_u32(key1, increment1);
    }
    for (int set = 0; set < 2; ++set)
        for (int i = 0; i < 4; ++i) words[set].word[i] = c[set][i];
}

// -log(-log(1 - v)) for v = (word + 1/2) / 2^32.
inline float32x4_t gumbel(uint32x4_t word) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    const float32x4_t v = vfmaq_n_f32(vdupq_n_f32(0x1p-33f), vcvtq_f32_u32(word), 0x1p-32f);
    const float32x4_t u = vsubq_f32(one, v);
    // What 1 - v lost to rounding counts where the logarithm is small: there lie the winners.
    const float32x4_t lost = vsubq_f32(v, vsubq_f32(one, u));
    const float32x4_t exponential = vsubq_f32(lost, log_normal(vmaxq_f32(u, vdupq_n_f32(0x1p-33f))));
    return vnegq_f32(log_normal(exponential));
}

// Whether `score` takes the place of `best`: larger, or the first NaN.
inline bool beats(float score, float best) { return best == best && !(score <= best); }

// The largest word whose noise can lift a score of at most `largest` above `best`:
// -log(1 - v) is at least v, so noise above best - largest takes v < exp(largest - best).
// A thousandth more covers all rounding.
inline uint32_t largest_useful_word(float largest, float best) {
    if (!(largest < best)) return UINT32_MAX;
    const float32x4_t v = exp_negative(vdupq_n_f32(largest - best));
    return vgetq_lane_u32(vcvtq_u32_f32(vfmaq_n_f32(vdupq_n_f32(2.0f), v, 0x1.004p32f)), 0);
}

// 16 values, or the first `count` of them and `rest` for the others.
inline void load_group(const float *x, int64_t count, float rest, float32x4_t v[4]) {
    float padded[16];
    if (count < 16) {
        for (int64_t i = 0; i < 16; ++i) padded[i] = i < count ? x[i] : rest;
        x = padded;
    }
    for (int j = 0; j < 4; ++j) v[j] = vld1q_f32(x + 4 * j);
}

// Log weights of a row: its logits, times a scale. What best_of_piece takes has these two functions.
struct ScaledLogits {
    const float *logits;
    float scale;

    // No weight of [begin, end) is larger; NaN if one is.
    float bound(int64_t begin, int64_t end) const { return max_of<F32>(logits + begin, end - begin) * scale; }

    // The weights of 16 tokens from `group` on; -inf from `count` on.
    void load(int64_t group, int64_t count, float32x4_t v[4]) const {
        load_group(logits + group, count, -kInfinity, v);
        for (int j = 0; j < 4; ++j) v[j] = vmulq_n_f32(v[j], scale);
    }
};

// Scores up to 16 tokens from `group` on and updates `best`; without words the scores are greedy.
template <class Weights>
inline void score_group(const Weights &weights, int64_t group, int64_t count, const Words *random, Best &best) {
    float32x4_t v[4];
    weights.load(group, count, v);
    if (random != nullptr)
        for (int j = 0; j < 4; ++j) v[j] = vaddq_f32(v[j], gumbel(random->word[j]));
    if (!beats(vmaxvq_f32(max(max(v[0], v[1]), max(v[2], v[3]))), best.score)) return;
    float score[16];
    for (int j = 0; j < 4; ++j) vst1q_f32(score + 4 * j, v[j]);
    for (int64_t i = 0; i < count; ++i)
        if (beats(score[i], best.score)) best = {score[i], static_cast<int32_t>(group + i)};
}

// The best of the tokens [begin, end) of a row if it beats `floor`, a score of an earlier
// piece; otherwise the score is -inf. begin is a multiple of 16.
template <class Weights>
inline Best best_of_piece(const Weights &weights, int64_t begin, int64_t end, bool greedy, uint64_t seed,
                          uint64_t offset, float floor) {
    const float max_noise = greedy ? 0.0f : kMaxGumbel;
    constexpr int32_t kNone = -1;
    Best best{floor, kNone};
    for (int64_t block = begin; block < end; block += kBlock) {
        const int64_t block_end = smaller(block + kBlock, end);
        const float largest = weights.bound(block, block_end);
        if (!beats(largest + max_noise, best.score)) continue;
        if (greedy) {
            for (int64_t group = block; group < block_end; group += 16)
                score_group(weights, group, smaller(16, block_end - group), nullptr, best);
            continue;
        }
        uint32_t useful = largest_useful_word(largest, best.score);
        for (int64_t pair = block; pair < block_end; pair += 32) {
            Words random[2];
            philox(static_cast<uint32_t>(pair / 16 * 4), seed, offset, random);
            for (int set = 0; set < 2; ++set) {
                const int64_t group = pair + 16 * set;
                const uint32x4_t *word = random[set].word;
                const uint32x4_t least = vminq_u32(vminq_u32(word[0], word[1]), vminq_u32(word[2], word[3]));
                if (group >= block_end || vminvq_u32(least) > useful) continue;
                const float before = best.score;
                score_group(weights, group, smaller(16, block_end - group), &random[set], best);
                if (best.score != before) useful = largest_useful_word(largest, best.score);
            }
        }
    }
    return best.token == kNone ? Best{-kInfinity, static_cast<int32_t>(begin)} : best;
}

// The best of a row's pieces.
inline Best best_of_entries(const Best *entries, int64_t count) {
    Best best = entries[0];
    for (int64_t i = 1; i < count; ++i)
        if (beats(entries[i].score, best.score)) best = entries[i];
    return best;
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
