#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

// Wider vectors where the machine has them. Only element-wise work is done in them: no result differs.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define OCTAVO_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define OCTAVO_WIDE
#endif

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Values of which one maximum is kept: finds the places of the largest values without sorting.
constexpr int64_t kBlock = 64;
constexpr int kLanes = 8;
// Bins of float32 from 0 to 1 by sign, exponent and the highest 5 bits of the fraction.
constexpr int kBinShift = 18;
constexpr int64_t kNumBins = (int64_t(0x3f800000) >> kBinShift) + 1;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

int64_t num_blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

// The maximum of every block; whether there is a NaN, which a maximum does not show.
OCTAVO_WIDE bool block_maxima(const float* x, int64_t n, float* maxima) {
    Ints nan = {};
    bool nan_in_rest = false;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, n);
        Floats most = Floats{} - kInfinity;
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) {
            Floats v;
            std::memcpy(&v, x + i, sizeof v);
            nan |= v != v;
            most = v > most ? v : most;
        }
        float top = -kInfinity;
        for (int j = 0; j < kLanes; ++j) top = most[j] > top ? most[j] : top;
        for (; i < end; ++i) {
            nan_in_rest |= x[i] != x[i];
            top = x[i] > top ? x[i] : top;
        }
        maxima[begin / kBlock] = top;
    }
    int any = nan_in_rest;
    for (int j = 0; j < kLanes; ++j) any |= nan[j];
    return any != 0;
}

OCTAVO_WIDE void soften(const float* x, int64_t n, float top, float temperature, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - top) / temperature;
}

OCTAVO_WIDE int64_t count_larger(const float* x, int64_t n, float value) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += 1 << 20) {
        const int64_t end = std::min(begin + (1 << 20), n);
        int32_t part = 0;
        for (int64_t i = begin; i < end; ++i) part += x[i] > value;
        count += part;
    }
    return count;
}

// In one fixed order: eight sums of every eighth value, then those.
OCTAVO_WIDE double sum(const float* x, int64_t n) {
    double part[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; ++j) part[j] += double(x[i + j]);
    for (; i < n; ++i) part[i % 8] += double(x[i]);
    return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

float largest(const float* maxima, int64_t n) { return *std::max_element(maxima, maxima + num_blocks(n)); }

int64_t find(const float* x, int64_t n, const float* maxima, float value) {
    const int64_t block = std::find(maxima, maxima + num_blocks(n), value) - maxima;
    return std::find(x + block * kBlock, x + n, value) - x;
}

// The finalizer of MurmurHash3 (A. Appleby, public domain) with each word of the key.
inline uint32_t mix(uint32_t h, uint32_t word) {
    h ^= word;
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// In (0, 1]: what is next to 1 rounds to it.
inline float hashed(const uint32_t key[2], uint32_t id) {
    const uint32_t h = mix(mix(id * 0x9E3779B1u, key[0]), key[1]);
    // Vectors convert signed integers only. Both halves are exact, and their sum rounds once.
    return (float(int32_t(h >> 16)) * 65536.0f + float(int32_t(h & 0xffff)) + 0.5f) * 0x1p-32f;
}

// A uniform number in (0, 1).
inline float uniform(const uint32_t key[2], uint32_t id) { return std::min(hashed(key, id), 1.0f - 0x1p-24f); }

// A small u, which decides whether an improbable token wins, keeps its precision in log1p.
float noise(float u) { return float(-std::log(-std::log1p(-double(u)))); }

// Upper bounds of y + noise: -log1p(-u) >= u, and log2(2^e (1 + f)) >= e + f, which is what the bits of a
// float say; the last number is more than all that is rounded here.
OCTAVO_WIDE void bound(const float* y, const int32_t* ids, int64_t n, const uint32_t* key, float* out) {
    const uint32_t words[2] = {key[0], key[1]};
    for (int64_t i = 0; i < n; ++i) {
        const float u = hashed(words, uint32_t(ids[i]));
        int32_t bits;
        std::memcpy(&bits, &u, sizeof bits);
        out[i] = y[i] + (float((127 << 23) - bits) * 0x1.62e43p-24f + 1e-4f);
    }
}

OCTAVO_WIDE bool any_at_least(const float* x, int64_t n, float value) {
    int32_t any = 0;
    for (int64_t i = 0; i < n; ++i) any |= x[i] >= value;
    return any != 0;
}

struct Scratch {
    explicit Scratch(int64_t width)
        : y(new float[width]), weights(new float[width]), sorted(new float[width]),
          maxima(new float[num_blocks(width)]), maxima_copy(new float[num_blocks(width)]), bins(new double[kNumBins]),
          ids(new int32_t[width]) {}
    std::unique_ptr<float[]> y, weights, sorted, maxima, maxima_copy;
    std::unique_ptr<double[]> bins;
    std::unique_ptr<int32_t[]> ids;
};

std::vector<std::unique_ptr<Scratch>> scratches(int64_t width, const ThreadPool& pool) {
    std::vector<std::unique_ptr<Scratch>> all;
    for (int i = 0; i < pool.num_threads(); ++i) all.push_back(std::make_unique<Scratch>(width));
    return all;
}

// Puts into s.ids, rising, all ids whose value is at least the k-th largest, 0 < k <= n; returns how many.
// Needs s.maxima of x. As many blocks as k hold a value of at least their k-th largest maximum, so the
// k-th largest value is no smaller than that.
int64_t keep_largest(const float* x, int64_t n, int64_t k, Scratch& s) {
    const int64_t blocks = num_blocks(n);
    float floor = -kInfinity;
    if (k <= blocks) {
        float* copy = s.maxima_copy.get();
        std::copy_n(s.maxima.get(), blocks, copy);
        std::nth_element(copy, copy + (k - 1), copy + blocks, std::greater<float>());
        floor = copy[k - 1];
    }
    int64_t count = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (s.maxima[block] < floor) continue;
        const int64_t end = std::min((block + 1) * kBlock, n);
        for (int64_t i = block * kBlock; i < end; ++i) {
            s.ids[count] = int32_t(i);
            count += x[i] >= floor;
        }
    }
    float* values = s.sorted.get();
    for (int64_t i = 0; i < count; ++i) values[i] = x[s.ids[i]];
    std::nth_element(values, values + (k - 1), values + count, std::greater<float>());
    const float threshold = values[k - 1];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t id = s.ids[i];
        s.ids[kept] = id;
        kept += x[id] >= threshold;
    }
    return kept;
}

