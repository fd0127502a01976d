// Making the compact form of blocks.
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
    uint16_t* bounds;
    int64_t num_compact;
    int value_bits;
    const int32_t* pairs;
    int64_t count;
};

// Each record depends on its 16 keys and values alone. Throws std::invalid_argument, in one sentence and before
// anything is written, for a block that there is not.
void seal_compact(const SealArgs& args, const Shape& shape, ThreadPool& pool, const Isa& isa);

}  // namespace octavo
