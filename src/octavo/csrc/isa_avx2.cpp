// AVX2, FMA and F16C. Compiled with those flags alone, so nothing here may be inline and shared.
#include "compact_rows.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {
namespace {

using F8 = __m256;

inline F8 set8(float x) { return _mm256_set1_ps(x); }
inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline F8 load8(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store8(float* p, F8 x) { _mm256_storeu_ps(p, x); }
inline F8 add8(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 sub8(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
inline F8 mul8(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 div8(F8 a, F8 b) { return _mm256_div_ps(a, b); }
inline F8 max8(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline F8 fma8(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }

// x where !(x's source < limit), else 0; a NaN source keeps x.
inline F8 zero_below8(F8 value, F8 x, F8 limit) {
    return _mm256_and_ps(value, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
}

// Bit i: lane i is above the limit, or NaN.
inline unsigned above8(F8 x, F8 limit) {
    return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_NLE_UQ)));
}

// Bit i: lane i is not below the limit, or NaN.
inline unsigned not_below8(F8 x, F8 limit) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ))); }

// x in the lanes whose bit is set, else 0.
inline F8 keep8(F8 x, unsigned bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(bits)), lane);
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}

// Sums in a fixed tree of eight lanes: isa_portable.cpp spells it out.
inline float fold8(F8 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

using I8 = __m256i;     // eight 32-bit integers
using Codes = __m256i;  // eight pairs of 16-bit integers

inline I8 zero_i8() { return _mm256_setzero_si256(); }
inline I8 pair_i8(const int16_t* pair) {
    int32_t both;
    __builtin_memcpy(&both, pair, 4);
    return _mm256_set1_epi32(both);
}
inline Codes load_codes(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I8 add_products(Codes codes, I8 pair, I8 sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(codes, pair)); }
inline F8 load8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The eight halves of four bytes, the lower one of a byte first.
inline F8 load_nibbles8(const uint8_t* p) {
    int32_t all;
    __builtin_memcpy(&all, p, 4);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(all), shift), _mm256_set1_epi32(15)));
}
// Eight pairs of bytes, apart.
inline void load_pairs8(const int8_t* p, F8* even, F8* odd) {
    const Codes pairs = load_codes(p);
    *even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16));
    *odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16));
}
inline F8 to_float8(I8 x) { return _mm256_cvtepi32_ps(x); }
// The float whose bits are the whole part of x.
inline F8 as_bits8(F8 x) { return _mm256_castsi256_ps(_mm256_cvttps_epi32(x)); }

// 2^n from the low bits of n + kRound.
inline F8 power_of_two8(F8 t) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
}

inline F8 load4x2(const float* a, const float* b) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}

inline F8 load4x2(const uint16_t* a, const uint16_t* b) {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a));
    const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high));
}

// Four columns of eight rows; a register holds rows i and i + 4, so no shuffle crosses lanes.
template <class T>
inline void transpose4(const T* const* row, int d, float* out) {
    const F8 a = load4x2(row[0] + d, row[4] + d), b = load4x2(row[1] + d, row[5] + d);
    const F8 c = load4x2(row[2] + d, row[6] + d), e = load4x2(row[3] + d, row[7] + d);
    const F8 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
    const F8 ce_low = _mm256_unpacklo_ps(c, e), ce_high = _mm256_unpackhi_ps(c, e);
    store8(out, _mm256_shuffle_ps(ab_low, ce_low, 0x44));
    store8(out + kPanel, _mm256_shuffle_ps(ab_low, ce_low, 0xEE));
    store8(out + 2 * kPanel, _mm256_shuffle_ps(ab_high, ce_high, 0x44));
    store8(out + 3 * kPanel, _mm256_shuffle_ps(ab_high, ce_high, 0xEE));
}

template <class T>
inline void transpose8(const T* const* row, int d, float* out) {
    transpose4(row, d, out);
    transpose4(row, d + 4, out + 4 * kPanel);
}

void to_half(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                         _mm256_cvtps_ph(load8(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#include "span_kernel.inl"
#include "rows.inl"
#include "topk_kernel.inl"
#include "topk_paged.inl"

const Isa kIsa = {"avx2", span, merge, divide, exp_all, to_half, read_all, &kRows};
const TopkIsa kTopkIsa = {score, offer, settle, attend, grad, add};
const PagedTopkIsa kPagedTopkIsa = {scan, sift, limit, prefetch_rows, gather, attend_kept, clear, attend_span, mass, rank, expand_key};

}  // namespace

const Isa* avx2_isa() { return &kIsa; }
const TopkIsa* avx2_topk() { return &kTopkIsa; }
const PagedTopkIsa* avx2_paged_topk() { return &kPagedTopkIsa; }

}  // namespace octavo

#else

namespace octavo {
const Isa* avx2_isa() { return nullptr; }
const TopkIsa* avx2_topk() { return nullptr; }
const PagedTopkIsa* avx2_paged_topk() { return nullptr; }
}  // namespace octavo

#endif
