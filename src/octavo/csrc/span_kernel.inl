// The one inner kernel: R query rows against one span of kSpan absolute positions.
//
// Included inside an anonymous namespace by each isa_*.cpp, after it has defined F8 (eight floats)
// and its operations, so every instruction set runs these very statements in this very order.
//
// What makes a row's result independent of everything but its query and its visible keys:
//  * A partial (m, l, acc) starts from nothing at a span's first position, and spans are absolute.
//    Chunks, threads and the batch decide who computes a partial, never what is in it.
//  * A score is one chain of fused multiply-adds over d = 0 .. D-1, then one product with the scale.
//    Vector lanes are different keys, so neither the tile nor the lane changes a score. Decode and
//    prefill both read K from a panel [D][16] that was transposed into the first-level cache: for
//    decode it costs three shuffles a vector under a memory-bound loop, for prefill it is shared by
//    up to 96 rows.
//  * Weights are summed in 16 lanes, lane = position in the span mod 16, and folded in a fixed tree.
//    A masked lane adds exactly +0, so how far the vector loop reaches does not matter.
//  * acc[d] is one chain over the visible keys in order of position. A masked key is skipped, not
//    multiplied by 0: 0 * inf is NaN, and a later token must not reach an earlier row.
//  * Compiled with -ffp-contract=off: only the fused operations written here are fused.
// Keys outside [lowest lo, highest hi) of the tile are never read: their slots may hold anything.

// Arrays of F8 are register tiles only if their loops are gone before registers are given out.
#define UNROLL _Pragma("GCC unroll 8")

// e^r = 1 + r + r^2 g(r) on [-ln2/2, ln2/2]; g is a degree-4 least-maximum fit of our own, relative
// error 3e-9. Below kExpLow the result is 0: it would be subnormal, under 1.2e-38 of the largest.
constexpr float kExpLow = -87.33654f;
constexpr float kLog2e = 0x1.715476p0f;
constexpr float kLn2Hi = 0x1.62e43p-1f;
constexpr float kLn2Lo = -0x1.05c61p-29f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

inline F8 exp8(F8 x) {
    const F8 t = fma8(x, set8(kLog2e), set8(kRound));
    const F8 n = sub8(t, set8(kRound));
    F8 r = fma8(n, set8(-kLn2Hi), x);
    r = fma8(n, set8(-kLn2Lo), r);
    F8 p = set8(0x1.6a234ep-10f);
    p = fma8(p, r, set8(0x1.123a6cp-7f));
    p = fma8(p, r, set8(0x1.5558f4p-5f));
    p = fma8(p, r, set8(0x1.55549p-3f));
    p = fma8(p, r, set8(0x1.fffffcp-2f));
    p = fma8(p, r, set8(1.0f));
    p = fma8(p, r, set8(1.0f));
    // A product, not an addition to p's exponent bits: NaN must stay NaN.
    return zero_below8(mul8(p, power_of_two8(t)), x, set8(kExpLow));
}

inline float exp1(float x) {
    float lanes[8];
    store8(lanes, exp8(set8(x)));
    return lanes[0];
}

template <class T>
const T* cache_row(const SpanTask& t, const void* base, int j) {
    return static_cast<const T*>(base) + t.blocks[j >> t.block_shift] * t.block_stride +
           int64_t(j & ((1 << t.block_shift) - 1)) * t.head_dim;
}

// Into the second-level cache: that queue is longer than the first level's, and twice as much memory
// is in flight (measured on Zen 4: 24 instead of 12 GB/s a core over scattered 4 KiB blocks).
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Memory is asked for one phase ahead: V of this span while K is read, K of the next span while V
// is read; a line at a time between the arithmetic, because a burst overflows the queue of misses.
// A block is often a page of its own, where the hardware's prefetcher stops and where an address
// must first be translated: so each phase first touches every block of the next.
template <class T>
void touch_blocks(const SpanTask& t, const void* base, int first, int end) {
    const int step = 1 << t.block_shift < kPanel ? kPanel : 1 << t.block_shift;
    for (int j = first; j < end; j += step) prefetch_l2(cache_row<T>(t, base, j));
}

