// Keys and values of compact records (compact_rows.h) for the skeleton of span_kernel.inl, which includes this.
//
// They are expanded to fp32 and then take the same chains as keys and values that are stored: so scores, weights and
// sums are those of a row over such keys, however many rows share the expansion.

// The value of one key, expanded eight numbers at a time.
struct Value8 {
    static constexpr int kBits = 8;
    const uint8_t* code;
    F8 scale;

    Value8(const uint8_t* codes, float factor, float) : code(codes), scale(set8(factor)) {}
    F8 part(int d) const { return mul8(load8(reinterpret_cast<const int8_t*>(code) + d), scale); }
};

struct Value4 {
    static constexpr int kBits = 4;
    const uint8_t* code;
    F8 scale, minimum;

    Value4(const uint8_t* codes, float factor, float least) : code(codes), scale(set8(factor)), minimum(set8(least)) {}
    F8 part(int d) const { return fma8(load_nibbles8(code + d / 2), scale, minimum); }
};

// From dimension `first` on.
template <class V>
struct ValueFrom {
    const V& value;
    int first;
};
template <class V>
F8 part8(const ValueFrom<V>& v, int d) {
    return v.value.part(v.first + d);
}

// A record of values with its scales in fp32.
template <class V>
struct ValueRecord {
    const uint8_t* record;
    const ValueLayout& layout;
    float scale[kRecordKeys], minimum[kRecordKeys] = {};

    ValueRecord(const uint8_t* at, const ValueLayout& of) : record(at), layout(of) {
        for (int h = 0; h < kRecordKeys; h += 8) {
            store8(scale + h, load8(reinterpret_cast<const uint16_t*>(at + of.scale) + h));
            if (V::kBits == 4) store8(minimum + h, load8(reinterpret_cast<const uint16_t*>(at + of.minimum) + h));
        }
    }
    V at(int j) const { return V(record + j * layout.code_bytes, scale[j], minimum[j]); }
};

inline const uint8_t* record_at(const SpanTask& t, const void* base, int j, int bytes) {
    const int64_t record = t.blocks[j >> t.block_shift] * t.block_stride + (j & ((1 << t.block_shift) - 1)) / kRecordKeys;
    return static_cast<const uint8_t*>(base) + record * bytes;
}

// Part i of n of a record's lines.
inline void prefetch_part(const uint8_t* record, int bytes, int i, int n) {
    const int lines = bytes / 64 + 1;
    for (int line = i * lines / n; line < (i + 1) * lines / n; ++line) prefetch_l2(record + 64 * line);
}

template <class V>
struct Compact {
    static void touch_values(const SpanTask&, int, int) {}

    // The record at `panel`, whose keys are all known, as [D][16 keys].
    static void pack(const SpanTask& t, int panel, int, int hi) {
        each_dim(t, panel, hi, [&](int d, F8 k0, F8 k1) {
            store8(t.k_panel + d * kPanel, k0);
            store8(t.k_panel + d * kPanel + 8, k1);
        });
    }

    // With few rows, as in decode, the keys go from their codes to the scores: the chains of score_tile, in registers.
    static bool score(const SpanTask& t, int panel, int hi) {
        switch (t.rows) {
            case 1: return score_record<1>(t, panel, hi);
            case 2: return score_record<2>(t, panel, hi);
            case 3: return score_record<3>(t, panel, hi);
            case 4: return score_record<4>(t, panel, hi);
            default: return false;
        }
    }

