// Top-k attention for modules: whole tensors, forward and backward. Who computes what is decided
// here and cannot change a result: a row's forward and query gradient are one piece of work, and so
// are the gradients of a key, which every row reaches in the same order.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "pool.h"
#include "topk.h"

namespace octavo {
namespace {

// Floats of row state that a thread's tile of rows may take (1 MiB: the second-level cache).
constexpr int64_t kTileFloats = int64_t(1) << 18;
constexpr int64_t kGradRows = 64;
constexpr int64_t kMinKeyRange = 64;

const TopkIsa& kernels(bool portable) {
    return !portable && avx2_topk() != nullptr && cpu_has_avx2() ? *avx2_topk() : portable_topk();
}

// The keys of a batch element that are not padding, in order of position.
struct VisibleKeys {
    std::vector<int32_t> position;
    std::vector<int32_t> before;  // [num_keys + 1] keys among the first so many positions

    VisibleKeys(const uint8_t* padding, int64_t num_keys) : before(size_t(num_keys) + 1) {
        position.reserve(size_t(num_keys));
        for (int64_t j = 0; j < num_keys; ++j) {
            if (padding == nullptr || padding[j] == 0) position.push_back(int32_t(j));
            before[size_t(j) + 1] = int32_t(position.size());
        }
    }
};

int64_t up16(int64_t n) { return (n + 15) & ~int64_t(15); }

// A thread's memory for one tile of rows.
struct Scratch {
    Scratch(const TopkShape& shape, int tile_rows)
        : capacity(topk_capacity(shape.topk - shape.recent, shape.recent)),
          rows(size_t(tile_rows)),
          seen(size_t(tile_rows)),
          lo(size_t(tile_rows)),
          hi(size_t(tile_rows)),
          positions(size_t(tile_rows * capacity)),
          order(size_t(capacity)) {
        const int64_t d = shape.head_dim;
        const int64_t packed = up16(tile_rows * d), tile = up16(int64_t(tile_rows) * kScoreStride),
                      panel = up16(kPanel * d);
        memory.reset(new float[size_t(packed + tile + panel + tile_rows * capacity)]);
        q_packed = memory.get();
        scores = q_packed + packed;
        k_panel = scores + tile;
        entries = k_panel + panel;
    }

    int64_t capacity;
    std::unique_ptr<float[]> memory;
    float *q_packed, *scores, *k_panel, *entries;
    std::vector<TopkRow> rows;
    std::vector<int32_t> seen;  // visible keys of each row
    std::vector<int32_t> lo, hi, positions, order;
};

int rows_per_tile(const TopkShape& shape) {
    const int64_t floats = 2 * topk_capacity(shape.topk - shape.recent, shape.recent);
    const int64_t rows = std::min<int64_t>(kTileRows, kTileFloats / floats);
    return int(std::max<int64_t>(kMicroRows, rows / kMicroRows * kMicroRows));
}

// Rows row0 .. row0 + rows - 1 of the (query, head of the group) pairs of one KV head.
struct Tile {
    int64_t batch, kv_head, row0;
    int rows;
};

class ForwardTile {
public:
    ForwardTile(const TopkShape& shape, const TopkForward& args, const TopkIsa& isa, const VisibleKeys& keys,
                const Tile& tile, Scratch& scratch)
        : shape_(shape), args_(args), isa_(isa), keys_(keys), tile_(tile), scratch_(scratch) {}

    void run() {
        SpanTask task = start();
        int32_t most = 0;
        for (int r = 0; r < tile_.rows; ++r) most = std::max(most, scratch_.seen[size_t(r)]);
        for (int32_t base = 0; base < most; base += kSpan) {
            for (int r = 0; r < tile_.rows; ++r)
                scratch_.hi[size_t(r)] = std::clamp(scratch_.seen[size_t(r)] - base, 0, kSpan);
            task.blocks = keys_.position.data() + base;
            isa_.score(task);
            for (int r = 0; r < tile_.rows; ++r) select(r, base);
        }
        for (int r = 0; r < tile_.rows; ++r) finish(r);
    }

private:
    int64_t group() const { return shape_.num_heads / shape_.num_kv_heads; }
    int64_t query(int r) const { return (tile_.row0 + r) / group(); }
    int64_t head(int r) const { return tile_.kv_head * group() + (tile_.row0 + r) % group(); }

