// Fast mode: a row looks only into some spans of 16 keys, and there it is exact.
//
// Of the spans that a row sees whole and that lie before its recent keys all but the first are ranked, by the highest
// score that a key within their least and greatest values could have. The highest kLookAt times topk keys' worth of
// spans compete, ties to the lowest, with the first span and what lies beside the ranked ones. A rank is one number
// of (query, span), so the same spans are looked into in prefill and in decode. What is looked into is scanned, and
// scored where it may win, as in exact mode.
#include <algorithm>
#include <limits>
#include <tuple>

#include "topk_tile.h"

namespace octavo {
namespace {

// Keys of ranked spans for each key of the budget.
constexpr int kLookAt = 4;

int64_t up_to_record(int64_t position) { return (position + kRecordKeys - 1) / kRecordKeys; }

}  // namespace

// The records that a query at a position ranks.
std::pair<int64_t, int64_t> TopkPlan::ranked(const TopkPolicy& policy, int64_t position, int64_t window) {
    const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    const int64_t others_end = std::max(first, position + 1 - policy.recent);
    const int64_t begin = up_to_record(first) + 1;
    return {begin, std::max(begin, std::min(others_end, position) / kRecordKeys)};
}

// What `ranked` gives for any row of an item.
std::pair<int64_t, int64_t> TopkPlan::rank_range(const Item& item, int64_t window) const {
    const Sequence& seq = batch_.seqs[size_t(item.seq)];
    const int64_t position = seq.seq_len - seq.q_len + item.row0 / group_;
    const int64_t last = seq.seq_len - seq.q_len + (item.row0 + item.rows - 1) / group_;
    const TopkPolicy& policy = policies_[size_t(item.seq)];
    const int64_t begin = ranked(policy, position, window).first;
    return {begin, std::max(begin, ranked(policy, last, window).second)};
}

// Of all rows, before their records are ranked.
void TopkTile::split_queries() {
    const int d = plan_.shape_.head_dim;
    rank_weight_.resize(size_t(item_->rows) * 2 * d);
    float* weight = rank_weight_.data();
    for (int r = 0; r < item_->rows; ++r, weight += 2 * d)
        for (int i = 0; i < d; ++i) {
            const float q = queries_[size_t(r)][i];
            weight[i] = q < 0.0f ? q : 0.0f;
            weight[d + i] = q < 0.0f ? 0.0f : q;
        }
}

// value[row * stride + i] of the records begin + i, up to kRankRecords of them.
void TopkTile::rank_some(int64_t begin, int count, const uint8_t* const* ask, float* value, int64_t stride) {
    const int d = plan_.shape_.head_dim;
    const uint8_t* bounds[kRankRecords];
    for (int i = 0; i < count; ++i) bounds[i] = bounds_of((begin + i) * kRecordKeys);
    plan_.paged_.rank({item_->rows, d, rank_weight_.data(), count, bounds, ask, value, stride});
    item_->bytes += int64_t(count) * bounds_bytes(d);
}

void TopkTile::rank_all() {
    const int rows = item_->rows;
    // Of each row: its ranked records, and the best of them, in what scanning uses.
    struct Ranked {
        int64_t first, end;
        TopkRow records;
    };
    std::vector<Ranked> ranked(static_cast<size_t>(rows));
    for (int r = 0; r < rows; ++r) {
        const Row& row = rows_[size_t(r)];
        Ranked& own = ranked[size_t(r)];
        std::tie(own.first, own.end) = TopkPlan::ranked(policy_, row.position, args_->layer.window);
        own.records = {(kLookAt * policy_.topk + kRecordKeys - 1) / kRecordKeys, 0, false, 0.0f, row.value, row.candidate};
    }
    // Of the records base + [0, count).
    const auto offer = [&](int r, const float* value, int64_t base, int64_t count) {
        Ranked& own = ranked[size_t(r)];
        const int lo = int(std::clamp<int64_t>(own.first - base, 0, count));
        const int hi = int(std::clamp<int64_t>(own.end - base, 0, count));
        plan_.select_.offer(own.records, value + lo, int32_t(base + lo), hi - lo, order_.data());
    };
    if (item_->parts == 0) {
        split_queries();
        const auto [begin, end] = plan_.rank_range(*item_, args_->layer.window);
        static constexpr const uint8_t* kNothing[kRankRecords] = {};
        for (int64_t base = begin; base < end; base += kRankRecords) {
            const int count = int(std::min<int64_t>(kRankRecords, end - base));
            rank_some(base, count, kNothing, values_, kScoreStride);
            for (int r = 0; r < rows; ++r) offer(r, values_ + int64_t(r) * kScoreStride, base, count);
        }
    }
    for (int64_t i = 0; i < item_->parts; ++i) {
        const TopkPlan::Part& part = this->part(i);
        const int64_t all = part.end - part.begin;
        for (int r = 0; r < rows; ++r)
            for (int64_t at = 0; at < all; at += kSpan)
                offer(r, part.rank.data() + (item_->part_row + r) * all + at, part.begin + at, std::min<int64_t>(kSpan, all - at));
    }
    const std::vector<ScanQuery> queries = scan_queries();
    for (int r = 0; r < rows; ++r) {
        Ranked& own = ranked[size_t(r)];
        plan_.select_.settle(own.records, order_.data());
        start_.resize(size_t(own.records.count));
        for (int i = 0; i < own.records.count; ++i) start_[size_t(i)] = own.records.position[i] * kRecordKeys;
        take_ranked(r, queries[size_t(r)], own.first, own.end);
    }
}

// The keys before the ranked records, those of the records that start at start_, and the keys behind the ranked ones.
void TopkTile::take_ranked(int r, const ScanQuery& query, int64_t first_ranked, int64_t end_ranked) {
    Row& row = rows_[size_t(r)];
    const int64_t before = std::min(first_ranked * kRecordKeys, row.position + 1);
    take_keys(row, row.first, before);
    constexpr int kRecords = kSpan / kRecordKeys;
    const int count = int(start_.size());
    for (int i = 0; i < count; i += kRecords) {
        const uint8_t* ask[kRecords];
        for (int j = 0; j < kRecords; ++j) {
            const int ahead = i + j + kRecordsAhead;
            ask[j] = ahead < count ? scan_record(start_[size_t(ahead)]) : nullptr;
        }
        scan_some(r, 1, &query, start_.data() + i, std::min(kRecords, count - i), ask);
    }
    ask_for_candidates(row);
    take_keys(row, std::max(before, std::min(end_ranked * kRecordKeys, row.position + 1)), row.position + 1);
    contest(row);
    row.looked_everywhere = count == end_ranked - first_ranked;
}

}  // namespace octavo
