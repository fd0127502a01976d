#include "layer.h"

#include <algorithm>
#include <stdexcept>

namespace octavo {
namespace {

// Rows that pass through a whole half of a layer together: enough to read the weights once for many,
// few enough that what lies between two products stays in the caches and its memory is bounded.
constexpr int64_t kPieceRows = 512;

// Floats that are worth a thread's trouble.
constexpr int64_t kItemFloats = 4096;

// body(row) for every row of about so many floats.
template <class F>
void for_rows(ThreadPool& pool, int64_t rows, int64_t floats, const F& body) {
    const int64_t item = std::max<int64_t>(1, kItemFloats / floats);
    pool.run((rows + item - 1) / item, [&](int, int64_t i) {
        const int64_t end = std::min(rows, (i + 1) * item);
        for (int64_t row = i * item; row < end; ++row) body(row);
    });
}

void check_ids(const char* name, const int64_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " +
                                        std::to_string(ids[i]) + ", allowed are 0 to " + std::to_string(limit - 1));
}

}  // namespace

Activation activation(const std::string& name) {
    if (name == "silu") return Activation::kSilu;
    if (name == "gelu") return Activation::kGelu;
    if (name == "gelu_tanh") return Activation::kGeluTanh;
    throw std::invalid_argument("activation must be silu, gelu or gelu_tanh, got '" + name + "'");
}

float* Workspace::floats(int64_t count) {
    if (count > size_) {
        data_.reset();
        data_.reset(new float[size_t(count)]);
        size_ = count;
    }
    return data_.get();
}

void check_step(const Step& step) {
    check_ids("positions", step.positions, step.rows, step.num_positions);
    const int64_t num_slots = step.num_blocks * step.shape.block_size;
    for (int64_t r = 0; r < step.rows; ++r)
        if (step.slots[r] < -1 || step.slots[r] >= num_slots)
            throw std::invalid_argument("slot_mapping[" + std::to_string(r) + "] is " +
                                        std::to_string(step.slots[r]) + ", allowed are -1 (skip) to " +
                                        std::to_string(num_slots - 1));
}

void Layer::before_attention(const Step& step, const float* rope, void* key, void* value, ThreadPool& pool) const {
    const RowKernels& rows_of = *isa_.rows;
    const int64_t hidden = shape_.hidden, d = shape_.head_dim;
    const int64_t width = (shape_.num_heads + 2 * int64_t(shape_.num_kv_heads)) * d;
    for (int64_t first = 0; first < step.rows; first += kPieceRows) {
        const int64_t rows = std::min(kPieceRows, step.rows - first);
        float* qkv = step.qkv + first * width;
        LinearArgs args{step.x + first * hidden, rows, hidden, weights.qkv.bias, nullptr, qkv, width};
        args.norm = weights.input_norm;
        args.int8 = shape_.int8;
        linear(weights.qkv.weights, args, pool, isa_);
        for_rows(pool, rows, width, [&](int64_t r) {
            float* q = qkv + r * width;
            float* k = q + shape_.num_heads * d;
            float* v = k + shape_.num_kv_heads * d;
            if (weights.q_norm.weight != nullptr)
                for (float* head = q; head < k; head += d) rows_of.norm(weights.q_norm, head, d, head);
            if (weights.k_norm.weight != nullptr)
                for (float* head = k; head < v; head += d) rows_of.norm(weights.k_norm, head, d, head);
            if (rope != nullptr) {
                const float* cos = rope + step.positions[first + r] * 2 * d;
                rows_of.rotate(q, shape_.num_heads + shape_.num_kv_heads, int(d), cos, cos + d);
            }
            const WriteArgs args{k, v, 0, 0, step.slots + first + r, 1, key, value, step.num_blocks};
            write_kv(args, step.shape, isa_);
        });
    }
}

