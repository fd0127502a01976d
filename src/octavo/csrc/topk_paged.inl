// Kernels of top-k attention over a paged cache; included after topk_kernel.inl.

// Codes and query pairs are multiplied in 32-bit integers, exactly: see kMaxQueryCode.
template <int R>
void scan_rows(const ScanTask& t, int row, int record, const RecordLayout& layout, const uint8_t* ahead) {
    const uint8_t* at = t.record[record];
    const ScanQuery* query = t.query + row;
    const int8_t* code = reinterpret_cast<const int8_t*>(at);
    I8 sum[R][2];
    UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = zero_i8();
    for (int d = 0; d < t.head_dim; d += 2, code += 2 * kRecordKeys) {
        // A line at a time between the arithmetic: a burst overflows the queue of misses.
        if (ahead != nullptr && d % 4 == 0) prefetch_l2(ahead + d * kRecordKeys);
        const Codes c0 = load_codes(code), c1 = load_codes(code + kRecordKeys);
        UNROLL for (int r = 0; r < R; ++r) {
            const I8 pair = pair_i8(query[r].code + d);
            sum[r][0] = add_products(c0, pair, sum[r][0]);
            sum[r][1] = add_products(c1, pair, sum[r][1]);
        }
    }
    const uint16_t* mean = reinterpret_cast<const uint16_t*>(at + layout.mean);
    const uint16_t* scale = reinterpret_cast<const uint16_t*>(at + layout.scale);
    const uint16_t* error = reinterpret_cast<const uint16_t*>(at + layout.error);
    float norm;
    __builtin_memcpy(&norm, at + layout.norm, 4);
    F8 along[R];
    UNROLL for (int r = 0; r < R; ++r) along[r] = set8(0.0f);
    for (int d = 0; d < t.head_dim; d += 8) {
        const F8 m = load8(mean + d);
        UNROLL for (int r = 0; r < R; ++r) along[r] = fma8(load8(query[r].q + d), m, along[r]);
    }
    UNROLL for (int r = 0; r < R; ++r) {
        const ScanQuery& q = query[r];
        const F8 base = set8(fold8(along[r]) * q.mean_scale), constant = set8(q.per_norm * norm + 1e-36f);
        float* value = t.value + (row + r) * kScoreStride + record * kRecordKeys;
        float* bound = t.bound + (row + r) * kScoreStride + record * kRecordKeys;
        UNROLL for (int h = 0; h < 2; ++h) {
            const F8 s = load8(scale + 8 * h);
            const F8 product = mul8(to_float8(sum[r][h]), set8(q.code_scale));
            store8(value + 8 * h, fma8(product, s, base));
            store8(bound + 8 * h,
                   fma8(load8(error + 8 * h), set8(q.per_error), fma8(s, set8(q.per_scale), constant)));
        }
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

// At least e^x for x <= 0, and at most 1.062 of it: 2^n (1 + f) where e^x is 2^n 2^f. Below -87 it is 0.
inline F8 exp_bound8(F8 x) {
    const F8 bits = fma8(x, set8(kExpScale), set8(kExpOne));
    return as_bits8(max8(bits, set8(0.0f)));
}

int sift(const SiftTask& t) {
    const F8 limit = set8(t.limit), top = set8(t.top);
    F8 dropped[2] = {set8(0.0f), set8(0.0f)};
    int count = 0;
    for (int j = t.lo & ~7; j < t.hi; j += 8) {
        const F8 upper = add8(load8(t.value + j), load8(t.bound + j));
        unsigned seen = 0xffu;
        if (j < t.lo) seen &= 0xffu << (t.lo - j);
        if (j + 8 > t.hi) seen &= 0xffu >> (j + 8 - t.hi);
        const unsigned stay = not_below8(upper, limit) & seen;
        const unsigned gone = seen & ~stay;
        F8& sum = dropped[j / 8 % 2];
        sum = add8(sum, keep8(exp_bound8(keep8(sub8(upper, top), gone)), gone));
        for (unsigned left = stay; left != 0; left &= left - 1) t.stay[count++] = j + __builtin_ctz(left);
    }
    *t.dropped += fold8(add8(dropped[0], dropped[1]));
    return count;
}

// Halves the range between the lowest and the highest lower bound, until few more than `places` reach the middle. A NaN
// is below everything.
float limit(const LimitTask& t) {
    const F8 nothing = set8(-__builtin_inff());
    for (int j = 0; j < t.n; j += 8) store8(t.lower + j, max8(sub8(load8(t.value + j), load8(t.bound + j)), nothing));
    for (int j = t.n; j % 8 != 0; ++j) t.lower[j] = -__builtin_inff();
    // No higher than the lowest that is known: 0, or it.
    F8 highest = nothing, below_zero = set8(0.0f);
    int known = 0;
    for (int j = 0; j < t.n; j += 8) {
        const F8 x = load8(t.lower + j);
        const unsigned some = above8(x, nothing);
        highest = max8(highest, x);
        below_zero = max8(below_zero, keep8(sub8(set8(0.0f), x), some));
        known += __builtin_popcount(some);
    }
    float lanes[16], low = 0.0f, high = -__builtin_inff();
    store8(lanes, highest);
    store8(lanes + 8, below_zero);
    for (int i = 0; i < 8; ++i) {
        high = lanes[i] > high ? lanes[i] : high;
        low = -lanes[8 + i] < low ? -lanes[8 + i] : low;
    }
    if (known < t.places || !(high < __builtin_inff())) return -__builtin_inff();
    const int enough = t.places + t.places / 16;
    for (int i = 0; i < 16; ++i) {
        const float middle = low + (high - low) * 0.5f;
        if (!(middle > low && middle < high)) break;
        const F8 bar = set8(middle);
        int count = 0;
        for (int j = 0; j < t.n; j += 8) count += __builtin_popcount(not_below8(load8(t.lower + j), bar));
        (count >= t.places ? low : high) = middle;
        if (count >= t.places && count <= enough) break;
    }
    return low;
}

void prefetch_rows(const void* const* row, int count, int bytes) {
    for (int i = 0; i < count; ++i)
        for (int at = 0; at < bytes; at += 64) prefetch_l2(static_cast<const char*>(row[i]) + at);
}

template <class T>
void gather_typed(const GatherTask& t) {
    for (int half = 0; half < kPanel; half += 8) {
        const T* row[8];
        for (int i = 0; i < 8; ++i)
            row[i] = static_cast<const T*>(t.key[half + i < t.count ? half + i : t.count - 1]);
        for (int d = 0; d < t.head_dim; d += 8) transpose8(row, d, t.k_panel + d * kPanel + half);
    }
    for (int r = 0; r < t.rows; ++r)
        score_tile<1>(t.q[r], t.k_panel, t.head_dim, t.scale, nullptr, t.score + r * kScoreStride);
}

void gather(const GatherTask& t) {
    if (t.half) {
        gather_typed<uint16_t>(t);
    } else {
        gather_typed<float>(t);
    }
}

// acc = sum of weight * value over the list, or acc + that sum.
template <class T, int N>
void kept_values(const T* const* value, const float* weight, int count, int d, bool more, float* acc) {
    F8 a[N];
    UNROLL for (int c = 0; c < N; ++c) a[c] = more ? load8(acc + d + c * 8) : set8(0.0f);
    for (int j = 0; j < count; ++j) {
        const F8 w = set8(weight[j]);
        const T* v = value[j] + d;
        UNROLL for (int c = 0; c < N; ++c) a[c] = fma8(w, load8(v + c * 8), a[c]);
    }
    UNROLL for (int c = 0; c < N; ++c) store8(acc + d + c * 8, a[c]);
}

template <class T>
void all_values(const T* const* value, const float* weight, int count, int head_dim, bool more, float* acc) {
    int d = 0;
    for (; d + 64 <= head_dim; d += 64) kept_values<T, 8>(value, weight, count, d, more, acc);
    for (; d < head_dim; d += 8) kept_values<T, 1>(value, weight, count, d, more, acc);
}

inline bool is_finite(float x) { return x - x == 0.0f; }

// Of a span's records: the scores of their tails, or -inf.
inline void tail_scores(const PagedRow& t, int first, int end, const TailTask& tail, float* score) {
    // log 1 .. log 16
    constexpr float kLog[] = {0.0f,         0.69314718f, 1.09861229f, 1.38629436f, 1.60943791f, 1.79175947f,
                              1.94591015f,  2.07944154f, 2.19722458f, 2.30258509f, 2.39789527f, 2.48490665f,
                              2.56494936f,  2.63905733f, 2.70805020f, 2.77258872f};
    int left[kPanel];
    for (int i = 0; i < kPanel; ++i) left[i] = kRecordKeys;
    for (int j = first; j < end; ++j) --left[(t.position[j] & (kSpan - 1)) / kRecordKeys];
    for (int i = 0; i < kPanel; ++i) {
        score[i] = -__builtin_inff();
        if (i < tail.lo || i >= tail.hi || left[i] == 0) continue;
        // An exponent of ones.
        if ((tail.mean_value[i][0] & 0x7c00) == 0x7c00) continue;
        const float s = tail.base[i] + kLog[left[i] - 1];
        if (is_finite(s)) score[i] = s;
    }
}

// acc = sum of weight * value over the kept keys [first, first + n), in compact form.
template <class V>
void compact_values(const PagedRow& t, int first, const float* weight, int n, float* acc) {
    const ValueLayout layout = value_layout(t.head_dim, V::kBits);
    const uint8_t* code[kSpan];
    float scale[kSpan], minimum[kSpan] = {};
    for (int j = 0; j < n; ++j) {
        const int32_t p = t.position[first + j];
        const int64_t index = t.compact_blocks[p >> t.block_shift] * t.compact_stride +
                              (p & ((1 << t.block_shift) - 1)) / kRecordKeys;
        const uint8_t* record = t.compact_value + index * layout.bytes;
        const int at = p % kRecordKeys, half = at & 8;
        float eight[8];
        store8(eight, load8(reinterpret_cast<const uint16_t*>(record + layout.scale) + half));
        scale[j] = eight[at - half];
        if (V::kBits == 4) {
            store8(eight, load8(reinterpret_cast<const uint16_t*>(record + layout.minimum) + half));
            minimum[j] = eight[at - half];
        }
        code[j] = record + at * layout.code_bytes;
    }
    constexpr int N = 4;
    int d = 0;
    for (; d + 8 * N <= t.head_dim; d += 8 * N) {
        F8 a[N];
        UNROLL for (int c = 0; c < N; ++c) a[c] = set8(0.0f);
        for (int j = 0; j < n; ++j) {
            const F8 w = set8(weight[j]);
            const V v(code[j], scale[j], minimum[j]);
            UNROLL for (int c = 0; c < N; ++c) a[c] = fma8(w, v.part(d + c * 8), a[c]);
        }
        UNROLL for (int c = 0; c < N; ++c) store8(acc + d + c * 8, a[c]);
    }
    for (; d < t.head_dim; d += 8) {
        F8 a = set8(0.0f);
        for (int j = 0; j < n; ++j) a = fma8(set8(weight[j]), V(code[j], scale[j], minimum[j]).part(d), a);
        store8(acc + d, a);
    }
}

// The values of the kept keys [first, first + n), which are all in one form.
template <class T>
void span_values(const PagedRow& t, int first, const float* weight, int n, float* acc) {
    if (n > 0 && t.position[first] < t.stored) {
        if (t.value_bits == 8) return compact_values<Value8>(t, first, weight, n, acc);
        return compact_values<Value4>(t, first, weight, n, acc);
    }
    const T* value[kSpan];
    for (int j = 0; j < n; ++j) {
        const int32_t p = t.position[first + j];
        value[j] = static_cast<const T*>(t.value) + t.blocks[p >> t.block_shift] * t.block_stride +
                   int64_t(p & ((1 << t.block_shift) - 1)) * t.head_dim;
    }
    all_values(value, weight, n, t.head_dim, false, acc);
}

// The partial of the kept keys [first, end) of one span, in one form, and `rest`, the scores of the span's tails, or
// nullptr where there is no tail.
template <class T>
void span_partial(const PagedRow& t, int first, int end, float* rest, const TailTask& tail, float* m_out, float* l_out,
                  float* acc) {
    float weight[kSpan + 8];
    const int n = end - first;
    float m = -__builtin_inff();
    for (int j = 0; j < n; ++j) {
        weight[j] = t.score[first + j];
        m = m > weight[j] ? m : weight[j];
    }
    for (int i = 0; rest != nullptr && i < kPanel; ++i) m = m > rest[i] ? m : rest[i];
    for (int j = n; j < n + 8; ++j) weight[j] = -__builtin_inff();
    const F8 top = set8(m == -__builtin_inff() ? 0.0f : m);
    for (int j = 0; j < n; j += 8) store8(weight + j, exp8(sub8(load8(weight + j), top)));
    float lane[kPanel] = {};
    for (int j = 0; j < n; ++j) lane[t.position[first + j] & (kPanel - 1)] += weight[j];
    span_values<T>(t, first, weight, n, acc);
    *m_out = m;
    if (rest != nullptr) {
        const uint16_t* mean[kPanel];
        float mean_weight[kPanel];
        int means = 0;
        for (int i = 0; i < kPanel; i += 8) store8(rest + i, exp8(sub8(load8(rest + i), top)));
        for (int i = 0; i < kPanel; ++i) {
            lane[i] += rest[i];
            if (rest[i] == 0.0f) continue;
            mean[means] = tail.mean_value[i];
            mean_weight[means++] = rest[i];
        }
        all_values(mean, mean_weight, means, t.head_dim, true, acc);
    }
    *l_out = fold8(add8(load8(lane), load8(lane + 8)));
}

template <class T>
void attend_span_typed(PagedRow& t, int first, int end, const TailTask& tail) {
    float rest[kPanel], m, l;
    const bool some = tail.lo < tail.hi;
    if (some) tail_scores(t, first, end, tail, rest);
    int middle = first;
    while (middle < end && t.position[middle] < t.stored) ++middle;
    const bool both = first < middle && middle < end;
    span_partial<T>(t, first, both ? middle : end, some && !both ? rest : nullptr, tail, &m, &l, t.partial);
    if (both) {
        float stored_m, stored_l, *acc = t.partial + t.head_dim;
        span_partial<T>(t, middle, end, some ? rest : nullptr, tail, &stored_m, &stored_l, acc);
        merge(1, t.head_dim, &stored_m, &stored_l, acc, &m, &l, t.partial);
    }
    merge(1, t.head_dim, &m, &l, t.partial, &t.m, &t.l, t.acc);
}

void expand_key(const uint8_t* record, int at, int head_dim, float* key) {
    const RecordLayout layout = record_layout(head_dim);
    const int8_t* code = reinterpret_cast<const int8_t*>(record) + 2 * at;
    const uint16_t* mean = reinterpret_cast<const uint16_t*>(record + layout.mean);
    float scales[kRecordKeys];
    for (int h = 0; h < kRecordKeys; h += 8)
        store8(scales + h, load8(reinterpret_cast<const uint16_t*>(record + layout.scale) + h));
    const F8 scale = set8(scales[at]);
    for (int d = 0; d < head_dim; d += 8) {
        float eight[8];
        for (int i = 0; i < 8; i += 2, code += 2 * kRecordKeys) {
            eight[i] = code[0];
            eight[i + 1] = code[1];
        }
        store8(key + d, fma8(load8(eight), scale, load8(mean + d)));
    }
}

void clear(PagedRow& t) {
    t.m = -__builtin_inff();
    t.l = 0.0f;
    for (int d = 0; d < t.head_dim; d += 8) store8(t.acc + d, set8(0.0f));
}

void attend_span(PagedRow& t, int first, int end, const TailTask& tail) {
    if (t.half) {
        attend_span_typed<uint16_t>(t, first, end, tail);
    } else {
        attend_span_typed<float>(t, first, end, tail);
    }
}

void attend_kept(PagedRow& t) {
    clear(t);
    for (int first = 0, end; first < t.count; first = end) {
        const int span = t.position[first] / kSpan;
        for (end = first; end < t.count && t.position[end] / kSpan == span; ++end) {}
        attend_span(t, first, end, {0, 0, nullptr, nullptr});
    }
}

void mass(const float* scores, int n, float* m, float* l) {
    float top = *m;
    for (int j = 0; j < n; ++j) top = top > scores[j] ? top : scores[j];
    // No finite score yet, or one beyond all: exp(inf - inf) would be NaN.
    if (top == -__builtin_inff()) return;
    if (*l != 0.0f) *l *= exp1(*m - top);
    *m = top;
    F8 sum = set8(0.0f);
    int j = 0;
    for (; j + 8 <= n; j += 8) sum = add8(sum, exp8(sub8(load8(scores + j), set8(top))));
    *l += fold8(sum);
    for (; j < n; ++j) *l += exp1(scores[j] - top);
}

// Products of weights and codes in 16 lanes, folded in a fixed tree.
template <int R>
void rank_rows(const RankTask& t, int row) {
    const int n = 2 * t.head_dim;
    for (int i = 0; i < t.num_records; ++i) {
        const auto* code = reinterpret_cast<const int8_t*>(t.bounds[i]);
        if (row == 0 && t.ask[i] != nullptr)
            for (int d = 0; d < n; d += 64) prefetch_l2(t.ask[i] + d);
        F8 even[R], odd[R];
        UNROLL for (int r = 0; r < R; ++r) even[r] = odd[r] = set8(0.0f);
        for (int d = 0; d < n; d += 16) {
            const F8 a = load8(code + d), b = load8(code + d + 8);
            UNROLL for (int r = 0; r < R; ++r) {
                const float* w = t.weight + (row + r) * n + d;
                even[r] = add8(even[r], mul8(load8(w), a));
                odd[r] = add8(odd[r], mul8(load8(w + 8), b));
            }
        }
        float step;
        __builtin_memcpy(&step, code + n, sizeof step);
        UNROLL for (int r = 0; r < R; ++r) t.value[(row + r) * t.value_stride + i] = fold8(add8(even[r], odd[r])) * step;
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
