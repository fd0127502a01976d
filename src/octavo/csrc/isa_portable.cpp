// Any C++17 machine, with the same operations in the same order as the vector versions. Where the
// processor has no fused multiply-add, std::fma is emulated: right, and slow.
#include <cmath>
#include <cstring>

#include "compact_rows.h"
#include "half.h"

namespace octavo {
namespace {

struct F8 {
    float lane[8];
};

template <class F>
inline F8 map8(F f) {
    F8 out;
    for (int i = 0; i < 8; ++i) out.lane[i] = f(i);
    return out;
}

inline F8 set8(float x) {
    return map8([&](int) { return x; });
}
inline F8 load8(const float* p) {
    return map8([&](int i) { return p[i]; });
}
inline void store8(float* p, const F8& x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline F8 add8(const F8& a, const F8& b) {
    return map8([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F8 sub8(const F8& a, const F8& b) {
    return map8([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F8 mul8(const F8& a, const F8& b) {
    return map8([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F8 div8(const F8& a, const F8& b) {
    return map8([&](int i) { return a.lane[i] / b.lane[i]; });
}
// With a NaN the second operand wins, as in x86's max.
inline F8 max8(const F8& a, const F8& b) {
    return map8([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F8 fma8(const F8& a, const F8& b, const F8& c) {
    return map8([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline F8 zero_below8(const F8& value, const F8& x, const F8& limit) {
    return map8([&](int i) { return x.lane[i] < limit.lane[i] ? 0.0f : value.lane[i]; });
}
inline unsigned above8(const F8& x, const F8& limit) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= unsigned(!(x.lane[i] <= limit.lane[i])) << i;
    return bits;
}
inline unsigned not_below8(const F8& x, const F8& limit) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= unsigned(!(x.lane[i] < limit.lane[i])) << i;
    return bits;
}
// Sums in a fixed tree of eight lanes.
inline float fold8(const F8& x) {
    const float* lane = x.lane;
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}
inline F8 keep8(const F8& x, unsigned bits) {
    return map8([&](int i) { return (bits >> i & 1) != 0 ? x.lane[i] : 0.0f; });
}

struct I8 {
    int32_t lane[8];
};
struct Codes {
    int16_t lane[16];
};

inline I8 zero_i8() { return I8{}; }
inline I8 pair_i8(const int16_t* pair) {
    I8 out;
    for (int i = 0; i < 8; ++i) std::memcpy(&out.lane[i], pair, 4);
    return out;
}
inline Codes load_codes(const int8_t* p) {
    Codes out;
    for (int i = 0; i < 16; ++i) out.lane[i] = p[i];
    return out;
}
inline I8 add_products(const Codes& codes, const I8& pair, const I8& sum) {
    I8 out;
    for (int i = 0; i < 8; ++i) {
        int16_t q[2];
        std::memcpy(q, &pair.lane[i], 4);
        out.lane[i] = sum.lane[i] + codes.lane[2 * i] * q[0] + codes.lane[2 * i + 1] * q[1];
    }
    return out;
}
inline F8 load8(const int8_t* p) {
    return map8([&](int i) { return float(p[i]); });
}
// The eight halves of four bytes, the lower one of a byte first.
inline F8 load_nibbles8(const uint8_t* p) {
    return map8([&](int i) { return float(p[i / 2] >> i % 2 * 4 & 15); });
}
// Eight pairs of bytes, apart.
inline void load_pairs8(const int8_t* p, F8* even, F8* odd) {
    *even = map8([&](int i) { return float(p[2 * i]); });
    *odd = map8([&](int i) { return float(p[2 * i + 1]); });
}
inline F8 to_float8(const I8& x) {
    return map8([&](int i) { return float(x.lane[i]); });
}

// The float whose bits are the whole part of x, which is at least 0 and below 2^31.
inline F8 as_bits8(const F8& x) {
    return map8([&](int i) {
        const int32_t bits = int32_t(x.lane[i]);
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
}

inline F8 power_of_two8(const F8& t) {
    return map8([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &t.lane[i], 4);
        bits = (bits << 23) + (127u << 23);
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
}

inline float to_float(float x) { return x; }

inline float to_float(uint16_t h) { return half_to_float(h); }

inline F8 load8(const uint16_t* p) {
    return map8([&](int i) { return to_float(p[i]); });
}

// Round to nearest, ties to even.
inline uint16_t to_half1(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
    if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and above round to infinity
    if (bits < 0x38800000u) {                                 // below 2^-14: a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return uint16_t(sign | uint16_t(std::nearbyint(magnitude * 0x1p24f)));
    }
    const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1);
    return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
}

template <class T>
inline void transpose8(const T* const* row, int d, float* out) {
    for (int k = 0; k < 8; ++k)
        for (int i = 0; i < 8; ++i) out[k * kPanel + i] = to_float(row[i][d + k]);
}

void to_half(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = to_half1(x[i]);
}

#include "span_kernel.inl"
#include "rows.inl"
#include "topk_kernel.inl"
#include "topk_paged.inl"

const Isa kIsa = {"portable", span, merge, divide, exp_all, to_half, read_all, &kRows};
const TopkIsa kTopkIsa = {score, offer, settle, attend, grad, add};
const PagedTopkIsa kPagedTopkIsa = {scan, sift, limit, prefetch_rows, gather, attend_kept, clear, attend_span, mass, rank, expand_key};

}  // namespace

const Isa& portable_isa() { return kIsa; }
const TopkIsa& portable_topk() { return kTopkIsa; }
const PagedTopkIsa& portable_paged_topk() { return kPagedTopkIsa; }

bool cpu_has_avx2() {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

}  // namespace octavo
