// Products with activations in 8 bits for AVX-512 with VNNI.
#include <cstring>

#include "linear_int8.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx512.inl"
#include "linear_fields.inl"

constexpr int kMostInt8Rows = 8;

inline Int set_bits(const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

template <int Bits, int Zero, Part Of, int R>
OCTAVO_INLINE inline void dot_block(const uint8_t* words, const uint8_t* x, const uint8_t* minus_sums, Int (&sum)[R]) {
    const Int zeros = _mm512_set1_epi32((Of == Part::kSecond ? 0 : Zero) | (Of == Part::kFirst ? 0 : Zero) << 16);
    UNROLL for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_setzero_si512();
        if (Zero != 0) sum[r] = _mm512_madd_epi16(set_bits(minus_sums + r * 4), zeros);
    }
    unroll<0, 8>([&](auto w) OCTAVO_INLINE {
        const Int fields = four_fields<Bits, w.value, Of>(words);
        UNROLL for (int r = 0; r < R; ++r)
            sum[r] = _mm512_dpbusd_epi32(sum[r], fields, set_bits(x + (w.value * R + r) * 4));
    });
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
