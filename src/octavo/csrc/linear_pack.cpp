#include "linear_pack.h"

#include <algorithm>
#include <cstring>

#include "linear.h"

namespace octavo {
namespace {

// 32 values of Bits bits into lane `lane` of Bits words; the layout is in linear_kernels.h.
template <int Bits>
void place_fields(const uint8_t* values, int lane, uint8_t* words) {
    constexpr int kFields = 32 / Bits;
    uint32_t word[Bits] = {};
    for (int j = 0; j < kFields; ++j)
        for (int w = 0; w < Bits; ++w) word[w] |= uint32_t(values[Bits * j + w]) << (Bits * j);
    if constexpr (32 % Bits != 0) {
        const uint32_t left = values[30] | uint32_t(values[31]) << Bits;
        for (int w = 0; w < Bits; ++w) word[w] |= (left >> (2 * w)) << 30;
    }
    for (int w = 0; w < Bits; ++w) std::memcpy(words + (w * kLinearPanel + lane) * 4, &word[w], 4);
}

// 16 bytes: the low nibbles are values 0-15, the high ones 16-31.
void read_nibbles(const uint8_t* in, uint8_t* values) {
    for (int i = 0; i < 16; ++i) {
        values[i] = in[i] & 15;
        values[16 + i] = in[i] >> 4;
    }
}

void copy_half(const uint8_t* in, int lane, uint8_t* out) { std::memcpy(out + lane * 2, in, 2); }

void pack_block(WeightType type, const uint8_t* in, int lane, uint8_t* unit) {
    uint8_t values[32];
    copy_half(in, lane, unit);
    if (type == WeightType::kQ8_0) {
        for (int i = 0; i < 32; ++i) values[i] = in[2 + i] ^ 0x80;
        place_fields<8>(values, lane, unit + 32);
    } else if (type == WeightType::kQ4_0) {
        read_nibbles(in + 2, values);
        place_fields<4>(values, lane, unit + 32);
    } else if (type == WeightType::kQ4_1) {
        copy_half(in + 2, lane, unit + 32);
        read_nibbles(in + 4, values);
        place_fields<4>(values, lane, unit + 64);
    } else {
        uint32_t fifth;
        std::memcpy(&fifth, in + 2, 4);
        read_nibbles(in + 6, values);
        for (int i = 0; i < 32; ++i) values[i] |= uint8_t((fifth >> i & 1) << 4);
        place_fields<5>(values, lane, unit + 32);
    }
}

// d, dmin, 12 bytes of 6-bit scales and minima, then 4 times 32 bytes: two blocks, low nibbles first.
void pack_q4_k(const uint8_t* in, int lane, uint8_t* unit) {
    copy_half(in, lane, unit);
    copy_half(in + 2, lane, unit + 32);
    const uint8_t* packed = in + 4;
    for (int b = 0; b < 8; ++b) {
        uint8_t scale = packed[b] & 63, minimum = packed[b + 4] & 63;
        if (b >= 4) {
            scale = uint8_t((packed[b + 4] & 15) | (packed[b - 4] >> 6) << 4);
            minimum = uint8_t(packed[b + 4] >> 4 | (packed[b] >> 6) << 4);
        }
        uint8_t values[32];
        for (int i = 0; i < 32; ++i) values[i] = in[16 + b / 2 * 32 + i] >> (b % 2 * 4) & 15;
        uint8_t* block = unit + 64 + b * (32 + 4 * 64);
        block[lane] = scale;
        block[16 + lane] = minimum;
        place_fields<4>(values, lane, block + 32);
    }
}

// 128 bytes of low nibbles, 64 of upper two bits, 16 scales, d. Each half of 128 values is four blocks: the
// low nibbles of 64 bytes, then the high ones; the upper bits at place 0, 2, 4, 6 of 32 bytes.
void pack_q6_k(const uint8_t* in, int lane, uint8_t* unit) {
    copy_half(in + 208, lane, unit);
    for (int b = 0; b < 8; ++b) {
        const uint8_t* low = in + b / 4 * 64 + b % 2 * 32;
        const uint8_t* high = in + 128 + b / 4 * 32;
        uint8_t values[32];
        for (int i = 0; i < 32; ++i)
            values[i] = uint8_t((low[i] >> (b % 4 / 2 * 4) & 15) | (high[i] >> (b % 4 * 2) & 3) << 4);
        uint8_t* block = unit + 32 + b * (32 + 6 * 64);
        block[lane] = in[192 + 2 * b];
        block[16 + lane] = in[192 + 2 * b + 1];
        place_fields<6>(values, lane, block + 32);
    }
}

// Plain types. k in steps of 16, so that a cache line of every row is used while it is there.
template <class T, class At>
void pack_plain(const uint8_t* in, int64_t row_bytes, int first, int last, uint8_t* panel, At at) {
    const int64_t inputs = row_bytes / int64_t(sizeof(T));
    for (int64_t start = 0; start < inputs; start += 16) {
        const int64_t end = std::min<int64_t>(start + 16, inputs);
        for (int lane = first; lane < last; ++lane) {
            const uint8_t* row = in + (lane - first) * row_bytes;
            for (int64_t k = start; k < end; ++k)
                std::memcpy(panel + at(k, lane) * int64_t(sizeof(T)), row + k * int64_t(sizeof(T)), sizeof(T));
        }
    }
}

}  // namespace

void pack_panel(WeightType type, const uint8_t* in, int64_t row_bytes, int first, int last, uint8_t* panel) {
    const auto by_step = [](int64_t k, int lane) { return k * kLinearPanel + lane; };
    const auto by_pair = [](int64_t k, int lane) { return (k / 2 * kLinearPanel + lane) * 2 + k % 2; };
    if (type == WeightType::kF32) return pack_plain<uint32_t>(in, row_bytes, first, last, panel, by_step);
    if (type == WeightType::kF16) return pack_plain<uint16_t>(in, row_bytes, first, last, panel, by_step);
    if (type == WeightType::kBF16) return pack_plain<uint16_t>(in, row_bytes, first, last, panel, by_pair);
    const UnitLayout unit = kUnits[int(type)];
    const int block_bytes = weight_format(type).block_bytes;
    for (int64_t u = 0; u < row_bytes / block_bytes; ++u)
        for (int lane = first; lane < last; ++lane) {
            const uint8_t* block = in + (lane - first) * row_bytes + u * block_bytes;
            uint8_t* out = panel + u * unit.bytes;
            if (type == WeightType::kQ4_K) {
                pack_q4_k(block, lane, out);
            } else if (type == WeightType::kQ6_K) {
                pack_q6_k(block, lane, out);
            } else {
                pack_block(type, block, lane, out);
            }
        }
}

}  // namespace octavo
