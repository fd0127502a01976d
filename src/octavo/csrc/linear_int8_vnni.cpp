// Products with activations in 8 bits for AVX-512 with VNNI.
#include <cstring>

#include "linear_int8.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx512.inl"

constexpr int kMostInt8Rows = 8;

inline Int set_bits(const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

template <int Bits, int Zero, int R>
__attribute__((always_inline)) inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t* minus_sums,
                                                     Int (&sum)[R]) {
    static_assert(Zero == 0 || Zero == 8 || Zero == 128, "a power of two");
    _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_setzero_si512();
        if (Zero != 0) sum[r] = left<Zero == 8 ? 3 : 7>(set_bits(minus_sums + r * 4));
    }
    const auto add_word = [&](Int fields, int w) __attribute__((always_inline)) {
        _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)
            sum[r] = _mm512_dpbusd_epi32(sum[r], fields, set_bits(x + (w * R + r) * 4));
    };
    _Pragma("GCC unroll 8") for (int w = 0; w < Bits; ++w) {
        const Int word = load_bits(words + w * 64);
        if constexpr (Bits == 8) {
            add_word(word, w);
        } else {
            add_word(mask(word, 0x0f0f0f0fu), w);
            add_word(mask(right<4>(word), 0x0f0f0f0fu), w + 4);
        }
    }
}

#include "linear_int8.inl"

}  // namespace

const Int8Kernels* vnni_int8() {
    static const Int8Kernels kernels = make_int8_kernels(avx2_int8()->quantize);
    return &kernels;
}

}  // namespace octavo

#else

namespace octavo {
const Int8Kernels* vnni_int8() { return nullptr; }
}  // namespace octavo

#endif
