// Products with activations in 8 bits, beside those of linear_kernels.h. Plain data and declarations only, for the
// reason given in attention.h.
//
// The law: a row of x is cut into blocks of 32 k. A block's scale is s = (its largest |x|) / 127, and its values
// q = x * (127 / largest), rounded to the nearest integer, ties to even. Where the largest is below 2^-118, s and q
// are 0; where a value is not finite, s is NaN. A weight is d f + m, with f what its field stores less the type's
// zero (128 for q8_0, 8 for q4_0, 16 for q5_0, 32 for q6_k), d its scale and m the offset of q4_1 (m) and q4_k
// (-dmin times minimum). An output is one chain over the blocks, from 0, each operation rounded to float32 but the sums of
// integers, which are exact:
//   y = fma(float(sum of f q) * d, s, y);  where the type has an offset  y = fma(m, s * float(sum of q), y)
// In q6_k, whose scales are of 16 k, a block has the first of these steps twice.
// Rows, threads and instruction sets have no say in it.
#pragma once

#include <cstdint>

#include "linear_kernels.h"

namespace octavo {

// Most rows that any tile holds; Int8Kernels::rows has an instruction set's own.
constexpr int kInt8Rows = 8;
constexpr int64_t kInt8Block = 32;
// Of one row and block in a packed tile.
constexpr int64_t kInt8BlockBytes = kInt8Block + 12;

// A packed tile of R rows is a sequence of blocks, k ascending: q [8][R][4], then s [R] (float), minus the sums of q
// below k = 16 and from there on [R][2] (int16), and s times the sum of q [R] (float). q of k = 8 c + w is at [w][r][c]: as the fields of a packed
// weight lie in its words, which are not touched for this.
struct Int8Task {
    const uint8_t* weights;  // one panel
    int64_t k;               // inputs, a multiple of 32
    const uint8_t* x;
    float* sums;  // [rows][16]
    // As in TileTask, with lines for every 32 k.
    const uint8_t *prefetch = nullptr, *prefetch_end = nullptr;
    int prefetch_lines = 0;
};

struct Int8Kernels {
    using Tile = void (*)(const Int8Task&);
    int rows;
    // tile[type][rows - 1]; nullptr for a type that has none.
    Tile tile[kNumWeightTypes][kInt8Rows];
    // rows of x, stride floats apart, of so many blocks of 32, to a packed tile.
    void (*quantize)(const float* x, int64_t stride, int rows, int64_t blocks, uint8_t* out);
};

const Int8Kernels& portable_int8();
// nullptr where they were not compiled in; call them only where the CPU has the instructions.
const Int8Kernels* avx2_int8();
const Int8Kernels* vnni_int8();
bool cpu_has_vnni();

}  // namespace octavo
