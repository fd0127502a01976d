// Vectors for linear layers on AVX2, FMA and F16C, as linear_tile.inl asks for them; included inside an unnamed
// namespace.

constexpr int kLanes = 8;
using Vec = __m256;
using Int = __m256i;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Int load_bits(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Int load_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Int load_signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Int mask(Int x, uint32_t bits) { return _mm256_and_si256(x, _mm256_set1_epi32(int(bits))); }
inline Int either(Int a, Int b) { return _mm256_or_si256(a, b); }
template <int N>
inline Int left(Int x) {
    return _mm256_slli_epi32(x, N);
}
template <int N>
inline Int right(Int x) {
    return _mm256_srli_epi32(x, N);
}
inline Vec to_float(Int x) { return _mm256_cvtepi32_ps(x); }
inline Vec as_float(Int x) { return _mm256_castsi256_ps(x); }
// GCC takes a function of nothing but a prefetch for one without effect, and drops the calls.
inline void prefetch_first(const uint8_t* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }
inline void prefetch_second(const uint8_t* p) { asm volatile("prefetcht1 %0" : : "m"(*p)); }
