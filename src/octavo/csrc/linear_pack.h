// From a checkpoint's order to panels and back. Not for files compiled for one instruction set.
#pragma once

#include <cstdint>

#include "linear_kernels.h"

namespace octavo {

// Rows [first, last) of a panel (0 .. 16) from `in`, whose first row is row `first` and whose rows
// are row_bytes long.
void pack_panel(WeightType type, const uint8_t* in, int64_t row_bytes, int first, int last, uint8_t* panel);

}  // namespace octavo
