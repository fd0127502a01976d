// Products with activations in 8 bits for AVX2, and their quantisation.
#include <cstring>
#include <limits>

#include "linear_int8.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx2.inl"
#include "linear_fields.inl"

constexpr int kMostInt8Rows = 4;

inline Int set_bits(const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}

// Ends a sum here: the compiler would put off additions, and store what it has not added.
inline void keep(Int* sum) { asm volatile("" : "+x"(*sum)); }

// _mm256_maddubs_epi16 adds two products of an unsigned and a signed byte and saturates at 16 bits. Here it never
// does: 2 * 128 * 127 is 32,512 for magnitudes of 8 bits. Of smaller fields several are added before that.
template <int Bits>
constexpr int kPairs = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;
static_assert(kPairs<4> * 2 * 15 * 127 < 32768 && kPairs<5> * 2 * 31 * 127 < 32768 && kPairs<6> * 2 * 63 * 127 < 32768);

template <int Bits, int Zero, Part Of, int R>
OCTAVO_INLINE inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t* minus_sums, Int (&sum)[R]) {
    const Int ones = _mm256_set1_epi16(1);
    if constexpr (Bits == 8) {
        static_assert(Zero == 128, "the sign is the top bit");
        UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_si256();
        unroll<0, 8>([&](auto w) OCTAVO_INLINE {
            const Int field = _mm256_xor_si256(four_fields<8, w.value, Of>(words), _mm256_set1_epi8(char(0x80)));
            const Int size = _mm256_abs_epi8(field);
            UNROLL for (int r = 0; r < R; ++r) {
                const Int signed_x = _mm256_sign_epi8(set_bits(x + (w.value * R + r) * 4), field);
                const Int pairs = _mm256_maddubs_epi16(size, signed_x);
                sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
                keep(&sum[r]);
            }
        });
    } else {
        const Int zeros = _mm256_set1_epi32((Of == Part::kSecond ? 0 : Zero) | (Of == Part::kFirst ? 0 : Zero) << 16);
        UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm256_madd_epi16(set_bits(minus_sums + r * 4), zeros);
        unroll<0, 8 / kPairs<Bits>>([&](auto group) OCTAVO_INLINE {
            Int pairs[R];
            unroll<0, kPairs<Bits>>([&](auto i) OCTAVO_INLINE {
                constexpr int w = decltype(group)::value * kPairs<Bits> + decltype(i)::value;
                const Int fields = four_fields<Bits, w, Of>(words);
                UNROLL for (int r = 0; r < R; ++r) {
                    const Int products = _mm256_maddubs_epi16(fields, set_bits(x + (w * R + r) * 4));
                    pairs[r] = decltype(i)::value == 0 ? products : _mm256_add_epi16(pairs[r], products);
                    keep(&pairs[r]);
                }
            });
            UNROLL for (int r = 0; r < R; ++r)
                sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs[r], ones));
        });
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
            Int sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, bytes = sums[0];
            UNROLL for (int c = 0; c < 4; ++c) {
                const Int q = _mm256_and_si256(_mm256_cvtps_epi32(mul(v[c], set(inverse))), finite);
                sums[c / 2] = _mm256_add_epi32(sums[c / 2], q);
                bytes = either(bytes, _mm256_slli_epi32(mask(q, 255), 8 * c));
            }
            // Pairs of lanes, then all: both sums lie side by side.
            const Int pairs = _mm256_hadd_epi32(sums[0], sums[1]);
            __m128i both = _mm_add_epi32(low_half(pairs), high_half(pairs));
            both = _mm_hadd_epi32(both, both);
            const int first = _mm_cvtsi128_si32(both), second = _mm_extract_epi32(both, 1);
            alignas(32) uint32_t lanes[8];
            _mm256_store_si256(reinterpret_cast<Int*>(lanes), bytes);
            for (int w = 0; w < 8; ++w) std::memcpy(out + (w * rows + r) * 4, &lanes[w], 4);
            const int16_t minus[2] = {int16_t(-first), int16_t(-second)};
            const float scaled = scale * float(first + second);
            std::memcpy(out + (8 * rows + r) * 4, &scale, 4);
            std::memcpy(out + (9 * rows + r) * 4, minus, 4);
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
