// Interfaces between linear.cpp and its instruction sets (linear_*.cpp). Plain data and declarations
// only, for the reason given in attention.h.
#pragma once

#include <cstdint>

namespace octavo {

// Outputs per panel.
constexpr int kLinearPanel = 16;
// Most rows of x that any register tile holds; LinearKernels::rows has an instruction set's own.
constexpr int kLinearRows = 8;

enum class WeightType { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ4_K, kQ6_K };
constexpr int kNumWeightTypes = 9;

// A panel's place in memory is a sequence of units, k ascending:
//   f32       unit of 1 k:   16 floats
//   f16       unit of 1 k:   16 halves
//   bf16      unit of 2 k:   16 words, the even k in the low half, the odd one in the high half
//   q4_0 ...  unit of 32 k:  scales, then fields
//   q4_k      unit of 256 k: d[16], dmin[16] (f16), then 8 times: scale[16], minimum[16] (u8), fields
//   q6_k      unit of 256 k: d[16] (f16), then 8 times: scale[2][16] (i8, 16 k each), fields
// Scales of the others: d[16] (f16), and for q4_1 m[16] after it.
// Fields are 32 values of B bits for each of 16 outputs: B words [16], output n in lane n. Bits
// B j .. B j + B - 1 of word w are k = B j + w, so a mask alone takes out a value times a power of two,
// which the scale takes back: exact, and no shift. 32 is not a multiple of 5 and 6; there the two bits
// left over at the top of each word, one after the other from word 0 on, are k = 30, then k = 31.
// Signed values are stored with an offset: 128 (q8_0), 8 (q4_0), 16 (q5_0), 32 (q6_k).
struct UnitLayout {
    int k;
    int bytes;
};
constexpr UnitLayout kUnits[kNumWeightTypes] = {
    {1, 64},           {1, 32},           {2, 64},           {32, 32 + 8 * 64},           {32, 32 + 4 * 64},
    {32, 64 + 4 * 64}, {32, 32 + 5 * 64}, {256, 64 + 8 * (32 + 4 * 64)}, {256, 32 + 8 * (32 + 6 * 64)},
};

// How many k a kernel computes, about, from one asking for memory to the next.
constexpr int kAskEvery[kNumWeightTypes] = {8, 8, 8, 8, 4, 4, 6, 4, 7};

// Some rows of x times some panels, over a range of k.
struct TileTask {
    const uint8_t* weights;   // the first panel, at the range's first unit
    int64_t panel_bytes = 0;  // from one panel to the next
    int64_t k;                // length of the range
    const float* x;           // rows x_stride elements apart; or packed, see LinearKernels::packed
    int64_t x_stride = 0;
    float* sums;             // row r of panel p at p * sums_panel + r * 16
    int64_t sums_panel = 0;
    bool first = true;  // the sums start from 0 here
    float* expanded = nullptr;  // where LinearKernels::expand_first leaves the weights as float32 [k][16]
    // Memory of the first panel that will be read later, [prefetch, prefetch_end), with prefetch_panel from one
    // panel to the next, and how many lines of 64 bytes to ask for every kAskEvery[type] k until it is all asked for.
    const uint8_t *prefetch = nullptr, *prefetch_end = nullptr;
    int64_t prefetch_panel = 0;
    int prefetch_lines = 0;
    // What to ask for after that, or nullptr, and from one panel to the next there.
    const uint8_t* prefetch_then = nullptr;
    int64_t prefetch_then_panel = 0;
};

// What is left to do for a tile's sums.
struct FinishTask {
    const float* sums;  // [rows][16]
    int rows;
    int outputs;            // of this panel, at most 16
    const float* bias;      // [outputs] or nullptr
    const float* residual;  // rows stride elements apart, or nullptr
    float* out;
    int64_t stride;
};

struct LinearKernels {
    using Tile = void (*)(const TileTask&);
    // Most rows of x that a tile holds.
    int rows;
    // direct[type][rows - 1][i] takes 1 << i panels at once; nullptr where registers would not do, and for more
    // rows than a tile holds.
    Tile direct[kNumWeightTypes][kLinearRows][3];
    // packed[rows - 1] takes one panel of float32 weights, and x as [k][rows].
    Tile packed[kLinearRows];
    // As packed, but from the stored weights of one panel, which are expanded on the way; nullptr where expand, then
    // packed does it.
    Tile expand_first[kNumWeightTypes][kLinearRows];
    // One panel, from a unit's first k on, as float32 [k][16].
    void (*expand[kNumWeightTypes])(const uint8_t* weights, int64_t k, float* out);
    // x [rows, k], rows stride elements apart, to [k][rows].
    void (*pack_x)(const float* x, int64_t stride, int rows, int64_t k, float* out);
    void (*finish)(const FinishTask& task);
};

const LinearKernels& portable_linear();
// nullptr where they were not compiled in; call them only where the CPU has the instructions.
const LinearKernels* avx2_linear();
const LinearKernels* avx512_linear();
bool cpu_has_avx512();

}  // namespace octavo
