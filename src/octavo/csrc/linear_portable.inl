// Vectors for linear layers on any C++17 machine, as linear_tile.inl asks for them; included inside an unnamed
// namespace. It needs half.h, <cmath> and <cstring>.

constexpr int kLanes = 16;

struct Vec {
    float lane[kLanes];
};
struct Int {
    uint32_t lane[kLanes];
};

template <class T, class F>
inline T map(F f) {
    T out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = f(i);
    return out;
}

inline Vec zero() { return Vec{}; }
inline Vec set(float x) {
    return map<Vec>([&](int) { return x; });
}
inline Vec load(const float* p) {
    return map<Vec>([&](int i) { return p[i]; });
}
inline void store(float* p, const Vec& x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline Vec add(const Vec& a, const Vec& b) {
    return map<Vec>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
    return map<Vec>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return map<Vec>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Vec load_half(const uint16_t* p) {
    return map<Vec>([&](int i) { return half_to_float(p[i]); });
}
inline Int load_bits(const uint8_t* p) {
    Int out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
}
inline Int load_bytes(const uint8_t* p) {
    return map<Int>([&](int i) { return uint32_t(p[i]); });
}
inline Int load_signed_bytes(const uint8_t* p) {
    return map<Int>([&](int i) { return uint32_t(int32_t(int8_t(p[i]))); });
}
inline Int mask(const Int& x, uint32_t bits) {
    return map<Int>([&](int i) { return x.lane[i] & bits; });
}
inline Int either(const Int& a, const Int& b) {
    return map<Int>([&](int i) { return a.lane[i] | b.lane[i]; });
}
template <int N>
inline Int left(const Int& x) {
    return map<Int>([&](int i) { return x.lane[i] << N; });
}
template <int N>
inline Int right(const Int& x) {
    return map<Int>([&](int i) { return x.lane[i] >> N; });
}
inline Vec to_float(const Int& x) {
    return map<Vec>([&](int i) { return float(int32_t(x.lane[i])); });
}
inline Vec as_float(const Int& x) {
    Vec out;
    std::memcpy(out.lane, x.lane, sizeof out.lane);
    return out;
}
inline void prefetch_first(const uint8_t*) {}
inline void prefetch_second(const uint8_t*) {}
