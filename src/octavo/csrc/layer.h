// A decoder layer as two calls, with attention between them: every row of a step from the residual stream to
// q, K and V, and from attention back to the residual stream. Or many layers in one call, attention included.
//
// The law of linear.h and rows.h holds throughout: a row's numbers are one fixed order of operations.
// Pieces of rows and threads only decide who computes what.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "plan.h"
#include "pool.h"
#include "rows.h"

namespace octavo {

// Throws std::invalid_argument for any name but "silu", "gelu" and "gelu_tanh".
Activation activation(const std::string& name);

// Memory that only grows, for what lives within one call.
class Workspace {
public:
    float* floats(int64_t count);
    int64_t bytes() const { return size_ * int64_t(sizeof(float)); }

private:
    std::unique_ptr<float[]> data_;
    int64_t size_ = 0;
};

// What all layers of one step share. x [rows, hidden] is the residual stream, changed in place; qkv
// [rows, (num_heads + 2 num_kv_heads) head_dim] is rewritten by every layer.
struct Step {
    int64_t rows;
    float* x;
    float* qkv;
    const int64_t* positions;  // [rows], below num_positions
    int64_t num_positions;     // that every rope table of the step has
    const int64_t* slots;      // [rows]; -1: written nowhere
    int64_t num_blocks;        // of the cache
    Shape shape;               // of the cache
};
// Throws std::invalid_argument for a slot outside the cache or a position outside the tables.
void check_step(const Step& step);

struct Projection {
    std::vector<const PackedWeight*> weights;
    const float* bias = nullptr;
};

// Addresses of one layer's weights; whoever makes the layer keeps them alive. What has no weight is left out.
struct LayerWeights {
    Norm input_norm, q_norm, k_norm, attention_post_norm, mlp_norm, mlp_post_norm;
    Projection qkv, o, gate_up, down;
};

struct LayerShape {
    int64_t hidden;
    int64_t intermediate;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    bool gated;
    Activation activation;
    bool int8;  // as in LinearArgs, of every product
};

class Layer {
public:
    Layer(const LayerShape& shape, const Isa& isa) : shape_(shape), isa_(isa) {}

    LayerWeights weights;

    // x -> norm -> q, k, v -> norms of the heads -> rotation by the rows of rope [positions, 2, head_dim]
    // (nullptr: none) -> K and V to the cache; q stays in step.qkv.
    void before_attention(const Step& step, const float* rope, void* key, void* value, ThreadPool& pool) const;

    // x [rows, hidden] += o(attention [rows, num_heads * head_dim]), x += mlp(norm(x)); each half normed before it is added
    // where there are post norms.
    void after_attention(float* x, int64_t rows, const float* attention, Workspace& workspace,
                         ThreadPool& pool) const;

    const LayerShape& shape() const { return shape_; }

private:
    void add(const Projection& projection, const Norm& post_norm, const float* in, int64_t in_stride, int64_t rows,
             float* x, float* scratch, ThreadPool& pool) const;

    LayerShape shape_;
    const Isa& isa_;
};

// One layer's part of the cache, and its constants.
struct LayerCache {
    void* key;
    void* value;
    float scale;
    int64_t window;  // 0: none
    CompactArgs compact;
};

// What one layer of a pass works with; rope as in before_attention.
struct LayerCall {
    const Layer* layer;
    const LayerCache* cache;
    const float* rope;
};

// The layers one after the other, each with the plan's attention between its halves. attention [rows, num_heads *
// head_dim] is rewritten by every layer. Throws std::invalid_argument for a plan of another number of rows or another shape.
void run_layers(const std::vector<LayerCall>& calls, const Step& step, AttentionPlan& plan, float* attention,
                Workspace& workspace, ThreadPool& pool);

// Row r of x [rows, hidden] = tokens[ids[r]] * scale (+ places[positions[r]] where there are places).
// Throws std::invalid_argument for an id or a position outside its table, before anything is written.
struct EmbedArgs {
    const PackedWeight* tokens;
    const int64_t* ids;
    float scale;
    const PackedWeight* places;  // or nullptr
    const int64_t* positions;
    int64_t rows;
    float* x;
};
void embed(const EmbedArgs& args, Workspace& workspace, ThreadPool& pool, const Isa& isa);

// Row i of out [rows, vocab] = head(norm(row take[i] of x)); x is [x_rows, hidden], rows x_stride apart.
// Throws std::invalid_argument for a row that there is not, before anything is written.
struct LogitsArgs {
    Norm norm;
    const PackedWeight* head;
    const float* x;
    int64_t x_stride;
    int64_t x_rows;
    const int64_t* take;
    int64_t rows;
    float* out;
    bool int8;  // as in LinearArgs
};
void logits(const LogitsArgs& args, Workspace& workspace, ThreadPool& pool, const Isa& isa);

}  // namespace octavo