    static void values(const SpanTask& t, int lo, int hi) {
        bool same = t.num_micro == 1;
        for (int r = 0; r < t.rows; ++r) same = same && t.lo[r] == lo && t.hi[r] == hi;
        if (!same) return by_copy(t, lo, hi);
        switch (t.rows) {
            case 1: return stream_columns<1, 8>(t, lo, hi);
            case 2: return stream_columns<2, 4>(t, lo, hi);
            case 3: return stream_columns<3, 4>(t, lo, hi);
            case 4: return stream_columns<4, 2>(t, lo, hi);
            case 5: return stream_columns<5, 2>(t, lo, hi);
            default: return stream_columns<6, 2>(t, lo, hi);
        }
    }

private:
    // Calls f(d, keys 0 .. 7, keys 8 .. 15) for each dimension of the record at `panel` in order; its values, and the
    // next record where nobody has, are asked for on the way.
    template <class F>
    static void each_dim(const SpanTask& t, int panel, int hi, const F& f) {
        const RecordLayout layout = record_layout(t.head_dim);
        const int value_bytes = value_layout(t.head_dim, V::kBits).bytes;
        const uint8_t* key = record_at(t, t.key, panel, layout.bytes);
        const uint8_t* value = record_at(t, t.value, panel, value_bytes);
        const uint8_t* next = t.cold && panel + kPanel < hi ? record_at(t, t.key, panel + kPanel, layout.bytes) : nullptr;
        const int8_t* code = reinterpret_cast<const int8_t*>(key);
        const uint16_t* mean = reinterpret_cast<const uint16_t*>(key + layout.mean);
        const uint16_t* scale = reinterpret_cast<const uint16_t*>(key + layout.scale);
        const F8 s0 = load8(scale), s1 = load8(scale + 8);
        for (int d = 0; d < t.head_dim; d += 8) {
            prefetch_part(value, value_bytes, d / 8, t.head_dim / 8);
            if (next != nullptr) prefetch_part(next, layout.bytes, d / 8, t.head_dim / 8);
            float m[8];
            store8(m, load8(mean + d));
            UNROLL for (int i = 0; i < 8; i += 2, code += 2 * kRecordKeys) {
                F8 even0, odd0, even1, odd1;
                load_pairs8(code, &even0, &odd0);
                load_pairs8(code + kRecordKeys, &even1, &odd1);
                f(d + i, fma8(even0, s0, set8(m[i])), fma8(even1, s1, set8(m[i])));
                f(d + i + 1, fma8(odd0, s0, set8(m[i + 1])), fma8(odd1, s1, set8(m[i + 1])));
            }
        }
    }

    template <int R>
    static bool score_record(const SpanTask& t, int panel, int hi) {
        F8 s[R][2];
        UNROLL for (int r = 0; r < R; ++r) s[r][0] = s[r][1] = set8(0.0f);
        each_dim(t, panel, hi, [&](int d, F8 k0, F8 k1) __attribute__((always_inline)) {
            UNROLL for (int r = 0; r < R; ++r) {
                const F8 b = set8(t.q_packed[d * R + r]);
                s[r][0] = fma8(b, k0, s[r][0]);
                s[r][1] = fma8(b, k1, s[r][1]);
            }
        });
        const float* bias = t.bias == nullptr ? nullptr : t.bias + panel;
        UNROLL for (int r = 0; r < R; ++r)
            store_scores(s[r][0], s[r][1], t.scale, bias, t.scores + r * kScoreStride + panel);
        return true;
    }

    // Calls f(key, value of the key) in order of position; K of the next span is asked for on the way.
    template <class F>
    static void each_value(const SpanTask& t, int lo, int hi, const F& f) {
        const ValueLayout layout = value_layout(t.head_dim, V::kBits);
        const int key_bytes = record_layout(t.head_dim).bytes;
        for (int first = lo & ~(kRecordKeys - 1); first < hi; first += kRecordKeys) {
            const ValueRecord<V> record(record_at(t, t.value, first, layout.bytes), layout);
            const uint8_t* ahead = first < t.next_keys ? record_at(t, t.key, kSpan + first, key_bytes) : nullptr;
            for (int j = first > lo ? first : lo; j < first + kRecordKeys && j < hi; ++j) {
                if (ahead != nullptr) prefetch_part(ahead, key_bytes, j - first, kRecordKeys);
                f(j, record.at(j - first));
            }
        }
    }

    // Many rows, or rows that see different keys: V is expanded once for all.
    static void by_copy(const SpanTask& t, int lo, int hi) {
        for (int begin = lo; begin < hi; begin += kValueKeys) {
            const int end = begin + kValueKeys < hi ? begin + kValueKeys : hi;
            each_value(t, begin, end, [&](int j, const V& v) {
                float* out = t.v_block + int64_t(j - begin) * t.head_dim;
                for (int d = 0; d < t.head_dim; d += 8) store8(out + d, v.part(d));
            });
            value_run(t, t.v_block, begin, end);
        }
    }

    template <int R, int N>
    static void stream(const SpanTask& t, int lo, int hi, int d) {
        ValueTile<R, N> tile;
        tile.load(t.acc + d, t.head_dim);
        each_value(t, lo, hi, [&](int j, const V& v) { tile.add(t.scores + j, ValueFrom<V>{v, d}); });
        tile.store(t.acc + d, t.head_dim);
    }

    template <int R, int N>
    static void stream_columns(const SpanTask& t, int lo, int hi) {
        int d = 0;
        for (; d + 8 * N <= t.head_dim; d += 8 * N) stream<R, N>(t, lo, hi, d);
        for (; d < t.head_dim; d += 8) stream<R, 1>(t, lo, hi, d);
    }
};