    // Every key of the list is a block of one position, so padding costs nothing.
    SpanTask start() {
        SpanTask task{};
        const int d = shape_.head_dim, rows = tile_.rows;
        task.rows = rows;
        task.head_dim = d;
        task.scale = shape_.scale;
        task.q_packed = scratch_.q_packed;
        task.key = task.value = args_.k.row(tile_.batch, tile_.kv_head, 0);
        task.block_stride = args_.k.row_stride;
        task.lo = scratch_.lo.data();
        task.hi = scratch_.hi.data();
        task.scores = scratch_.scores;
        task.k_panel = scratch_.k_panel;
        task.num_micro = (rows + kMicroRows - 1) / kMicroRows;
        for (int i = 0, row = 0; i < task.num_micro; ++i) {
            const int size = (rows - row + task.num_micro - i - 1) / (task.num_micro - i);
            task.micro[i] = size;
            for (int r = 0; r < size; ++r) {
                const float* q = args_.q.row(tile_.batch, head(row + r), query(row + r));
                for (int k = 0; k < d; ++k) scratch_.q_packed[int64_t(row) * d + int64_t(k) * size + r] = q[k];
            }
            row += size;
        }
        for (int r = 0; r < rows; ++r) {
            const int64_t end = shape_.causal ? shape_.num_keys - shape_.num_queries + query(r) + 1 : shape_.num_keys;
            scratch_.seen[size_t(r)] = keys_.before[size_t(end)];
            scratch_.lo[size_t(r)] = 0;
            const int64_t at = r * scratch_.capacity;
            scratch_.rows[size_t(r)] = {shape_.topk - shape_.recent, 0,    false, 0.0f, scratch_.entries + at,
                                        scratch_.positions.data() + at};
        }
        return task;
    }

    void select(int r, int32_t base) {
        const float* scores = scratch_.scores + int64_t(r) * kScoreStride;
        TopkRow& row = scratch_.rows[size_t(r)];
        const int32_t seen = scratch_.hi[size_t(r)];
        const int32_t recent = std::clamp(scratch_.seen[size_t(r)] - shape_.recent - base, 0, seen);
        isa_.offer(row, scores, base, recent, scratch_.order.data());
        if (recent == seen) return;
        isa_.settle(row, scratch_.order.data());
        row.places = 0x7fffffff;  // settled for good
        for (int32_t j = recent; j < seen; ++j) {
            row.score[row.count] = scores[j];
            row.position[row.count++] = base + j;
        }
    }

    void finish(int r) {
        TopkRow& row = scratch_.rows[size_t(r)];
        isa_.settle(row, scratch_.order.data());
        for (int j = 0; j < row.count; ++j) row.position[j] = keys_.position[size_t(row.position[j])];
        const int64_t at = (tile_.batch * shape_.num_heads + head(r)) * shape_.num_queries + query(r);
        float* weight = args_.weight == nullptr ? nullptr : args_.weight + at * shape_.topk;
        isa_.attend({row.count, shape_.head_dim, shape_.l2, row.score, row.position,
                     args_.v.row(tile_.batch, tile_.kv_head, 0), args_.v.row_stride,
                     args_.out.row(tile_.batch, head(r), query(r)), weight, args_.lse + at});
        if (args_.index == nullptr) return;
        int32_t* index = args_.index + at * shape_.topk;
        std::memcpy(index, row.position, size_t(row.count) * sizeof(int32_t));
        std::fill(index + row.count, index + shape_.topk, -1);
        std::fill(weight + row.count, weight + shape_.topk, 0.0f);
    }

