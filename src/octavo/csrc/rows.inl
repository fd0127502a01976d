// The row kernels of rows.h, included by each isa_*.cpp after span_kernel.inl, whose exp8 they use.
//
// A row is read in vectors of eight from its start; the last one is filled up with values that add
// exactly +0 to a sum. Sums are four vectors, vector i into sum i mod 4, folded in a fixed tree.

inline F8 load_part(const float* p, int64_t n, float fill) {
    if (n >= 8) return load8(p);
    float lanes[8];
    for (int i = 0; i < 8; ++i) lanes[i] = i < n ? p[i] : fill;
    return load8(lanes);
}

inline void store_part(float* p, int64_t n, F8 x) {
    if (n >= 8) return store8(p, x);
    float lanes[8];
    store8(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Sum of term(vector of x, running sum); a lane beyond the row holds fill.
template <class F>
float sum_row(const float* x, int64_t n, float fill, const F& term) {
    F8 s[4] = {set8(0.0f), set8(0.0f), set8(0.0f), set8(0.0f)};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        UNROLL for (int k = 0; k < 4; ++k) s[k] = term(load8(x + i + 8 * k), s[k]);
    for (int k = 0; i < n; i += 8, ++k) s[k] = term(load_part(x + i, n - i, fill), s[k]);
    float lanes[8];
    store8(lanes, add8(add8(s[0], s[1]), add8(s[2], s[3])));
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

void norm_row(const Norm& norm, const float* x, int64_t n, float* out) {
    const float count = float(n);
    float mean = 0.0f;
    if (norm.center) mean = sum_row(x, n, 0.0f, [](F8 v, F8 sum) { return add8(sum, v); }) / count;
    const F8 center = set8(mean);
    const float squares = sum_row(x, n, mean, [center](F8 v, F8 sum) {
        const F8 d = sub8(v, center);
        return fma8(d, d, sum);
    });
    const F8 scale = set8(1.0f / __builtin_sqrtf(squares / count + norm.eps));
    for (int64_t i = 0; i < n; i += 8) {
        F8 y = mul8(sub8(load_part(x + i, n - i, 0.0f), center), scale);
        y = mul8(y, load_part(norm.weight + i, n - i, 0.0f));
        if (norm.bias != nullptr) y = add8(y, load_part(norm.bias + i, n - i, 0.0f));
        store_part(out + i, n - i, y);
    }
}

void rotate_row(float* x, int heads, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    for (int h = 0; h < heads; ++h, x += head_dim) {
        for (int i = 0; i < half; i += 8) {
            const int n = half - i;
            const F8 a = load_part(x + i, n, 0.0f), b = load_part(x + half + i, n, 0.0f);
            const F8 ca = load_part(cos + i, n, 0.0f), cb = load_part(cos + half + i, n, 0.0f);
            const F8 sa = load_part(sin + i, n, 0.0f), sb = load_part(sin + half + i, n, 0.0f);
            store_part(x + i, n, fma8(b, sa, mul8(a, ca)));
            store_part(x + half + i, n, fma8(a, sb, mul8(b, cb)));
        }
    }
}

// 1 / (1 + e^-x). Below -88 it stays at e^-88 instead of falling further; NaN stays NaN.
inline F8 over_one_plus_exp8(F8 x, F8 u) {
    const F8 e = exp8(sub8(set8(0.0f), max8(set8(-88.0f), u)));
    return div8(x, add8(set8(1.0f), e));
}

inline F8 silu8(F8 x) { return over_one_plus_exp8(x, x); }

// x/2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3). arXiv 1606.08415, section 2.
inline F8 gelu_tanh8(F8 x) {
    const F8 cubic = fma8(mul8(x, x), set8(2.0f * 0.7978845608f * 0.044715f), set8(2.0f * 0.7978845608f));
    return over_one_plus_exp8(x, mul8(x, cubic));
}

// x P(x) with P the normal distribution, as max(x, 0) - |x| P(-|x|). P(-a) = e^(-a^2/2) t h(t) with
// t = 1 / (1 + 0.35 a); h is a degree-8 least-maximum fit of our own.
inline F8 gelu8(F8 x) {
    const F8 zero = set8(0.0f);
    const F8 a = max8(x, sub8(zero, x));
    const F8 t = div8(set8(1.0f), fma8(a, set8(0.35f), set8(1.0f)));
    F8 h = set8(-0x1.dcebf8p-6f);
    h = fma8(h, t, set8(0x1.267a98p-3f));
    h = fma8(h, t, set8(-0x1.0574aap-2f));
    h = fma8(h, t, set8(0x1.45105cp-3f));
    h = fma8(h, t, set8(-0x1.7568eep-6f));
    h = fma8(h, t, set8(0x1.af97c4p-4f));
    h = fma8(h, t, set8(0x1.eafbdp-4f));
    h = fma8(h, t, set8(0x1.1e6d32p-3f));
    h = fma8(h, t, set8(0x1.1df1fcp-3f));
    const F8 tail = mul8(mul8(t, h), exp8(mul8(mul8(a, a), set8(-0.5f))));
    return sub8(max8(zero, x), mul8(a, tail));
}

template <class F>
void activate_with(const F& act, const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 8) {
        F8 y = act(load_part(gate + i, n - i, 0.0f));
        if (up != nullptr) y = mul8(y, load_part(up + i, n - i, 0.0f));
        store_part(out + i, n - i, y);
    }
}

void activate_row(Activation activation, const float* gate, const float* up, int64_t n, float* out) {
    switch (activation) {
        case Activation::kSilu: return activate_with([](F8 x) { return silu8(x); }, gate, up, n, out);
        case Activation::kGelu: return activate_with([](F8 x) { return gelu8(x); }, gate, up, n, out);
        case Activation::kGeluTanh: return activate_with([](F8 x) { return gelu_tanh8(x); }, gate, up, n, out);
    }
}

void scale_add_row(float* x, float scale, const float* other, int64_t n) {
    const F8 factor = set8(scale);
    for (int64_t i = 0; i < n; i += 8) {
        F8 y = mul8(load_part(x + i, n - i, 0.0f), factor);
        if (other != nullptr) y = add8(y, load_part(other + i, n - i, 0.0f));
        store_part(x + i, n - i, y);
    }
}

const RowKernels kRows = {norm_row, rotate_row, activate_row, scale_add_row};
