// y = x W^T (+ bias) (+ residual), with W in the checkpoint's own bits per weight.
//
// The law: out[r][n] is one chain of fused multiply-adds over k = 0 .. inputs-1 that starts from 0 and adds
// x[r][k] * w[n][k]; then the bias is added, then the residual. w[n][k] is the weight's value rounded
// to float32 once (a zero is +0), so every storage type gives the numbers of its expanded float32 weight,
// to the bit. Norm and activation are those of rows.h. Row count, row place, threads, blocking and instruction set only decide who computes what.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "linear_int8.h"
#include "linear_kernels.h"
#include "pool.h"
#include "rows.h"

namespace octavo {

// A type as checkpoints store it: blocks of `block` values in `block_bytes` bytes.
struct WeightFormat {
    const char* name;
    int block;
    int block_bytes;
};
const WeightFormat& weight_format(WeightType type);
// Throws std::invalid_argument, naming the types that exist, for any other name: "f32", "q4_1", ...
WeightType weight_type(const std::string& name);

// Memory of the weights of one model. What is walked from end to end at every token lies matrix after matrix on huge
// pages: the hardware's prefetcher stops at the end of a page, and a page's address has to be found.
class WeightMemory {
public:
    // Zeroed, at a multiple of 64 bytes, and there as long as the result is.
    std::shared_ptr<uint8_t> take(int64_t bytes);

private:
    std::shared_ptr<uint8_t> slab_;
    uint8_t* next_ = nullptr;
    int64_t left_ = 0, bytes_ = 0;
};

// A matrix [outputs, inputs], re-ordered into panels of outputs, a tail panel padded with zeros.
class PackedWeight {
public:
    // All zero bits. Throws std::invalid_argument for inputs that the type cannot hold (a multiple of 32; of
    // 256 for K types).
    PackedWeight(WeightType type, int64_t outputs, int64_t inputs, WeightMemory& memory);

    // Rows [first, first + rows) of the matrix, in the order of a checkpoint: rows dense, blocks of a
    // row one after the other, as GGUF and safetensors store them.
    void pack_rows(const void* data, int64_t first, int64_t rows, ThreadPool& pool);
    // The values of a whole matrix that a checkpoint stores as `stored`; for an f32 weight only.
    void pack_expanded(WeightType stored, const void* data, ThreadPool& pool);

    // Values [inputs] of one row.
    void expand_row(int64_t row, float* out) const;

    WeightType type() const { return type_; }
    int64_t outputs() const { return outputs_; }
    int64_t inputs() const { return inputs_; }
    int64_t bytes() const { return panels() * panel_bytes_; }
    int64_t panels() const { return (outputs_ + kLinearPanel - 1) / kLinearPanel; }
    int64_t panel_bytes() const { return panel_bytes_; }
    const uint8_t* data() const { return data_.get(); }

private:
    WeightType type_;
    int64_t outputs_;
    int64_t inputs_;
    int64_t panel_bytes_;
    std::shared_ptr<uint8_t> data_;
};

const LinearKernels& linear_kernels(const Isa& isa);
// AVX-512 without VNNI takes AVX2's: the same bits.
const Int8Kernels& int8_kernels(const Isa& isa);
bool has_int8_kernel(WeightType type);

// Several matrices that read the same input, one after the other in the output: q, k and v. Or, where it is gated,
// two of one shape, gate and up, and one result: activation(gate(x)) * up(x).
struct LinearArgs {
    const float* x;  // [rows, inputs], rows x_stride elements apart
    int64_t rows;
    int64_t x_stride;
    const float* bias;      // [sum of outputs] or nullptr
    const float* residual;  // [rows, outputs of the result], rows out_stride apart; may be out itself; or nullptr
    float* out;             // [rows, outputs of the result], rows out_stride apart
    int64_t out_stride;
    Norm norm = {};                          // of x, before the product, where it has a weight
    const Activation* activation = nullptr;  // of the product with its bias, before the residual
    bool gated = false;                      // only with an activation
    // x, after the norm, in 8 bits a value, by the law of linear_int8.h; for weights that all have a kernel for it,
    // else as without.
    bool int8 = false;
};
// Throws std::invalid_argument for weights that do not fit together.
void linear(const std::vector<const PackedWeight*>& weights, const LinearArgs& args, ThreadPool& pool,
            const Isa& isa);

}  // namespace octavo
