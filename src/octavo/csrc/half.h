// float16 without the processor's help. For files compiled for any machine only, for the reason given in attention.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

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
