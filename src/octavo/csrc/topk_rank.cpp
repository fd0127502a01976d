// Fast mode: a row looks only into some spans of 16 keys, and there it is exact.
//
// Of the spans that a row sees whole and that lie before its recent keys all but the first are ranked, by the highest
// score that a key within their least and greatest values could have. The highest kLookAt times topk keys' worth of
// spans compete, ties to the lowest, with the first span and what lies beside the ranked ones. A rank is one number
// of (query, span), so the same spans are looked into in prefill and in decode.
#include <algorithm>
#include <limits>

#include "topk_tile.h"

namespace octavo {
namespace {

// Keys of ranked spans for each key of the budget.
constexpr int kLookAt = 4;

int64_t up_to_record(int64_t position) { return (position + kRecordKeys - 1) / kRecordKeys; }

}  // namespace

void TopkTile::rank_all() {
    const Shape& shape = plan_.shape_;
    const int rows = item_->rows;
    // Of each row: its ranked records, and the best of them, in what scanning uses.
    struct Ranked {
        int64_t first, end;
        TopkRow records;
    };
    std::vector<Ranked> ranked(static_cast<size_t>(rows));
    std::vector<const float*> q(static_cast<size_t>(rows));
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int r = 0; r < rows; ++r) {
        const Row& row = rows_[size_t(r)];
        Ranked& own = ranked[size_t(r)];
        own.first = up_to_record(row.first) + 1;
        own.end = std::max(own.first, std::min(row.others_end, row.position) / kRecordKeys);
        own.records = {(kLookAt * policy_.topk + kRecordKeys - 1) / kRecordKeys, 0, false, 0.0f, row.value, row.candidate};
        q[size_t(r)] = row.query.q;
        begin = std::min(begin, own.first);
        end = std::max(end, own.end);
    }
    const uint16_t* bounds[kSpan];
    for (int64_t base = begin; base < end; base += kSpan) {
        const int count = int(std::min<int64_t>(kSpan, end - base));
        for (int i = 0; i < count; ++i)
            bounds[i] = args_->planes.bounds + record_of((base + i) * kRecordKeys) * 2 * shape.head_dim;
        plan_.paged_.rank({rows, shape.head_dim, q.data(), count, bounds, values_});
        item_->bytes += int64_t(count) * shape.head_dim * 4;
        for (int r = 0; r < rows; ++r) {
            Ranked& own = ranked[size_t(r)];
            const int lo = int(std::clamp<int64_t>(own.first - base, 0, count));
            const int hi = int(std::clamp<int64_t>(own.end - base, 0, count));
            const float* value = values_ + int64_t(r) * kScoreStride + lo;
            plan_.select_.offer(own.records, value, int32_t(base + lo), hi - lo, order_.data());
        }
    }
    for (int r = 0; r < rows; ++r) {
        Ranked& own = ranked[size_t(r)];
        plan_.select_.settle(own.records, order_.data());
        take_ranked(rows_[size_t(r)], own.first, own.end, &own.records);
    }
}

void TopkTile::take_ranked(Row& row, int64_t first_ranked, int64_t end_ranked, TopkRow* records) {
    const int bytes = plan_.shape_.head_dim * (plan_.shape_.half ? 2 : 4);
    const auto ask_for = [&](int i) {
        if (i >= records->count) return;
        for (int j = 0; j < kRecordKeys; ++j)
            addresses_[size_t(j)] = at(key_, int64_t(records->position[i]) * kRecordKeys + j);
        plan_.paged_.prefetch(addresses_.data(), kRecordKeys, bytes);
    };
    ask_for(0);
    ask_for(1);
    const int64_t before = std::min(first_ranked * kRecordKeys, row.position + 1);
    take_keys(row, row.first, before);
    for (int i = 0; i < records->count; ++i) {
        ask_for(i + 2);
        const int64_t p = int64_t(records->position[i]) * kRecordKeys;
        take_keys(row, p, p + kRecordKeys);
    }
    take_keys(row, std::max(before, std::min(end_ranked * kRecordKeys, row.position + 1)), row.position + 1);
    row.looked_everywhere = records->count == end_ranked - first_ranked;
}

}  // namespace octavo
