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

constexpr int kMostInt8Rows = 4;

template <int Bits, int Zero, int R>
inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t*, Int (&sum)[R]) {
    for (int r = 0; r < R; ++r) {
        int32_t total[kLanes] = {};
        for (int w = 0; w < 8; ++w) {
            int8_t q[4];
            std::memcpy(q, x + (w * R + r) * 4, 4);
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint8_t* fields = words + (w % Bits * kLanes + lane) * 4;
                for (int c = 0; c < 4; ++c) {
                    const int field = Bits == 8 ? fields[c] : fields[c] >> (w / 4 * 4) & 15;
                    total[lane] += (field - Zero) * q[c];
                }
            }
        }
        std::memcpy(sum[r].lane, total, sizeof total);
    }
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
            int32_t sum = 0;
            for (int k = 0; k < kInt8Block; ++k) {
                // To the nearest, ties to even: the rounding mode that every process starts with.
                const int32_t q = finite ? int32_t(std::lrintf(from[k] * inverse)) : 0;
                sum += q;
                out[(k % 8 * rows + r) * 4 + k / 8] = uint8_t(q);
            }
            const int32_t minus = -sum;
            const float scaled = scale * float(sum);
            std::memcpy(out + (8 * rows + r) * 4, &scale, 4);
            std::memcpy(out + (9 * rows + r) * 4, &minus, 4);
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