// Eight keys. Those outside the visible range repeat a visible one; their scores are masked.
template <class T>
void visible_rows(const SpanTask& t, const void* base, int first, int lo, int hi, const T** row) {
    for (int i = 0; i < 8; ++i) {
        const int j = first + i < lo ? lo : (first + i >= hi ? hi - 1 : first + i);
        row[i] = cache_row<T>(t, base, j);
    }
}

// [16 keys][D] -> [D][16 keys].
template <class T, bool kCold>
void pack_panel(const SpanTask& t, int panel, int lo, int hi) {
    constexpr int kLine = int(64 / sizeof(T));
    for (int half = 0; half < kPanel; half += 8) {
        const T *row[8], *value[8], *next[kCold ? 8 : 1];
        visible_rows(t, t.key, panel + half, lo, hi, row);
        visible_rows(t, t.value, panel + half, lo, hi, value);
        if (kCold) visible_rows(t, t.key, panel + kPanel < hi ? panel + kPanel + half : panel + half, lo, hi, next);
        for (int d = 0; d < t.head_dim; d += 8) {
            if (d % kLine == 0) {
                for (int i = 0; i < 8; ++i) prefetch_l2(value[i] + d);
                if (kCold)
                    for (int i = 0; i < 8; ++i) prefetch_l2(next[i] + d);
            }
            transpose8(row, d, t.k_panel + d * kPanel + half);
        }
    }
}

// The scores of 16 keys, whose biases are at `bias` unless that is nullptr.
inline void store_scores(F8 s0, F8 s1, float scale, const float* bias, float* out) {
    s0 = mul8(s0, set8(scale));
    s1 = mul8(s1, set8(scale));
    if (bias != nullptr) {
        s0 = add8(s0, load8(bias));
        s1 = add8(s1, load8(bias + 8));
    }
    store8(out, s0);
    store8(out + 8, s1);
}