// The weight at which the falling weights' sum in float64 reaches top_p of all. The weights' highest bits
// are bins; the one in which it happens is halved by value, always towards where it happens.
float last_weight(const float* weights, int64_t n, double top_p, float* sorted, double* bins) {
    const double goal = top_p * sum(weights, n);
    const auto bin = [](float weight) {
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return bits >> kBinShift;
    };
    std::fill_n(bins, kNumBins, 0.0);
    for (int64_t i = 0; i < n; ++i) bins[bin(weights[i])] += double(weights[i]);
    double reached = 0.0;
    int64_t place = kNumBins - 1, last = place;  // last: the lowest that weighs anything
    for (; place >= 0; --place) {
        if (bins[place] == 0.0) continue;
        last = place;
        if (reached + bins[place] >= goal) break;
        reached += bins[place];
    }
    // Rounding may leave the sum of all short of a goal that is nearly all: the last token is reached then.
    const bool all = place < 0;

    int64_t end = 0;
    for (int64_t i = 0; i < n; ++i) {
        sorted[end] = weights[i];
        end += bin(weights[i]) == uint32_t(last);
    }
    if (all) return *std::min_element(sorted, sorted + end);
    int64_t begin = 0;
    while (end - begin > kBlock) {
        const int64_t middle = begin + (end - begin) / 2;
        std::nth_element(sorted + begin, sorted + middle, sorted + end, std::greater<float>());
        const double upper = sum(sorted + begin, middle - begin);
        if (reached + upper >= goal) {
            end = middle;
        } else {
            reached += upper;
            begin = middle;
        }
    }
    std::sort(sorted + begin, sorted + end, std::greater<float>());
    for (int64_t i = begin; i < end; ++i) {
        reached += double(sorted[i]);
        if (reached >= goal) return sorted[i];
    }
    return sorted[end - 1];
}

