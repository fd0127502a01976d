// Top-k attention: the selector of a query row, the kernels around it, and the caller for modules.
//
// Plain data and declarations only, for the reason given in attention.h.
#pragma once

#include <cstdint>

#include "attention.h"

namespace octavo {

class ThreadPool;

// The running top-k of one query row while its scores stream by in order of position.
//
// Candidates are offered and compete for `places`; the highest scores win, ties go to the lowest
// position. After the last candidate the recent keys follow; they are always kept. So the entries
// are in order of position at any time, which is also how a tie is decided: of equal scores the
// first ones stay. NaN counts as the highest score, so that it shows in the result.
//
// What is selected depends on the scores and positions alone, not on how they were cut into calls.
struct TopkRow {
    int places;         // for candidates: the budget less the recent keys
    int count;          // entries held; at most `places` candidates once settled
    bool limited;       // the places are taken: only a score above `limit` can still win one
    float limit;        // the lowest of the winners so far
    float* score;       // [topk_capacity]
    int32_t* position;  // [topk_capacity]
};

// Candidates that are held beyond the places before the losers are dropped.
constexpr int kTopkSlack = 64;

// Entries that a row must have room for when at most kSpan scores are offered at once.
constexpr int64_t topk_capacity(int64_t places, int64_t recent) {
    const int64_t candidates = 2 * places + kTopkSlack + kSpan, kept = places + recent;
    return (candidates > kept ? candidates : kept) + kPanel;  // what loops write past the last entry
}

// A row's kept keys, turned into its attention output.
struct KeptRow {
    int count;
    int head_dim;
    bool l2;               // weights divided by their Euclidean norm, instead of summing to 1
    float* score;          // [count rounded up to kPanel]; overwritten
    const int32_t* index;  // [count] row of `value`
    const float* value;
    int64_t value_stride;
    float* out;     // [head_dim]; 0 where nothing was kept
    float* weight;  // [count] softmax of the scores, before l2; or nullptr
    float* lse;     // log-sum-exp of the scores; -inf where nothing was kept; or nullptr
};

// The gradient of one row with respect to its scores and its query.
struct KeptGrad {
    int count;
    int head_dim;
    bool l2;
    float scale;
    float threshold;       // score gradients of a smaller magnitude become 0
    const int32_t* index;  // [count]
    const float* weight;   // [count]
    const float* key;
    const float* value;
    int64_t key_stride, value_stride;
    const float* out_grad;
    float* query_grad;  // [head_dim]
    float* score_grad;  // [count] times the scale: what a key's row is to be multiplied with
    float* norm;        // what the weights are divided by: 1 without l2
};

// One instruction set's kernels for top-k attention.
struct TopkIsa {
    // The scores of SpanTask's rows against its span into task.scores; m, l and acc are not touched.
    void (*score)(const SpanTask& task);
    // Offers n <= kSpan candidates at positions first, first + 1, ... `order` is scratch, [topk_capacity].
    void (*offer)(TopkRow& row, const float* scores, int32_t first, int n, int32_t* order);
    // Drops the losers: at most `places` entries are left. To be called after the last candidate.
    void (*settle)(TopkRow& row, int32_t* order);
    void (*attend)(const KeptRow& row);
    void (*grad)(const KeptGrad& row);
    // y += a * x
    void (*add)(int n, float a, const float* x, float* y);
};

const TopkIsa& portable_topk();
const TopkIsa* avx2_topk();  // as avx2_isa()

// A [batch, heads, rows, head_dim] tensor; the last dimension is dense, the strides are in elements.
template <class T>
struct Heads {
    T* data;
    int64_t batch_stride, head_stride, row_stride;

    T* row(int64_t batch, int64_t head, int64_t row) const {
        return data + batch * batch_stride + head * head_stride + row * row_stride;
    }
};

struct TopkShape {
    int64_t batch, num_heads, num_kv_heads, num_queries, num_keys;
    int head_dim;
    int topk;    // at most num_keys
    int recent;  // of topk; needs causal
    bool causal;
    bool l2;
    float scale;
};

struct TopkForward {
    Heads<const float> q, k, v;
    const uint8_t* padding;  // [batch, num_keys], 1 = not a key; or nullptr
    Heads<float> out;
    float* lse;      // [batch, num_heads, num_queries]
    int32_t* index;  // [batch, num_heads, num_queries, topk], -1 = unused; or nullptr
    float* weight;   // as index, 0 = unused; or nullptr
};

struct TopkBackward {
    Heads<const float> q, k, v, out_grad;
    const int32_t* index;
    const float* weight;
    float threshold;
    Heads<float> q_grad, k_grad, v_grad;  // of k and v: zeros on entry
};

// Bidirectional, or causal with the last query at the last key. Never holds more scores than a
// few rows' spans, and the kept ones.
void topk_forward(const TopkShape& shape, const TopkForward& args, ThreadPool& pool, bool portable);
void topk_backward(const TopkShape& shape, const TopkBackward& args, ThreadPool& pool, bool portable);

}  // namespace octavo
