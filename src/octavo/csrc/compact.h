// Making the compact form of blocks, and summaries of them.
#pragma once

#include <cstdint>

#include "plan.h"

namespace octavo {

// One layer's blocks as stored and its compact blocks; pairs [count][2] are (block, compact block).
struct SealArgs {
    const void* key;
    const void* value;
    int64_t num_blocks;
    uint8_t* compact_key;
    uint8_t* compact_value;
    uint16_t* mean_value;  // nullptr where the layer has none, as is bounds
    uint8_t* bounds;
    int64_t num_compact;
    int value_bits;
    const int32_t* pairs;
    int64_t count;
};

// Each record depends on its 16 keys and values alone. Throws std::invalid_argument, in one sentence and before
// anything is written, for a block that there is not.
void seal_compact(const SealArgs& args, const Shape& shape, ThreadPool& pool, const Isa& isa);

enum class Reference;

// One record each from 16 keys or values: element (key, d) at key + (i * head_dim + d). What a record cannot hold is NaN
// in it. False where no key is held.
bool seal_keys(const void* key, bool half, int head_dim, Reference reference, const Isa& isa, uint8_t* record);
void seal_values(const void* value, bool half, int head_dim, int value_bits, const Isa& isa, uint8_t* record);

// An operation: destination, level, then 16 sources, which are compact blocks; those that a level has no use for are -1.
constexpr int kOperationInts = 18;

// One layer's compact blocks of 16 positions, and what becomes of them.
struct SummariseArgs {
    uint8_t* compact_key;
    uint8_t* compact_value;
    int64_t num_compact;
    int value_bits;
    const int32_t* operations;  // [count][kOperationInts], done in order
    int64_t count;
    const float* turns;  // [levels][16][2][head_dim] cos and sin, as a row of RopeTable; nullptr: keys are not turned
    int64_t levels;
};

// An entry of a summary of level 0 is the mean key and the mean value of one source's 16; at a level above, of 4 entries
// of a source, which has entries for 4 of the destination's. Each depends on the sources' bytes and the turns alone.
// Throws std::invalid_argument, in one sentence and before anything is written, for a block or a level that there is not.
void summarise_compact(const SummariseArgs& args, const Shape& shape, ThreadPool& pool, const Isa& isa);

}  // namespace octavo
