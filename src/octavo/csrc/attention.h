// Interfaces between the driver (plan.cpp), the instruction sets (isa_*.cpp) and the module.
//
// This header holds plain data and declarations only: it is included by translation units that are
// compiled for different instruction sets, so an inline function here could be emitted for AVX2 and
// then be picked by the linker for a machine without it.
#pragma once

#include <cstdint>

#include "rows.h"

namespace octavo {

// Absolute positions per partial. Part of the result's definition: see span_kernel.inl.
constexpr int kSpan = 256;
// Keys per packed K panel, and the lanes in which a row's softmax weights are summed.
constexpr int kPanel = 16;
// Query rows per register tile, and per row tile.
constexpr int kMicroRows = 6;
constexpr int kTileRows = 96;
constexpr int kMaxMicroTiles = kTileRows / kMicroRows;
// Keys whose V is converted at once and stays in the first-level cache.
constexpr int kValueKeys = 64;
// Not a multiple of 4 KiB, so that the rows of a register tile do not share one cache set.
constexpr int kScoreStride = kSpan + kPanel;

// Query rows [0, rows) of one KV head against one span. Positions are relative to the span's start.
struct SpanTask {
    int rows;
    int head_dim;
    float scale;
    // Register tiles one after the other, each [head_dim][rows of the tile]; tile sizes in micro[].
    const float* q_packed;
    int num_micro;
    int micro[kMaxMicroTiles];
    // Not 0: register tile i is KV head i's, whose K and V lie i times so many elements behind `key` and `value`. All
    // tiles are of one size then, and all rows see the same keys.
    int64_t head_stride;
    // K and V of this head: element (block, slot, d) at block * block_stride + slot * head_dim + d.
    const void* key;
    const void* value;
    int64_t block_stride;
    const int32_t* blocks;  // of this span, in order of position; the next span's follow
    bool cold;              // nothing has asked for this span's K yet
    int next_keys;          // keys of the next span that will be read after this one, to prefetch them
    int block_shift;        // log2(block_size)
    bool half;              // K and V are IEEE float16
    // 8 or 4: K and V are records of compact_rows.h, and block_stride counts records. Keys of a record are read
    // together. 0: as above.
    int value_bits;
    // [kSpan] added to each key's scaled score, records only; or nullptr. Keys are then in an order of their own, not of
    // absolute position.
    const float* bias;
    // Row r sees the keys lo[r] <= j < hi[r]; none when lo[r] >= hi[r].
    const int32_t* lo;
    const int32_t* hi;
    // Results. A row that sees nothing, or only scores of -inf, gets l = 0 (any other has l >= 1, or NaN).
    float* m;    // [rows] largest scaled score
    float* l;    // [rows] sum of exp(score - m)
    float* acc;  // [rows][head_dim] sum of exp(score - m) * v
    // Scratch.
    float* scores;   // [rows][kScoreStride]
    float* k_panel;  // [head_dim][kPanel]
    float* v_block;  // [kValueKeys][head_dim]
};

// One instruction set's kernels. Every set performs the same operations in the same order.
struct Isa {
    const char* name;
    void (*span)(const SpanTask& task);
    // (m, l, acc) <- (m, l, acc) merged with the partial of a later span, row by row.
    void (*merge)(int rows, int head_dim, const float* m2, const float* l2, const float* acc2, float* m,
                  float* l, float* acc);
    void (*divide)(const float* acc, float l, int n, float* out);
    void (*exp)(const float* x, int64_t n, float* out);
    void (*to_half)(const float* x, int64_t n, uint16_t* out);
    // Reads every byte once; the value only keeps the reads alive.
    uint64_t (*read)(const void* data, int64_t bytes);
    const RowKernels* rows;
};

const Isa& portable_isa();
// nullptr where it was not compiled in; call it only after cpu_has_avx2().
const Isa* avx2_isa();
bool cpu_has_avx2();

}  // namespace octavo
