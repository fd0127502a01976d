// From rows of logits to token ids and log-probabilities. Each item of the pool is one row, and a row's
// results are a function of that row and its own parameters alone.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace octavo {

struct Rows {
    std::vector<const float*> rows;
    int64_t width;  // values of a row that count
};

// The largest value and the lowest id that has it; (NaN, 0) where the row holds a NaN.
void best(const Rows& logits, float* value, int64_t* id, ThreadPool& pool);

struct DrawParams {
    float temperature;  // above 0
    int64_t top_k;      // no limit unless it is above 0
    double top_p;
    float min_p;
    uint32_t key[2];
};

// The Gumbel-max trick over what top_k, top_p and min_p leave, with y = (logit - maximum) / temperature:
//   top_k: y at least the k-th largest;
//   top_p, of those: exp(y) at least that of the token at which the sum of the falling weights reaches
//     top_p of the whole;
//   min_p: exp(y) at least min_p.
// Then the largest y + noise(id), the lowest id of equals. -1 for a row with a NaN or a maximum that is not finite.
void draw(const Rows& logits, const std::vector<const DrawParams*>& params, int64_t* id, ThreadPool& pool,
          const Isa& isa);

// Standard Gumbel noise of token ids, as draw() uses it.
void gumbel(const uint32_t key[2], const int64_t* ids, int64_t n, float* out);

struct ScoreArgs {
    const int64_t* targets;   // [n]
    const int64_t* num_best;  // [n], each at most max_best and the rows' width
    int64_t max_best;
    int64_t* ids;             // [n, max_best + 1]: the best, falling, equal ones by id, then the target
    int64_t* ranks;           // the same: 1 + how many of the row's logits are larger
    double* logprobs;         // the same
};

// log softmax: x - maximum - log(sum of exp(x - maximum)), each exp in float32, their sum and the rest in
// float64. NaN for a row with a NaN or a maximum that is not finite.
void score(const Rows& logits, const ScoreArgs& args, ThreadPool& pool, const Isa& isa);

}  // namespace octavo
