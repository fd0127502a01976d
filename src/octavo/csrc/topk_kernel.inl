// Top-k attention's kernels; included after span_kernel.inl, whose scores and softmax they use.

template <class Form>
void score_form(const SpanTask& t) {
    int lo = kSpan, hi = 0;
    for (int r = 0; r < t.rows; ++r) {
        if (t.lo[r] >= t.hi[r]) continue;
        lo = t.lo[r] < lo ? t.lo[r] : lo;
        hi = t.hi[r] > hi ? t.hi[r] : hi;
    }
    for (int panel = lo & ~(kPanel - 1); panel < hi; panel += kPanel) {
        Form::pack(t, panel, lo, hi);
        const float* q = t.q_packed;
        for (int i = 0, row = 0; i < t.num_micro; row += t.micro[i++]) {
            score_rows(t.micro[i], q, t.k_panel, t.head_dim, t.scale, nullptr, t.scores + row * kScoreStride + panel);
            q += t.micro[i] * t.head_dim;
        }
    }
}

void score(const SpanTask& t) {
    if (t.value_bits == 8) {
        score_form<Compact<Value8>>(t);
    } else if (t.value_bits == 4) {
        score_form<Compact<Value4>>(t);
    } else if (t.half) {
        score_form<Stored<uint16_t>>(t);
    } else {
        score_form<Stored<float>>(t);
    }
}

// Integers in the order of the scores: both zeros equal, every NaN above infinity.
inline int32_t order_of(float score) {
    const float x = score + 0.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    // A comparison of integers, so that loops over it become vector code.
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    bits ^= (bits >> 31) & 0x7fffffff;
    return nan ? 0x7fffffff : bits;
}

inline float score_of(int32_t order) {
    const int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
    float score;
    __builtin_memcpy(&score, &bits, 4);
    return score;
}

inline int count_from(const int32_t* order, int n, int32_t least) {
    int count = 0;
    for (int i = 0; i < n; ++i) count += order[i] >= least;
    return count;
}

// Halves the range of integers until the places-th highest is found, or until a value separates
// exactly `places` entries from the rest.
void settle(TopkRow& row, int32_t* order) {
    const int n = row.count, places = row.places;
    if (n <= places) return;
    int32_t low = 0x7fffffff, high = -0x7fffffff - 1;
    for (int i = 0; i < n; ++i) order[i] = order_of(row.score[i]);
    for (int i = 0; i < n; ++i) {
        low = order[i] < low ? order[i] : low;
        high = order[i] > high ? order[i] : high;
    }
    // At least `places` entries are >= least, fewer are >= above.
    int64_t least = low, above = int64_t(high) + 1;
    int at_least = n;
    while (at_least != places && above - least > 1) {
        const int64_t middle = least + (above - least) / 2;
        const int count = count_from(order, n, int32_t(middle));
        if (count >= places) {
            least = middle;
            at_least = count;
        } else {
            above = middle;
        }
    }
    // Too many are left only if they are equal to `least`: the first ones stay.
    const int32_t bound = int32_t(least);
    const int higher = bound < 0x7fffffff ? count_from(order, n, bound + 1) : 0;
    int stay = at_least > places ? places - higher : n, kept = 0;
    int32_t lowest = 0x7fffffff;
    for (int i = 0; i < n; ++i) {
        const int32_t stays = order[i] >= bound ? order[i] : 0x7fffffff;
        lowest = stays < lowest ? stays : lowest;
    }
    // Without branches: which entries win is as good as random.
    for (int i = 0; i < n; ++i) {
        const float score = row.score[i];
        const int32_t position = row.position[i];
        const int equal = order[i] == bound;
        row.score[kept] = score;
        row.position[kept] = position;
        kept += (order[i] > bound) | (equal & (stay > 0));
        stay -= equal;
    }
    row.count = kept;
    row.limited = true;
    row.limit = score_of(lowest);
}