int64_t draw_row(const float* x, int64_t n, const DrawParams& p, Scratch& s, const Isa& isa) {
    float* y = s.y.get();
    const bool nan = block_maxima(x, n, s.maxima.get());
    const float top = largest(s.maxima.get(), n);
    if (nan || !std::isfinite(top)) return -1;
    const int64_t top_id = find(x, n, s.maxima.get(), top);
    soften(x, n, top, p.temperature, y);

    int64_t count = n;
    if (0 < p.top_k && p.top_k < n) {
        block_maxima(y, n, s.maxima.get());
        count = keep_largest(y, n, p.top_k, s);
        for (int64_t i = 0; i < count; ++i) y[i] = y[s.ids[i]];
    } else {
        for (int64_t i = 0; i < n; ++i) s.ids[i] = int32_t(i);
    }
    if (p.top_p < 1.0 || p.min_p > 0.0f) {
        float* weights = s.weights.get();
        isa.exp(y, count, weights);
        float least = p.min_p;
        if (p.top_p < 1.0) {
            least = std::max(least, last_weight(weights, count, p.top_p, s.sorted.get(), s.bins.get()));
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float value = y[i];
            const int32_t id = s.ids[i];
            y[kept] = value;
            s.ids[kept] = id;
            kept += weights[i] >= least;
        }
        count = kept;
    }

    // The best token of all is always kept, so it is what the others have to reach.
    int64_t winner = top_id;
    float most = noise(uniform(p.key, uint32_t(top_id)));
    float bounds[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        const int64_t size = std::min(kBlock, count - begin);
        bound(y + begin, s.ids.get() + begin, size, p.key, bounds);
        if (!any_at_least(bounds, size, most)) continue;
        for (int64_t i = 0; i < size; ++i) {
            if (bounds[i] < most) continue;
            const int64_t id = s.ids[begin + i];
            const float value = y[begin + i] + noise(uniform(p.key, uint32_t(id)));
            if (value > most || (value == most && id < winner)) {
                most = value;
                winner = id;
            }
        }
    }
    return winner;
}

void score_row(const float* x, int64_t n, const ScoreArgs& args, int64_t row, Scratch& s, const Isa& isa) {
    const bool nan = block_maxima(x, n, s.maxima.get());
    const float top = largest(s.maxima.get(), n);
    int64_t* ids = args.ids + row * (args.max_best + 1);
    int64_t* ranks = args.ranks + row * (args.max_best + 1);
    double* logprobs = args.logprobs + row * (args.max_best + 1);
    const int64_t num_best = args.num_best[row];
    if (nan || !std::isfinite(top)) {
        std::fill_n(ids, num_best + 1, args.targets[row]);
        std::fill_n(ranks, num_best + 1, 1);
        std::fill_n(logprobs, num_best + 1, std::numeric_limits<double>::quiet_NaN());
        return;
    }
    soften(x, n, top, 1.0f, s.y.get());
    isa.exp(s.y.get(), n, s.weights.get());
    const double log_sum = std::log(sum(s.weights.get(), n));
    if (num_best > 0) {
        const int64_t count = keep_largest(x, n, num_best, s);
        std::partial_sort(s.ids.get(), s.ids.get() + num_best, s.ids.get() + count,
                          [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        for (int64_t i = 0; i < num_best; ++i) {
            ids[i] = s.ids[i];
            ranks[i] = i > 0 && x[ids[i]] == x[ids[i - 1]] ? ranks[i - 1] : i + 1;
        }
    }
    ids[num_best] = args.targets[row];
    ranks[num_best] = 1 + count_larger(x, n, x[args.targets[row]]);
    for (int64_t i = 0; i <= num_best; ++i) logprobs[i] = double(x[ids[i]]) - double(top) - log_sum;
}

}  // namespace

void best(const Rows& logits, float* value, int64_t* id, ThreadPool& pool) {
    const auto scratch = scratches(logits.width, pool);
    pool.run(int64_t(logits.rows.size()), [&](int thread, int64_t row) {
        const float* x = logits.rows[row];
        float* maxima = scratch[thread]->maxima.get();
        const bool nan = block_maxima(x, logits.width, maxima);
        value[row] = nan ? std::numeric_limits<float>::quiet_NaN() : largest(maxima, logits.width);
        id[row] = nan ? 0 : find(x, logits.width, maxima, value[row]);
    });
}

void draw(const Rows& logits, const std::vector<const DrawParams*>& params, int64_t* id, ThreadPool& pool,
          const Isa& isa) {
    const auto scratch = scratches(logits.width, pool);
    pool.run(int64_t(logits.rows.size()), [&](int thread, int64_t row) {
        id[row] = draw_row(logits.rows[row], logits.width, *params[row], *scratch[thread], isa);
    });
}

void gumbel(const uint32_t key[2], const int64_t* ids, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = noise(uniform(key, uint32_t(ids[i])));
}

void score(const Rows& logits, const ScoreArgs& args, ThreadPool& pool, const Isa& isa) {
    const auto scratch = scratches(logits.width, pool);
    pool.run(int64_t(logits.rows.size()), [&](int thread, int64_t row) {
        score_row(logits.rows[row], logits.width, args, row, *scratch[thread], isa);
    });
}

}  // namespace octavo
