// Kernels of top-k attention for AVX-512 with VNNI; the others are AVX2's. What is summed in floats is summed in the
// order of topk_paged.inl, and sums of integers are exact: so the numbers are the same.
#include "topk_rows.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace octavo {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

inline __m512 load_half16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m256 load_half8(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m512i load_codes(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i pair(const int16_t* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return _mm512_set1_epi32(both);
}

// As isa_portable.cpp spells it out.
inline float fold8(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <int R>
void scan_rows(const ScanTask& t, int row, int record, const RecordLayout& layout, const uint8_t* ahead) {
    const uint8_t* at = t.record[record];
    const ScanQuery* query = t.query + row;
    const int8_t* code = reinterpret_cast<const int8_t*>(at);
    __m512i sum[R][2];
    UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int d = 0; d < t.head_dim; d += 4, code += 4 * kRecordKeys) {
        if (ahead != nullptr) prefetch_l2(ahead + d * kRecordKeys);
        const __m512i c0 = load_codes(code), c1 = load_codes(code + 2 * kRecordKeys);
        UNROLL for (int r = 0; r < R; ++r) {
            sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], c0, pair(query[r].code + d));
            sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], c1, pair(query[r].code + d + 2));
        }
    }
    const uint16_t* mean = reinterpret_cast<const uint16_t*>(at + layout.mean);
    float norm;
    __builtin_memcpy(&norm, at + layout.norm, 4);
    __m256 along[R];
    UNROLL for (int r = 0; r < R; ++r) along[r] = _mm256_setzero_ps();
    for (int d = 0; d < t.head_dim; d += 8) {
        const __m256 m = load_half8(mean + d);
        UNROLL for (int r = 0; r < R; ++r) along[r] = _mm256_fmadd_ps(_mm256_loadu_ps(query[r].q + d), m, along[r]);
    }
    const __m512 s = load_half16(reinterpret_cast<const uint16_t*>(at + layout.scale));
    const __m512 error = load_half16(reinterpret_cast<const uint16_t*>(at + layout.error));
    UNROLL for (int r = 0; r < R; ++r) {
        const ScanQuery& q = query[r];
        const __m512 base = _mm512_set1_ps(fold8(along[r]) * q.mean_scale);
        const __m512 constant = _mm512_set1_ps(q.per_norm * norm + 1e-36f);
        const __m512 all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r][0], sum[r][1]));
        const int64_t to = (row + r) * kScoreStride + record * kRecordKeys;
        _mm512_storeu_ps(t.value + to, _mm512_fmadd_ps(_mm512_mul_ps(all, _mm512_set1_ps(q.code_scale)), s, base));
        const __m512 rounding = _mm512_fmadd_ps(s, _mm512_set1_ps(q.per_scale), constant);
        _mm512_storeu_ps(t.bound + to, _mm512_fmadd_ps(error, _mm512_set1_ps(q.per_error), rounding));
    }
}

void scan(const ScanTask& t) {
    const RecordLayout layout = record_layout(t.head_dim);
    for (int i = 0; i < t.num_records; ++i) {
        const uint8_t* ahead = t.ask[i];
        if (ahead != nullptr)
            for (int line = layout.mean; line < layout.bytes; line += 64) prefetch_l2(ahead + line);
        int r = 0;
        for (; r + 4 <= t.rows; r += 4, ahead = nullptr) scan_rows<4>(t, r, i, layout, ahead);
        switch (t.rows - r) {
            case 3: scan_rows<3>(t, r, i, layout, ahead); break;
            case 2: scan_rows<2>(t, r, i, layout, ahead); break;
            case 1: scan_rows<1>(t, r, i, layout, ahead); break;
            default: break;
        }
    }
}

int sift(const SiftTask& t) {
    const __m512 limit = _mm512_set1_ps(t.limit), top = _mm512_set1_ps(t.top);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 dropped = _mm512_setzero_ps();
    int count = 0;
    for (int j = t.lo & ~15; j < t.hi; j += 16) {
        const __m512 upper = _mm512_add_ps(_mm512_loadu_ps(t.value + j), _mm512_loadu_ps(t.bound + j));
        unsigned seen = 0xffffu;
        if (j < t.lo) seen &= 0xffffu << (t.lo - j);
        if (j + 16 > t.hi) seen &= 0xffffu >> (j + 16 - t.hi);
        const __mmask16 stay = _mm512_mask_cmp_ps_mask(__mmask16(seen), upper, limit, _CMP_NLT_UQ);
        const __mmask16 gone = __mmask16(seen & ~unsigned(stay));
        // exp_bound8
        const __m512 bits = _mm512_fmadd_ps(_mm512_sub_ps(upper, top), _mm512_set1_ps(kExpScale), _mm512_set1_ps(kExpOne));
        const __m512i whole = _mm512_cvttps_epi32(_mm512_max_ps(bits, _mm512_setzero_ps()));
        dropped = _mm512_mask_add_ps(dropped, gone, dropped, _mm512_castsi512_ps(whole));
        _mm512_storeu_si512(t.stay + count, _mm512_maskz_compress_epi32(stay, _mm512_add_epi32(lane, _mm512_set1_epi32(j))));
        count += __builtin_popcount(stay);
    }
    *t.dropped += fold8(_mm256_add_ps(_mm512_castps512_ps256(dropped), _mm512_extractf32x8_ps(dropped, 1)));
    return count;
}

