#include "topk_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace octavo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

int64_t up16(int64_t n) { return (n + 15) & ~int64_t(15); }

}  // namespace

TopkTile::TopkTile(const TopkPlan& plan, int rows)
    : plan_(plan),
      capacity_(up16(topk_capacity(plan.max_places_, plan.max_topk_) + kSpan)) {
    const int64_t d = plan.shape_.head_dim;
    const int64_t scores = rows * kScoreStride, entries = rows * capacity_;
    memory_.reset(new float[size_t(2 * up16(rows * d) + 3 * scores + 34 * up16(d) + 3 * entries + 16)]);
    // On a line, as every piece then is: vectors of 64 bytes would lie across two.
    float* at = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64 / sizeof(float);
    const auto piece = [&at](int64_t floats) {
        float* p = at;
        at += floats;
        return p;
    };
    q_packed_ = piece(up16(rows * d));
    scores_ = piece(scores);
    values_ = piece(scores);
    bounds_ = piece(scores);
    k_panel_ = piece(kPanel * up16(d));
    acc_ = piece(up16(rows * d));
    partial_ = piece(2 * up16(d));
    expanded_ = piece(kPanel * up16(d));
    means_.resize(size_t(kPanel * d));
    rows_.resize(size_t(rows));
    queries_.resize(size_t(rows));
    lo_.resize(size_t(rows));
    hi_.resize(size_t(rows));
    order_.resize(size_t(capacity_ + kPanel));
    ints_.resize(size_t(2 * entries));
    codes_.resize(size_t(rows * d));
    lower_.resize(size_t(capacity_));
    for (int64_t r = 0; r < rows; ++r) {
        Row& row = rows_[size_t(r)];
        row.best.score = piece(capacity_);
        row.value = piece(capacity_);
        row.bound = piece(capacity_);
        row.best.position = ints_.data() + 2 * r * capacity_;
        row.candidate = row.best.position + capacity_;
    }
}

void TopkTile::run(const TopkLayerArgs& args, TopkPlan::Item* item) {
    args_ = &args;
    item_ = item;
    start();
    switch (item->way) {
        case TopkPlan::Way::score: score_all(); break;
        case TopkPlan::Way::scan: scan_all(); break;
        case TopkPlan::Way::rank: rank_all(); break;
        case TopkPlan::Way::adapt: adapt_all(); break;
    }
    for (int r = 0; r < item->rows; ++r) settle(rows_[size_t(r)]);
    if (item->way == TopkPlan::Way::adapt) prefetch_values();
    for (int r = 0; r < item->rows; ++r) start_kept(r);
    if (policy_.tail != 0) {
        attend_with_tail();
    } else {
        for (int r = 0; r < item->rows; ++r) {
            Row& row = rows_[size_t(r)];
            plan_.paged_.attend(row.kept_row);
            row.all_kept = {row.kept_row.m, row.kept_row.l};
        }
    }
    for (int r = 0; r < item->rows; ++r) finish(r);
}

void TopkTile::start() {
    const Shape& shape = plan_.shape_;
    const int d = shape.head_dim, group = plan_.group_;
    seq_ = &plan_.batch_.seqs[size_t(item_->seq)];
    blocks_ = plan_.batch_.blocks.data() + seq_->first_block;
    policy_ = plan_.policies_[size_t(item_->seq)];
    stride_ = int64_t(shape.num_kv_heads) * shape.block_size * d;
    const int64_t head = int64_t(item_->kv_head) * shape.block_size * d * (shape.half ? 2 : 4);
    key_ = static_cast<const char*>(args_->layer.key) + head;
    value_ = static_cast<const char*>(args_->layer.value) + head;
    compact_blocks_ = plan_.batch_.compact.data() + seq_->first_compact;
    key_layout_ = record_layout(d);
    value_layout_ = value_layout(d, args_->layer.compact.value_bits);
    all_compact_ = std::numeric_limits<int64_t>::max();
    item_->report = {};
    item_->bytes = 0;
    for (int r = 0; r < item_->rows; ++r) {
        Row& row = rows_[size_t(r)];
        const int64_t at = item_->row0 + r;
        const float* q = args_->layer.q + (seq_->first_row + at / group) * args_->layer.q_stride +
                         (int64_t(item_->kv_head) * group + at % group) * d;
        row.query.q = queries_[size_t(r)] = q;
        row.position = seq_->seq_len - seq_->q_len + at / group;
        row.first = args_->layer.window > 0 ? std::max<int64_t>(0, row.position - args_->layer.window + 1) : 0;
        row.visible = row.position + 1 - row.first;
        row.others_end = std::max(row.first, row.position + 1 - policy_.recent);
        row.stored = plan_.batch_.compact_blocks(row.position) * shape.block_size;
        all_compact_ = std::min(all_compact_, row.stored);
        row.best.places = policy_.topk - policy_.recent;
        row.best.count = 0;
        row.best.limited = false;
        row.settled = false;
        row.scored = row.kept = {-kInf, 0.0f};
        row.num_candidates = 0;
        row.asked = false;
        row.limit = row.top = -kInf;
        row.dropped = 0.0f;
        row.rescored = 0;
        row.looked_everywhere = true;
        row.slack = 0.0f;
        row.recent = {-kInf, 0.0f};
    }
}

