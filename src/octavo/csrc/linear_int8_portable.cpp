// Products with activations in 8 bits on any C++17 machine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"
#include "linear_int8.h"

namespace octavo {
namespace {

#include "linear_portable.inl"
#include "linear_fields.inl"

constexpr int kMostInt8Rows = 2;

template <int Bits, int Zero, Part Of, int R>
inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t* minus_sums, Int (&sum)[R]) {
    for (int r = 0; r < R; ++r) {
        int16_t minus[2];
        std::memcpy(minus, minus_sums + r * 4, 4);
        const int of_x = (Of == Part::kSecond ? 0 : minus[0]) + (Of == Part::kFirst ? 0 : minus[1]);
        sum[r] = map<Int>([&](int) { return uint32_t(Zero * of_x); });
    }
    unroll<0, 8>([&](auto w) {
        const Int fields = four_fields<Bits, w.value, Of>(words);
        for (int r = 0; r < R; ++r) {
            int8_t q[4];
            std::memcpy(q, x + (w.value * R + r) * 4, 4);
            for (int lane = 0; lane < kLanes; ++lane)
                for (int c = 0; c < 4; ++c)
                    sum[r].lane[lane] += uint32_t(int32_t(fields.lane[lane] >> (8 * c) & 255) * q[c]);
        }
    });
}

#include "linear_int8.inl"

void quantize(const float* x, int64_t stride, int rows, int64_t blocks, uint8_t* out) {
    for (int64_t i = 0; i < blocks; ++i, out += rows * kInt8BlockBytes) {
        for (int r = 0; r < rows; ++r) {
            const float* from = x + r * stride + i * kInt8Block;
            float largest = 0.0f, scale = 0.0f, inverse = 0.0f;
            bool finite = true;
            for (int k = 0; k < kInt8Block; ++k) {
                finite = finite && std::isfinite(from[k]);
                largest = std::max(largest, std::fabs(from[k]));
            }
            if (!finite) {
                scale = std::numeric_limits<float>::quiet_NaN();
            } else if (largest >= 0x1p-118f) {
                scale = largest / 127.0f;
                inverse = 127.0f / largest;
            }
            int16_t minus[2] = {0, 0};
            for (int k = 0; k < kInt8Block; ++k) {
                // To the nearest, ties to even: the rounding mode that every process starts with.
                const int32_t q = finite ? int32_t(std::lrintf(from[k] * inverse)) : 0;
                minus[k / 16] = int16_t(minus[k / 16] - q);
                out[(k % 8 * rows + r) * 4 + k / 8] = uint8_t(q);
            }
            const float scaled = scale * float(-(minus[0] + minus[1]));
            std::memcpy(out + (8 * rows + r) * 4, &scale, 4);
            std::memcpy(out + (9 * rows + r) * 4, minus, 4);
            std::memcpy(out + (10 * rows + r) * 4, &scaled, 4);
        }
    }
}

}  // namespace

const Int8Kernels& portable_int8() {
    static const Int8Kernels kernels = make_int8_kernels(quantize);
    return kernels;
}

bool cpu_has_vnni() {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    return __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

}  // namespace octavo
