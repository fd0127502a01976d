// Products with activations in 8 bits for AVX2, and their quantisation.
#include <cstring>
#include <limits>

#include "linear_int8.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx2.inl"

constexpr int kMostInt8Rows = 4;

inline Int set_bits(const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

// _mm256_maddubs_epi16 adds two products of an unsigned and a signed byte and saturates at 16 bits. Here it never
// does: 2 * 128 * 127 is 32,512, and eight times two products of 4 bits, 16 * 15 * 127, are 30,480.
template <int Bits, int Zero, int R>
__attribute__((always_inline)) inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t* minus_sums,
                                                     Int (&sum)[R]) {
    const Int ones = _mm256_set1_epi16(1);
    _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_si256();
    if constexpr (Bits == 8) {
        static_assert(Zero == 128, "the sign is the top bit");
        _Pragma("GCC unroll 8") for (int w = 0; w < 8; ++w) {
            const Int field = _mm256_xor_si256(load_bits(words + w * 64), _mm256_set1_epi8(char(0x80)));
            const Int size = _mm256_abs_epi8(field);
            _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) {
                const Int signed_x = _mm256_sign_epi8(set_bits(x + (w * R + r) * 4), field);
                const Int pairs = _mm256_maddubs_epi16(size, signed_x);
                sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
            }
        }
    } else {
        _Pragma("GCC unroll 8") for (int w = 0; w < 4; ++w) {
            const Int word = load_bits(words + w * 64);
            const Int low = mask(word, 0x0f0f0f0fu), high = mask(right<4>(word), 0x0f0f0f0fu);
            _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) {
                const Int a = _mm256_maddubs_epi16(low, set_bits(x + (w * R + r) * 4));
                const Int b = _mm256_maddubs_epi16(high, set_bits(x + ((w + 4) * R + r) * 4));
                sum[r] = _mm256_add_epi16(sum[r], _mm256_add_epi16(a, b));
            }
        }
        _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) {
            sum[r] = _mm256_madd_epi16(sum[r], ones);
            if (Zero == 8) sum[r] = _mm256_add_epi32(sum[r], left<3>(set_bits(minus_sums + r * 4)));
        }
    }
}

#include "linear_int8.inl"

inline int fold(__m128i x, __m128i (*f)(__m128i, __m128i)) {
    x = f(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(f(x, _mm_shuffle_epi32(x, 0xb1)));
}

inline __m128i low_half(Int x) { return _mm256_castsi256_si128(x); }
inline __m128i high_half(Int x) { return _mm256_extracti128_si256(x, 1); }

void quantize(const float* x, int64_t stride, int rows, int64_t blocks, uint8_t* out) {
    for (int64_t i = 0; i < blocks; ++i, out += rows * kInt8BlockBytes) {
        for (int r = 0; r < rows; ++r) {
            const float* from = x + r * stride + i * kInt8Block;
            Vec v[4];
            // As integers, magnitudes are in the order of their values, and NaN above all.
            Int most = _mm256_setzero_si256();
            UNROLL for (int c = 0; c < 4; ++c) {
                v[c] = load(from + 8 * c);
                most = _mm256_max_epi32(most, mask(_mm256_castps_si256(v[c]), 0x7fffffffu));
            }
            const int bits = fold(_mm_max_epi32(low_half(most), high_half(most)),
                                  [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
            float largest, scale = 0.0f, inverse = 0.0f;
            std::memcpy(&largest, &bits, 4);
            if (bits >= 0x7f800000) {
                scale = std::numeric_limits<float>::quiet_NaN();
            } else if (largest >= 0x1p-118f) {
                scale = largest / 127.0f;
                inverse = 127.0f / largest;
            }
            const Int finite = _mm256_set1_epi32(bits >= 0x7f800000 ? 0 : -1);
            Int sums = _mm256_setzero_si256(), bytes = _mm256_setzero_si256();
            UNROLL for (int c = 0; c < 4; ++c) {
                const Int q = _mm256_and_si256(_mm256_cvtps_epi32(mul(v[c], set(inverse))), finite);
                sums = _mm256_add_epi32(sums, q);
                bytes = either(bytes, _mm256_slli_epi32(mask(q, 255), 8 * c));
            }
            const int sum = fold(_mm_add_epi32(low_half(sums), high_half(sums)),
                                 [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
            alignas(32) uint32_t lanes[8];
            _mm256_store_si256(reinterpret_cast<Int*>(lanes), bytes);
            for (int w = 0; w < 8; ++w) std::memcpy(out + (w * rows + r) * 4, &lanes[w], 4);
            const int minus = -sum;
            const float scaled = scale * float(sum);
            std::memcpy(out + (8 * rows + r) * 4, &scale, 4);
            std::memcpy(out + (9 * rows + r) * 4, &minus, 4);
            std::memcpy(out + (10 * rows + r) * 4, &scaled, 4);
        }
    }
}

}  // namespace

const Int8Kernels* avx2_int8() {
    static const Int8Kernels kernels = make_int8_kernels(quantize);
    return &kernels;
}

}  // namespace octavo

#else

namespace octavo {
const Int8Kernels* avx2_int8() { return nullptr; }
}  // namespace octavo

#endif