SpanTask TopkTile::span_task() {
    SpanTask task{};
    const int d = plan_.shape_.head_dim, rows = item_->rows;
    task.rows = rows;
    task.head_dim = d;
    task.scale = args_->layer.scale;
    task.q_packed = q_packed_;
    task.num_micro = (rows + kMicroRows - 1) / kMicroRows;
    for (int i = 0, row = 0; i < task.num_micro; ++i) {
        const int size = (rows - row + task.num_micro - i - 1) / (task.num_micro - i);
        task.micro[i] = size;
        for (int r = 0; r < size; ++r) {
            const float* q = rows_[size_t(row + r)].query.q;
            for (int k = 0; k < d; ++k) q_packed_[int64_t(row) * d + int64_t(k) * size + r] = q[k];
        }
        row += size;
    }
    task.key = key_;
    task.value = value_;
    task.block_stride = stride_;
    task.block_shift = plan_.block_shift_;
    task.half = plan_.shape_.half;
    task.lo = lo_.data();
    task.hi = hi_.data();
    task.scores = scores_;
    task.k_panel = k_panel_;
    return task;
}

// Every visible key is scored, a span at a time, first what rows read in compact form.
void TopkTile::score_all() {
    const SpanTask stored = span_task(), compact = compact_task(stored);
    int64_t first = rows_[0].first, last = 0;
    for (int r = 0; r < item_->rows; ++r) {
        first = std::min(first, rows_[size_t(r)].first);
        last = std::max(last, rows_[size_t(r)].position);
    }
    const auto score = [&](SpanTask task, int64_t base) {
        const bool is_compact = task.value_bits != 0;
        int lowest = kSpan, highest = 0;
        for (int r = 0; r < item_->rows; ++r) {
            const Row& row = rows_[size_t(r)];
            const int64_t from = is_compact ? row.first : std::max(row.first, row.stored);
            const int64_t to = is_compact ? row.stored : row.position + 1;
            const int lo = lo_[size_t(r)] = int32_t(std::clamp<int64_t>(from - base, 0, kSpan));
            const int hi = hi_[size_t(r)] = int32_t(std::clamp<int64_t>(to - base, 0, kSpan));
            if (lo >= hi) continue;
            lowest = std::min(lowest, lo);
            highest = std::max(highest, hi);
        }
        if (lowest >= highest) return;
        const int64_t key_bytes = is_compact ? key_layout_.bytes / kRecordKeys : task.head_dim * (task.half ? 2 : 4);
        item_->bytes += (highest - lowest) * key_bytes;
        task.blocks = (is_compact ? compact_blocks_ : blocks_) + (base >> plan_.block_shift_);
        plan_.select_.score(task);
        for (int r = 0; r < item_->rows; ++r)
            take(rows_[size_t(r)], scores_ + int64_t(r) * kScoreStride, base, lo_[size_t(r)], hi_[size_t(r)]);
    };
    for (int64_t base = first / kSpan * kSpan; base <= last; base += kSpan) {
        if (compact.value_bits != 0) score(compact, base);
        score(stored, base);
    }
}

// The scores of the keys base + [lo, hi), in order of position: candidates, then recent keys.
void TopkTile::take(Row& row, const float* scores, int64_t base, int lo, int hi) {
    if (lo >= hi) return;
    const int recent = int(std::clamp<int64_t>(row.others_end - base, lo, hi));
    if (lo < recent) {
        plan_.paged_.mass(scores + lo, recent - lo, &row.scored.m, &row.scored.l);
        plan_.select_.offer(row.best, scores + lo, int32_t(base + lo), recent - lo, order_.data());
    }
    if (recent == hi) return;
    settle(row);
    for (int j = recent; j < hi; ++j) {
        row.best.score[row.best.count] = scores[j];
        row.best.position[row.best.count++] = int32_t(base + j);
    }
}

void TopkTile::settle(Row& row) {
    if (row.settled) return;
    plan_.select_.settle(row.best, order_.data());
    plan_.paged_.mass(row.best.score, row.best.count, &row.kept.m, &row.kept.l);
    row.settled = true;
}