    const TopkShape& shape_;
    const TopkForward& args_;
    const TopkIsa& isa_;
    const VisibleKeys& keys_;
    const Tile tile_;
    Scratch& scratch_;
};

int kept(const int32_t* index, int topk) {
    return int(std::partition_point(index, index + topk, [](int32_t i) { return i >= 0; }) - index);
}

}  // namespace

void topk_forward(const TopkShape& shape, const TopkForward& args, ThreadPool& pool, bool portable) {
    const TopkIsa& isa = kernels(portable);
    std::vector<VisibleKeys> keys;
    for (int64_t b = 0; b < (args.padding == nullptr ? 1 : shape.batch); ++b)
        keys.emplace_back(args.padding == nullptr ? nullptr : args.padding + b * shape.num_keys, shape.num_keys);
    const int64_t rows = shape.num_queries * (shape.num_heads / shape.num_kv_heads);
    const int tile_rows = int(std::min<int64_t>(rows_per_tile(shape), std::max<int64_t>(rows, 1)));
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows, pairs = shape.batch * shape.num_kv_heads;
    std::vector<std::unique_ptr<Scratch>> scratch;
    for (int t = 0; t < pool.num_threads(); ++t) scratch.emplace_back(new Scratch(shape, tile_rows));
    pool.run(tiles * pairs, [&](int thread, int64_t item) {
        // The last rows see the most keys: the costliest come first.
        const int64_t pair = item % pairs, row0 = (tiles - 1 - item / pairs) * tile_rows;
        const Tile tile{pair / shape.num_kv_heads, pair % shape.num_kv_heads, row0,
                        int(std::min<int64_t>(tile_rows, rows - row0))};
        const VisibleKeys& seen = keys[args.padding == nullptr ? 0 : size_t(tile.batch)];
        ForwardTile(shape, args, isa, seen, tile, *scratch[size_t(thread)]).run();
    });
}

void topk_backward(const TopkShape& shape, const TopkBackward& args, ThreadPool& pool, bool portable) {
    const TopkIsa& isa = kernels(portable);
    const int64_t n = shape.num_queries, heads = shape.num_heads, group = heads / shape.num_kv_heads;
    const int64_t rows = shape.batch * heads * n;
    std::unique_ptr<float[]> score_grad(new float[size_t(rows * shape.topk)]), norm(new float[size_t(rows)]);
    pool.run((rows + kGradRows - 1) / kGradRows, [&](int, int64_t item) {
        for (int64_t at = item * kGradRows; at < std::min(rows, (item + 1) * kGradRows); ++at) {
            const int64_t b = at / (heads * n), h = at / n % heads, i = at % n;
            const int32_t* index = args.index + at * shape.topk;
            isa.grad({kept(index, shape.topk), shape.head_dim, shape.l2, shape.scale, args.threshold, index,
                      args.weight + at * shape.topk, args.k.row(b, h / group, 0), args.v.row(b, h / group, 0),
                      args.k.row_stride, args.v.row_stride, args.out_grad.row(b, h, i), args.q_grad.row(b, h, i),
                      score_grad.get() + at * shape.topk, norm.get() + at});
        }
    });
    // A row's entries lie in order of position, so a range of keys is a range of entries.
    const int64_t pairs = shape.batch * shape.num_kv_heads;
    const int64_t wanted = std::max<int64_t>(1, 4 * pool.num_threads() / std::max<int64_t>(1, pairs));
    const int64_t range = std::max((shape.num_keys + wanted - 1) / wanted, kMinKeyRange);
    const int64_t ranges = (shape.num_keys + range - 1) / range;
    pool.run(pairs * ranges, [&](int, int64_t item) {
        const int64_t pair = item / ranges, b = pair / shape.num_kv_heads, kv = pair % shape.num_kv_heads;
        const int32_t first = int32_t(item % ranges * range), end = int32_t(std::min(shape.num_keys, first + range));
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
            for (int64_t i = 0; i < n; ++i) {
                const int64_t at = (b * heads + h) * n + i;
                const int32_t* index = args.index + at * shape.topk;
                const int32_t* last = index + kept(index, shape.topk);
                const float *q = args.q.row(b, h, i), *out_grad = args.out_grad.row(b, h, i);
                for (const int32_t* j = std::lower_bound(index, last, first); j < last && *j < end; ++j) {
                    const int64_t entry = at * shape.topk + (j - index);
                    const float g = score_grad[size_t(entry)], w = args.weight[entry] / norm[size_t(at)];
                    if (w != 0.0f) isa.add(shape.head_dim, w, out_grad, args.v_grad.row(b, kv, *j));
                    if (g != 0.0f) isa.add(shape.head_dim, g, q, args.k_grad.row(b, kv, *j));
                }
            }
        }
    });
}

}  // namespace octavo
