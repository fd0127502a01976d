// What is done to one row at a time: norms, rotation, activation, sums. One fixed order of operations a
// row (rows.inl), whatever the number of rows, the threads or the instruction set.
//
// Plain data and declarations only, as in attention.h, for the same reason.
#pragma once

#include <cstdint>

namespace octavo {

enum class Activation { kSilu, kGelu, kGeluTanh };

// (x - mean) / sqrt(variance + eps) * weight + bias, the mean being 0 for RMSNorm.
struct Norm {
    const float* weight = nullptr;  // nullptr: there is no norm
    const float* bias = nullptr;
    float eps = 0.0f;
    bool center = false;  // LayerNorm
};

// A row has any length; x and out may be the same row.
struct RowKernels {
    void (*norm)(const Norm& norm, const float* x, int64_t n, float* out);
    // x[heads][head_dim], in place; dimension i turns with i + head_dim / 2. cos and sin as RopeTable has
    // them: [head_dim] each, the first half of sin negated.
    void (*rotate)(float* x, int heads, int head_dim, const float* cos, const float* sin);
    // act(gate) * up, or act(gate) where up is nullptr.
    void (*activate)(Activation activation, const float* gate, const float* up, int64_t n, float* out);
    // x = x * scale + other; other may be nullptr.
    void (*scale_add)(float* x, float scale, const float* other, int64_t n);
};

}  // namespace octavo