// Scores and takes the keys [begin, end) that no scan tells of.
void TopkTile::take_keys(Row& row, int64_t begin, int64_t end) {
    float score[kScoreStride];
    for (int64_t p = begin; p < end; p += kPanel) {
        const int n = int(std::min<int64_t>(kPanel, end - p));
        int32_t position[kPanel];
        for (int i = 0; i < n; ++i) position[i] = int32_t(p + i);
        ask_for_values(row, position, n);
        score_at(row, position, n, score);
        take_open(row, score, p, 0, n);
    }
}

void TopkTile::prefetch_values() {
    for (int r = 0; r < item_->rows; ++r)
        ask_for_values(rows_[size_t(r)], rows_[size_t(r)].best.position, rows_[size_t(r)].best.count);
}

void TopkTile::start_kept(int r) {
    const Shape& shape = plan_.shape_;
    Row& row = rows_[size_t(r)];
    PagedRow& kept = row.kept_row;
    kept = {};
    kept.count = row.best.count;
    kept.head_dim = shape.head_dim;
    kept.half = shape.half;
    kept.block_shift = plan_.block_shift_;
    kept.score = row.best.score;
    kept.position = row.best.position;
    kept.blocks = blocks_;
    kept.value = value_;
    kept.block_stride = stride_;
    kept.stored = row.stored;
    kept.compact_blocks = compact_blocks_;
    const int64_t records = shape.block_size / kRecordKeys;
    kept.compact_value = args_->layer.compact.value + item_->kv_head * records * value_layout_.bytes;
    kept.compact_stride = shape.num_kv_heads * records;
    kept.value_bits = args_->layer.compact.value_bits;
    kept.acc = acc_ + int64_t(r) * shape.head_dim;
    kept.partial = partial_;
    row.next = 0;
    row.kept_count = kept.count;
    if (args_->position == nullptr) return;
    int32_t* to = args_->position + out_index(r) * plan_.max_topk_;
    std::copy(row.best.position, row.best.position + kept.count, to);
    std::fill(to + kept.count, to + plan_.max_topk_, -1);
}

// Of the row in tensors [num_tokens, num_heads].
int64_t TopkTile::out_index(int r) const {
    const int64_t at = item_->row0 + r, group = plan_.group_;
    return (seq_->first_row + at / group) * plan_.shape_.num_heads + item_->kv_head * group + at % group;
}

void TopkTile::finish(int r) {
    const Shape& shape = plan_.shape_;
    const Row& row = rows_[size_t(r)];
    const PagedRow& kept = row.kept_row;
    const int64_t index = out_index(r);
    plan_.isa_.divide(kept.acc, kept.l, shape.head_dim, args_->layer.out + index * shape.head_dim);
    if (args_->layer.lse != nullptr) args_->layer.lse[index] = float(double(kept.m) + std::log(double(kept.l)));
    const double dropped = dropped_bound(row);
    item_->report.rows += 1.0;
    item_->report.visible += double(row.visible);
    item_->report.kept += double(row.kept_count);
    item_->report.rescored += double(row.rescored);
    item_->report.dropped_sum += dropped;
    item_->report.dropped_max = std::max(item_->report.dropped_max, dropped);
    const int64_t row_bytes = shape.head_dim * (shape.half ? 2 : 4), compact_bytes = value_layout_.bytes / kRecordKeys;
    const int64_t compact = std::lower_bound(kept.position, kept.position + kept.count, row.stored) - kept.position;
    item_->bytes += compact * compact_bytes + (kept.count - compact) * row_bytes;
    if (args_->dropped != nullptr) args_->dropped[index] = float(std::min(1.0, dropped * (1.0 + 1e-7)));
}

// An upper bound of 1 - kept mass / full mass. What was scanned away enters with its upper bounds; what was
// scored and lost, as the scored sum less the kept one, widened by what fp32 sums of so many can be off.
double TopkTile::dropped_bound(const Row& row) const {
    if (row.visible <= dense_keys(policy_)) return 0.0;
    if (!row.looked_everywhere) return 1.0;
    const double off = 1e-5 + double(row.visible) * 0x1p-25, m = row.all_kept.m;
    const auto mass = [m](double l, double top) { return l == 0.0 ? 0.0 : l * std::exp(top - m); };
    double lost = std::max(0.0, mass(row.scored.l, row.scored.m) * (1.0 + off) - mass(row.kept.l, row.kept.m) * (1.0 - off));
    lost *= std::exp(double(row.slack));
    // Below -87 the kernels' exp is 0.
    lost += mass(double(row.dropped) * (1.0 + off) + double(row.visible) * 1.2e-38, row.top == -kInf ? m : row.top);
    const double bound = lost / (lost + double(row.all_kept.l) * (1.0 - off));
    // Where scores are not finite nothing is known.
    return bound >= 0.0 && bound <= 1.0 ? bound : 1.0;
}

}  // namespace octavo