// R rows x 16 keys.
template <int R>
void score_tile(const float* q, const float* k, int head_dim, float scale, const float* bias, float* out) {
    F8 s[R][2];
    UNROLL for (int r = 0; r < R; ++r) s[r][0] = s[r][1] = set8(0.0f);
    for (int d = 0; d < head_dim; ++d, q += R, k += kPanel) {
        const F8 k0 = load8(k), k1 = load8(k + 8);
        UNROLL for (int r = 0; r < R; ++r) {
            const F8 b = set8(q[r]);
            s[r][0] = fma8(b, k0, s[r][0]);
            s[r][1] = fma8(b, k1, s[r][1]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) store_scores(s[r][0], s[r][1], scale, bias, out + r * kScoreStride);
}

inline void score_rows(int rows, const float* q, const float* k, int head_dim, float scale, const float* bias,
                       float* out) {
    switch (rows) {
        case 1: return score_tile<1>(q, k, head_dim, scale, bias, out);
        case 2: return score_tile<2>(q, k, head_dim, scale, bias, out);
        case 3: return score_tile<3>(q, k, head_dim, scale, bias, out);
        case 4: return score_tile<4>(q, k, head_dim, scale, bias, out);
        case 5: return score_tile<5>(q, k, head_dim, scale, bias, out);
        default: return score_tile<6>(q, k, head_dim, scale, bias, out);
    }
}

// Scores of one row -> weights, in place.
inline void softmax_row(float* s, int lo, int hi, float* m_out, float* l_out) {
    const int first = lo & ~(kPanel - 1), end = (hi + kPanel - 1) & ~(kPanel - 1);
    for (int j = first; j < lo; ++j) s[j] = -__builtin_inff();
    for (int j = hi; j < end; ++j) s[j] = -__builtin_inff();
    F8 m0 = set8(-__builtin_inff()), m1 = m0;
    for (int j = first; j < end; j += kPanel) {
        m0 = max8(m0, load8(s + j));
        m1 = max8(m1, load8(s + j + 8));
    }
    float lanes[8];
    store8(lanes, max8(m0, m1));
    float m = lanes[0];
    for (int i = 1; i < 8; ++i) m = lanes[i] > m ? lanes[i] : m;
    F8 l0 = set8(0.0f), l1 = l0;
    // Scores that overflowed to -inf weigh nothing, also where a span has no others: -inf - -inf is NaN.
    const F8 top = set8(m == -__builtin_inff() ? 0.0f : m);
    for (int j = first; j < end; j += kPanel) {
        const F8 p0 = exp8(sub8(load8(s + j), top));
        const F8 p1 = exp8(sub8(load8(s + j + 8), top));
        store8(s + j, p0);
        store8(s + j + 8, p1);
        l0 = add8(l0, p0);
        l1 = add8(l1, p1);
    }
    store8(lanes, add8(l0, l1));
    *m_out = m;
    *l_out = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class T>
F8 part8(const T* v, int d) {
    return load8(v + d);
}

// R rows x 8 N columns of acc, in registers while keys pass by.
template <int R, int N>
struct ValueTile {
    F8 a[R][N];

    void load(const float* acc, int head_dim) {
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < N; ++c) a[r][c] = load8(acc + r * head_dim + c * 8);
    }
    void store(float* acc, int head_dim) const {
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < N; ++c) store8(acc + r * head_dim + c * 8, a[r][c]);
    }
    // acc[r][d] += p[r] * v[d]
    template <class V>
    void add(const float* p, const V& v) {
        // Whichever operand there are fewer of stays in registers: 16 have to do.
        if (R < N) {
            F8 b[R];
            UNROLL for (int r = 0; r < R; ++r) b[r] = set8(p[r * kScoreStride]);
            UNROLL for (int c = 0; c < N; ++c) {
                const F8 x = part8(v, c * 8);
                UNROLL for (int r = 0; r < R; ++r) a[r][c] = fma8(b[r], x, a[r][c]);
            }
        } else {
            F8 x[N];
            UNROLL for (int c = 0; c < N; ++c) x[c] = part8(v, c * 8);
            UNROLL for (int r = 0; r < R; ++r) {
                const F8 b = set8(p[r * kScoreStride]);
                UNROLL for (int c = 0; c < N; ++c) a[r][c] = fma8(b, x[c], a[r][c]);
            }
        }
    }
};

// n keys whose V is contiguous at v, float32.
template <int R, int N>
void value_keys(const float* p, const float* v, int n, int head_dim, float* acc) {
    ValueTile<R, N> tile;
    tile.load(acc, head_dim);
    for (int j = 0; j < n; ++j, v += head_dim) tile.add(p + j, v);
    tile.store(acc, head_dim);
}

template <int R, int N>
void value_columns(const float* p, const float* v, int n, int head_dim, float* acc) {
    int d = 0;
    for (; d + 8 * N <= head_dim; d += 8 * N) value_keys<R, N>(p, v + d, n, head_dim, acc + d);
    for (; d < head_dim; d += 8) value_keys<R, 1>(p, v + d, n, head_dim, acc + d);
}

inline void value_rows(int rows, const float* p, const float* v, int n, int head_dim, float* acc) {
    if (n <= 0) return;
    switch (rows) {
        case 1: return value_columns<1, 8>(p, v, n, head_dim, acc);
        case 2: return value_columns<2, 4>(p, v, n, head_dim, acc);
        case 3: return value_columns<3, 4>(p, v, n, head_dim, acc);
        case 4: return value_columns<4, 2>(p, v, n, head_dim, acc);
        case 5: return value_columns<5, 2>(p, v, n, head_dim, acc);
        default: return value_columns<6, 2>(p, v, n, head_dim, acc);
    }
}

// The keys [begin, end), contiguous at v, for every row: each row takes exactly those it sees.
inline void value_run(const SpanTask& t, const float* v, int begin, int end) {
    const auto add = [&](int row, int rows, int from, int to) {
        value_rows(rows, t.scores + row * kScoreStride + from, v + int64_t(from - begin) * t.head_dim, to - from,
                   t.head_dim, t.acc + row * t.head_dim);
    };
    for (int i = 0, row = 0; i < t.num_micro; row += t.micro[i++]) {
        const int rows = t.micro[i];
        int all_lo = begin, all_hi = end;  // the keys that every row of the register tile sees
        for (int r = row; r < row + rows; ++r) {
            all_lo = t.lo[r] > all_lo ? t.lo[r] : all_lo;
            all_hi = t.hi[r] < all_hi ? t.hi[r] : all_hi;
        }
        if (all_lo >= all_hi) all_lo = all_hi = end;
        for (int r = row; r < row + rows; ++r)
            add(r, 1, t.lo[r] > begin ? t.lo[r] : begin, t.hi[r] < all_lo ? t.hi[r] : all_lo);
        add(row, rows, all_lo, all_hi);
        for (int r = row; r < row + rows; ++r) add(r, 1, all_hi, t.hi[r] < end ? t.hi[r] : end);
    }
}

// Many rows, or rows that see different keys: V goes through a copy that all rows share.
template <class T>
void value_by_copy(const SpanTask& t, int lo, int hi) {
    constexpr int kLine = int(64 / sizeof(T));
    for (int begin = lo; begin < hi; begin += kValueKeys) {
        const int end = begin + kValueKeys < hi ? begin + kValueKeys : hi;
        for (int k = begin; k < end; ++k) {
            if (k < t.next_keys) {
                const T* ahead = cache_row<T>(t, t.key, kSpan + k);
                for (int d = 0; d < t.head_dim; d += kLine) prefetch_l2(ahead + d);
            }
            const T* v = cache_row<T>(t, t.value, k);
            float* out = t.v_block + int64_t(k - begin) * t.head_dim;
            for (int d = 0; d < t.head_dim; d += 8) store8(out + d, load8(v + d));
        }
        value_run(t, t.v_block, begin, end);
    }
}

inline int block_end(const SpanTask& t, int j, int hi) {
    const int end = (j | ((1 << t.block_shift) - 1)) + 1;
    return end < hi ? end : hi;
}

// One register tile whose rows all see [lo, hi), as in decode: V is read where it lies, once. `later`: what is asked for
// meanwhile, as much as is read; nullptr is the next span's K.
template <class T, int R, int N>
void value_stream(const SpanTask& t, int lo, int hi, int d, const T* later) {
    constexpr int kLineVectors = int(8 / sizeof(T));
    ValueTile<R, N> tile;
    tile.load(t.acc + d, t.head_dim);
    for (int j = lo; j < hi;) {
        const int end = block_end(t, j, hi);
        const T* v = cache_row<T>(t, t.value, j) + d;
        const T* ahead = v;
        if (later != nullptr) {
            ahead = later + d;
        } else if (end <= t.next_keys) {
            ahead = cache_row<T>(t, t.key, kSpan + j) + d;
        }
        for (; j < end; ++j, v += t.head_dim, ahead += t.head_dim) {
            for (int c = 0; c < N; c += kLineVectors) prefetch_l2(ahead + c * 8);
            tile.add(t.scores + j, v);
        }
    }
    tile.store(t.acc + d, t.head_dim);
}

template <class T, int R, int N>
void value_stream_columns(const SpanTask& t, int lo, int hi, const T* later) {
    int d = 0;
    for (; d + 8 * N <= t.head_dim; d += 8 * N) value_stream<T, R, N>(t, lo, hi, d, later);
    for (; d < t.head_dim; d += 8) value_stream<T, R, 1>(t, lo, hi, d, later);
}

template <class T>
void value_stream_rows(const SpanTask& t, int lo, int hi, const T* later) {
    switch (t.rows) {
        case 1: return value_stream_columns<T, 1, 8>(t, lo, hi, later);
        case 2: return value_stream_columns<T, 2, 4>(t, lo, hi, later);
        case 3: return value_stream_columns<T, 3, 4>(t, lo, hi, later);
        case 4: return value_stream_columns<T, 4, 2>(t, lo, hi, later);
        case 5: return value_stream_columns<T, 5, 2>(t, lo, hi, later);
        default: return value_stream_columns<T, 6, 2>(t, lo, hi, later);
    }
}

template <class T>
void value_phase(const SpanTask& t, int lo, int hi) {
    touch_blocks<T>(t, t.key, kSpan, kSpan + t.next_keys);
    bool same = t.num_micro == 1;
    for (int r = 0; r < t.rows; ++r) same = same && t.lo[r] == lo && t.hi[r] == hi;
    if (!same) return value_by_copy<T>(t, lo, hi);
    value_stream_rows<T>(t, lo, hi, nullptr);
}

// Keys and values as they are stored.
template <class T>
struct Stored {
    static void touch_values(const SpanTask& t, int lo, int hi) { touch_blocks<T>(t, t.value, lo, hi); }
    static void pack(const SpanTask& t, int panel, int lo, int hi) {
        if (t.cold) {
            pack_panel<T, true>(t, panel, lo, hi);
        } else {
            pack_panel<T, false>(t, panel, lo, hi);
        }
    }
    // Whether the keys at `panel` were scored on the way to the panel.
    static bool score(const SpanTask&, int, int) { return false; }
    static void values(const SpanTask& t, int lo, int hi) { value_phase<T>(t, lo, hi); }
};

#include "compact_kernel.inl"

template <class Form>
void span_form(const SpanTask& t) {
    int lo = kSpan, hi = 0;
    int micro_lo[kMaxMicroTiles], micro_hi[kMaxMicroTiles];
    for (int i = 0, row = 0; i < t.num_micro; row += t.micro[i++]) {
        micro_lo[i] = kSpan;
        micro_hi[i] = 0;
        for (int r = row; r < row + t.micro[i]; ++r) {
            if (t.lo[r] >= t.hi[r]) continue;
            micro_lo[i] = t.lo[r] < micro_lo[i] ? t.lo[r] : micro_lo[i];
            micro_hi[i] = t.hi[r] > micro_hi[i] ? t.hi[r] : micro_hi[i];
        }
        lo = micro_lo[i] < lo ? micro_lo[i] : lo;
        hi = micro_hi[i] > hi ? micro_hi[i] : hi;
    }
    Form::touch_values(t, lo, hi);
    for (int panel = lo & ~(kPanel - 1); panel < hi; panel += kPanel) {
        const int next = panel + kPanel;
        if (Form::score(t, panel, hi)) continue;
        Form::pack(t, panel, lo, hi);
        const float* bias = t.bias == nullptr ? nullptr : t.bias + panel;
        const float* q = t.q_packed;
        for (int i = 0, row = 0; i < t.num_micro; row += t.micro[i++]) {
            if (panel < micro_hi[i] && next > micro_lo[i])
                score_rows(t.micro[i], q, t.k_panel, t.head_dim, t.scale, bias, t.scores + row * kScoreStride + panel);
            q += t.micro[i] * t.head_dim;
        }
    }
    for (int r = 0; r < t.rows; ++r) {
        for (int d = 0; d < t.head_dim; d += 8) store8(t.acc + r * t.head_dim + d, set8(0.0f));
        if (t.lo[r] < t.hi[r]) {
            softmax_row(t.scores + r * kScoreStride, t.lo[r], t.hi[r], t.m + r, t.l + r);
        } else {
            t.m[r] = -__builtin_inff();
            t.l[r] = 0.0f;
        }
    }
    Form::values(t, lo, hi);
}

// One query of a sequence, in all its KV heads, which lie side by side in a block: K, then V, is read in the order of
// addresses, which the hardware follows up, and of what is asked for each piece comes a block later.
template <class T>
void span_heads(const SpanTask& t) {
    constexpr int kLine = int(64 / sizeof(T));
    const int lo = t.lo[0], hi = t.hi[0], rows = t.micro[0];
    SpanTask head = t;
    head.rows = rows;
    head.num_micro = 1;
    const auto take_head = [&](int i) {
        head.key = static_cast<const T*>(t.key) + i * t.head_stride;
        head.value = static_cast<const T*>(t.value) + i * t.head_stride;
        head.q_packed = t.q_packed + int64_t(i) * rows * t.head_dim;
        head.scores = t.scores + int64_t(i) * rows * kScoreStride;
        head.acc = t.acc + int64_t(i) * rows * t.head_dim;
    };
    for (int panel = lo & ~(kPanel - 1); panel < hi; panel += kPanel) {
        for (int i = 0; i < t.num_micro; ++i) {
            take_head(i);
            const T* later = panel + kPanel < hi ? cache_row<T>(head, head.key, panel + kPanel)
                                                 : cache_row<T>(head, head.value, lo & ~(kPanel - 1));
            for (int half = 0; half < kPanel; half += 8) {
                const T* row[8];
                visible_rows(head, head.key, panel + half, lo, hi, row);
                for (int d = 0; d < t.head_dim; d += 8) {
                    for (int line = 0; line < 64 / kLine; ++line, later += kLine) prefetch_l2(later);
                    transpose8(row, d, t.k_panel + d * kPanel + half);
                }
            }
            score_rows(rows, head.q_packed, t.k_panel, t.head_dim, t.scale, nullptr, head.scores + panel);
        }
    }
    for (int r = 0; r < t.rows; ++r) {
        for (int d = 0; d < t.head_dim; d += 8) store8(t.acc + r * t.head_dim + d, set8(0.0f));
        softmax_row(t.scores + r * kScoreStride, lo, hi, t.m + r, t.l + r);
    }
    for (int j = lo, end; j < hi; j = end) {
        end = block_end(t, j, hi);
        for (int i = 0; i < t.num_micro; ++i) {
            take_head(i);
            const T* later = cache_row<T>(head, head.value, j);
            if (end < hi) {
                later = cache_row<T>(head, head.value, end);
            } else if (t.next_keys > 0) {
                later = cache_row<T>(head, head.key, kSpan);
            }
            value_stream_rows<T>(head, j, end, later);
        }
    }
}

void span(const SpanTask& t) {
    if (t.head_stride > 0) {
        if (t.half) return span_heads<uint16_t>(t);
        return span_heads<float>(t);
    }
    if (t.value_bits == 8) {
        span_form<Compact<Value8>>(t);
    } else if (t.value_bits == 4) {
        span_form<Compact<Value4>>(t);
    } else if (t.half) {
        span_form<Stored<uint16_t>>(t);
    } else {
        span_form<Stored<float>>(t);
    }
}

void merge(int rows, int head_dim, const float* m2, const float* l2, const float* acc2, float* m, float* l,
           float* acc) {
    for (int r = 0; r < rows; ++r, acc += head_dim, acc2 += head_dim) {
        if (l2[r] == 0.0f) continue;
        if (l[r] == 0.0f) {
            m[r] = m2[r];
            l[r] = l2[r];
            for (int d = 0; d < head_dim; d += 8) store8(acc + d, load8(acc2 + d));
            continue;
        }
        const float top = m[r] > m2[r] ? m[r] : m2[r];
        const float old_weight = exp1(m[r] - top), new_weight = exp1(m2[r] - top);
        m[r] = top;
        l[r] = l[r] * old_weight + l2[r] * new_weight;
        const F8 a = set8(old_weight), b = set8(new_weight);
        for (int d = 0; d < head_dim; d += 8)
            store8(acc + d, fma8(load8(acc + d), a, mul8(load8(acc2 + d), b)));
    }
}

void divide(const float* acc, float l, int n, float* out) {
    const F8 divisor = set8(l);
    for (int d = 0; d < n; d += 8) store8(out + d, div8(load8(acc + d), divisor));
}

void exp_all(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = exp1(x[i]);
}

uint64_t read_all(const void* data, int64_t bytes) {
    const uint64_t* word = static_cast<const uint64_t*>(data);
    uint64_t sum[16] = {};
    int64_t i = 0;
    for (; i + 16 <= bytes / 8; i += 16)
        for (int k = 0; k < 16; ++k) sum[k] += word[i + k];
    for (; i < bytes / 8; ++i) sum[0] += word[i];
    for (int k = 1; k < 16; ++k) sum[0] += sum[k];
    return sum[0];
}