// 16 bytes of each of 16 rows -> 4 vectors of 32 bits a row.
inline void transpose16(const char* const* row, int64_t offset, __m512i* out) {
    const auto part = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[i] + offset)); };
    __m512i z[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        z[i] = _mm512_castsi128_si512(part(i));
        z[i] = _mm512_inserti32x4(z[i], part(i + 4), 1);
        z[i] = _mm512_inserti32x4(z[i], part(i + 8), 2);
        z[i] = _mm512_inserti32x4(z[i], part(i + 12), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// The same chains as score_tile's: over d, from 0, then the scale.
template <bool kHalf, int R>
void gather_rows(const GatherTask& t, int first, const char* const* row) {
    constexpr int kDims = kHalf ? 8 : 4;
    __m512 sum[R];
    UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    const auto add = [&](__m512 k, int d) {
        UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(t.q[first + r][d]), k, sum[r]);
    };
    for (int d = 0; d < t.head_dim; d += kDims) {
        __m512i column[4];
        transpose16(row, int64_t(d) * (kHalf ? 2 : 4), column);
        UNROLL for (int i = 0; i < 4; ++i) {
            if (!kHalf) {
                add(_mm512_castsi512_ps(column[i]), d + i);
                continue;
            }
            add(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(column[i])), d + 2 * i);
            add(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(column[i], 16))), d + 2 * i + 1);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(t.score + (first + r) * kScoreStride, _mm512_mul_ps(sum[r], _mm512_set1_ps(t.scale)));
}

template <bool kHalf>
void gather_typed(const GatherTask& t) {
    const char* row[kPanel];
    for (int i = 0; i < kPanel; ++i) row[i] = static_cast<const char*>(t.key[i < t.count ? i : t.count - 1]);
    int r = 0;
    for (; r + 4 <= t.rows; r += 4) gather_rows<kHalf, 4>(t, r, row);
    switch (t.rows - r) {
        case 3: gather_rows<kHalf, 3>(t, r, row); break;
        case 2: gather_rows<kHalf, 2>(t, r, row); break;
        case 1: gather_rows<kHalf, 1>(t, r, row); break;
        default: break;
    }
}

void gather(const GatherTask& t) {
    if (t.half) {
        gather_typed<true>(t);
    } else {
        gather_typed<false>(t);
    }
}

template <int R>
void rank_rows(const RankTask& t, int row) {
    const int n = 2 * t.head_dim;
    for (int i = 0; i < t.num_records; ++i) {
        const auto* code = reinterpret_cast<const int8_t*>(t.bounds[i]);
        if (row == 0 && t.ask[i] != nullptr)
            for (int d = 0; d < n; d += 64) prefetch_l2(t.ask[i] + d);
        __m512 sum[R];
        UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
        for (int d = 0; d < n; d += 16) {
            const __m512 c =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code + d))));
            UNROLL for (int r = 0; r < R; ++r)
                sum[r] = _mm512_add_ps(sum[r], _mm512_mul_ps(_mm512_loadu_ps(t.weight + (row + r) * n + d), c));
        }
        float step;
        __builtin_memcpy(&step, code + n, sizeof step);
        UNROLL for (int r = 0; r < R; ++r) {
            const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum[r]), _mm512_extractf32x8_ps(sum[r], 1));
            t.value[(row + r) * t.value_stride + i] = fold8(eight) * step;
        }
    }
}

void rank(const RankTask& t) {
    int r = 0;
    for (; r + 4 <= t.rows; r += 4) rank_rows<4>(t, r);
    switch (t.rows - r) {
        case 3: rank_rows<3>(t, r); break;
        case 2: rank_rows<2>(t, r); break;
        case 1: rank_rows<1>(t, r); break;
        default: break;
    }
}

}  // namespace

const PagedTopkIsa* vnni_paged_topk() {
    static const PagedTopkIsa kernels = [] {
        PagedTopkIsa all = *avx2_paged_topk();
        all.scan = scan;
        all.sift = sift;
        all.gather = gather;
        all.rank = rank;
        return all;
    }();
    return &kernels;
}

}  // namespace octavo

#else

namespace octavo {
const PagedTopkIsa* vnni_paged_topk() { return nullptr; }
}  // namespace octavo

#endif
