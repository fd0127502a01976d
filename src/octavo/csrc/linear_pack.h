// From a checkpoint's order to panels and back. Not for files compiled for one instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_kernels.h"

namespace octavo {

// Rows [first, last) of a panel (0 .. 16) from `in`, whose first row is row `first` and whose rows
// are row_bytes long.
void pack_panel(WeightType type, const uint8_t* in, int64_t row_bytes, int first, int last, uint8_t* panel);

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 0) {
        const float magnitude = float(fraction) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    if (exponent == 31) bits = sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

}  // namespace octavo