void offer(TopkRow& row, const float* scores, int32_t first, int n, int32_t* order) {
    if (row.places == 0 || n <= 0) return;
    if (row.count > 2 * row.places + kTopkSlack) settle(row, order);
    float* score = row.score;
    int32_t* position = row.position;
    int count = row.count;
    if (!row.limited) {
        for (int i = 0; i < n; ++i) score[count + i] = scores[i];
        for (int i = 0; i < n; ++i) position[count + i] = first + i;
        row.count = count + n;
        return;
    }
    // A later key of the same score as the limit has lost to the earlier ones.
    const F8 limit = set8(row.limit);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        for (unsigned left = above8(load8(scores + i), limit); left != 0; left &= left - 1) {
            const int j = i + __builtin_ctz(left);
            score[count] = scores[j];
            position[count++] = first + j;
        }
    }
    for (; i < n; ++i) {
        score[count] = scores[i];
        position[count] = first + i;
        count += !(scores[i] <= row.limit);
    }
    row.count = count;
}

// acc[d] is one chain over the keys in order of position, as in the span kernel.
template <int N>
void gather_values(const KeptRow& t, int d) {
    F8 acc[N];
    UNROLL for (int c = 0; c < N; ++c) acc[c] = set8(0.0f);
    for (int j = 0; j < t.count; ++j) {
        const F8 p = set8(t.score[j]);
        const float* v = t.value + t.index[j] * t.value_stride + d;
        UNROLL for (int c = 0; c < N; ++c) acc[c] = fma8(p, load8(v + c * 8), acc[c]);
    }
    UNROLL for (int c = 0; c < N; ++c) store8(t.out + d + c * 8, acc[c]);
}

inline float euclidean(const float* x, int n) {
    float sum = 0.0f;
    for (int j = 0; j < n; ++j) sum += x[j] * x[j];
    return __builtin_sqrtf(sum);
}

void attend(const KeptRow& t) {
    if (t.count == 0) {
        for (int d = 0; d < t.head_dim; d += 8) store8(t.out + d, set8(0.0f));
        if (t.lse != nullptr) *t.lse = -__builtin_inff();
        return;
    }
    float m, l;
    softmax_row(t.score, 0, t.count, &m, &l);
    int d = 0;
    for (; d + 64 <= t.head_dim; d += 64) gather_values<8>(t, d);
    for (; d + 32 <= t.head_dim; d += 32) gather_values<4>(t, d);
    for (; d < t.head_dim; d += 8) gather_values<1>(t, d);
    const float divisor = t.l2 ? euclidean(t.score, t.count) : l;
    divide(t.out, divisor, t.head_dim, t.out);
    if (t.lse != nullptr) *t.lse = float(double(m) + __builtin_log(double(l)));
    if (t.weight != nullptr)
        for (int j = 0; j < t.count; ++j) t.weight[j] = t.score[j] / l;
}

void add(int n, float a, const float* x, float* y) {
    const F8 factor = set8(a);
    for (int d = 0; d < n; d += 8) store8(y + d, fma8(factor, load8(x + d), load8(y + d)));
}

inline float dot(int n, const float* x, const float* y) {
    F8 sum = set8(0.0f);
    for (int d = 0; d < n; d += 8) sum = fma8(load8(x + d), load8(y + d), sum);
    return fold8(sum);
}

// With the softmax weights p: dL/ds_j = p_j (dL/dp_j - sum_i p_i dL/dp_i), and under l2, where
// w = p / |p|, dL/dp_j = (dL/dw_j - w_j sum_i w_i dL/dw_i) / |p|.
void grad(const KeptGrad& t) {
    for (int d = 0; d < t.head_dim; d += 8) store8(t.query_grad + d, set8(0.0f));
    *t.norm = t.l2 ? euclidean(t.weight, t.count) : 1.0f;
    float* g = t.score_grad;
    for (int j = 0; j < t.count; ++j)
        g[j] = dot(t.head_dim, t.out_grad, t.value + t.index[j] * t.value_stride);
    if (t.l2) {
        float along = 0.0f;
        for (int j = 0; j < t.count; ++j) along += t.weight[j] / *t.norm * g[j];
        for (int j = 0; j < t.count; ++j) g[j] = (g[j] - t.weight[j] / *t.norm * along) / *t.norm;
    }
    float mean = 0.0f;
    for (int j = 0; j < t.count; ++j) mean += t.weight[j] * g[j];
    for (int j = 0; j < t.count; ++j) {
        const float s = t.weight[j] * (g[j] - mean);
        g[j] = __builtin_fabsf(s) < t.threshold ? 0.0f : s * t.scale;
        if (g[j] != 0.0f) add(t.head_dim, g[j], t.key + t.index[j] * t.key_stride, t.query_grad);
    }
}