// x += norm(projection(in)), or without the norm where there is none.
void Layer::add(const Projection& projection, const Norm& post_norm, const float* in, int64_t in_stride,
                int64_t rows, float* x, float* scratch, ThreadPool& pool) const {
    const int64_t hidden = shape_.hidden;
    const bool normed = post_norm.weight != nullptr;
    float* out = normed ? scratch : x;
    LinearArgs args{in, rows, in_stride, projection.bias, normed ? nullptr : x, out, hidden};
    args.int8 = shape_.int8;
    linear(projection.weights, args, pool, isa_);
    if (!normed) return;
    for_rows(pool, rows, hidden, [&](int64_t r) {
        float* row = scratch + r * hidden;
        isa_.rows->norm(post_norm, row, hidden, row);
        isa_.rows->scale_add(x + r * hidden, 1.0f, row, hidden);
    });
}

void Layer::after_attention(float* x, int64_t rows, const float* attention, Workspace& workspace,
                            ThreadPool& pool) const {
    const int64_t hidden = shape_.hidden, inner = shape_.intermediate;
    const int64_t q_size = int64_t(shape_.num_heads) * shape_.head_dim;
    const int64_t most = std::min(rows, kPieceRows);
    float* scratch = workspace.floats(most * (hidden + inner));
    float* middle = scratch + most * hidden;
    for (int64_t first = 0; first < rows; first += kPieceRows) {
        const int64_t count = std::min(kPieceRows, rows - first);
        float* piece = x + first * hidden;
        add(weights.o, weights.attention_post_norm, attention + first * q_size, q_size, count, piece, scratch, pool);
        LinearArgs args{piece, count, hidden, weights.gate_up.bias, nullptr, middle, inner};
        args.norm = weights.mlp_norm;
        args.activation = &shape_.activation;
        args.gated = shape_.gated;
        args.int8 = shape_.int8;
        linear(weights.gate_up.weights, args, pool, isa_);
        add(weights.down, weights.mlp_post_norm, middle, inner, count, piece, scratch, pool);
    }
}

void run_layers(const std::vector<LayerCall>& calls, const Step& step, AttentionPlan& plan, float* attention,
                Workspace& workspace, ThreadPool& pool) {
    if (plan.num_tokens() != step.rows)
        throw std::invalid_argument("the step has " + std::to_string(step.rows) + " rows, its plan " +
                                    std::to_string(plan.num_tokens()));
    if (!(plan.shape() == step.shape)) throw std::invalid_argument("the plan is of another shape than the step");
    const int64_t width =
        (step.shape.num_heads + 2 * int64_t(step.shape.num_kv_heads)) * int64_t(step.shape.head_dim);
    for (const LayerCall& call : calls) {
        const LayerCache& cache = *call.cache;
        call.layer->before_attention(step, call.rope, cache.key, cache.value, pool);
        plan.run({step.qkv, width, cache.key, cache.value, step.num_blocks, cache.scale, cache.window, attention,
                  nullptr, cache.compact});
        call.layer->after_attention(step.x, step.rows, attention, workspace, pool);
    }
}

void embed(const EmbedArgs& args, Workspace& workspace, ThreadPool& pool, const Isa& isa) {
    const int64_t hidden = args.tokens->inputs();
    check_ids("token_ids", args.ids, args.rows, args.tokens->outputs());
    if (args.places != nullptr) check_ids("positions", args.positions, args.rows, args.places->outputs());
    float* places = args.places != nullptr ? workspace.floats(args.rows * hidden) : nullptr;
    for_rows(pool, args.rows, hidden, [&](int64_t r) {
        float* x = args.x + r * hidden;
        args.tokens->expand_row(args.ids[r], x);
        if (places != nullptr) args.places->expand_row(args.positions[r], places + r * hidden);
        if (args.scale != 1.0f || places != nullptr)
            isa.rows->scale_add(x, args.scale, places == nullptr ? nullptr : places + r * hidden, hidden);
    });
}

void logits(const LogitsArgs& args, Workspace& workspace, ThreadPool& pool, const Isa& isa) {
    const int64_t hidden = args.head->inputs();
    check_ids("rows", args.take, args.rows, args.x_rows);
    float* normed = workspace.floats(args.rows * hidden);
    for_rows(pool, args.rows, hidden, [&](int64_t r) {
        isa.rows->norm(args.norm, args.x + args.take[r] * args.x_stride, hidden, normed + r * hidden);
    });
    LinearArgs product{normed, args.rows, hidden, nullptr, nullptr, args.out, args.head->outputs()};
    product.int8 = args.int8;
    linear({args.head}, product, pool, isa);
}

}  // namespace octavo
