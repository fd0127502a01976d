// The keys that a row's scan leaves in the race, and their scores.
#include <algorithm>
#include <cmath>
#include <limits>

#include "topk_tile.h"

namespace octavo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

std::vector<ScanQuery> TopkTile::scan_queries() {
    const int d = plan_.shape_.head_dim;
    std::vector<ScanQuery> queries(static_cast<size_t>(item_->rows));
    for (int r = 0; r < item_->rows; ++r) {
        Row& row = rows_[size_t(r)];
        prepare_query(row.query.q, d, args_->layer.scale, codes_.data() + int64_t(r) * d, &row.query);
        queries[size_t(r)] = row.query;
    }
    return queries;
}

// Whole records behind every row's query and recent keys have been scanned; the keys after them are scored. Meanwhile the
// memory of the candidates' keys comes.
void TopkTile::scan_all() {
    const int rows = item_->rows;
    int64_t last = 0;
    for (int r = 0; r < rows; ++r) {
        Row& row = rows_[size_t(r)];
        last = std::max(last, row.position);
        for (int64_t i = 0; i < item_->parts; ++i) take_found(row, part(i).found[size_t(item_->part_row + r)]);
        ask_for_candidates(row);
    }
    for (int64_t base = item_->scan_end; base <= last; base += kSpan) {
        const int count = int(std::min<int64_t>(kSpan, last + 1 - base));
        for (int at = 0; at < count; at += kPanel) score_panel(base + at, std::min(kPanel, count - at), scores_ + at);
        for (int r = 0; r < rows; ++r) {
            Row& row = rows_[size_t(r)];
            const int lo = int(std::clamp<int64_t>(row.first - base, 0, count));
            const int hi = int(std::clamp<int64_t>(row.position + 1 - base, 0, count));
            take_open(row, scores_ + int64_t(r) * kScoreStride, base, lo, hi);
        }
    }
    for (int r = 0; r < rows; ++r) contest(rows_[size_t(r)]);
}

void TopkTile::ask_for_candidates(Row& row) {
    tighten(row);
    ask_for_keys(row, row.candidate, row.num_candidates);
    row.asked = true;
}

// The scores of the keys base + [0, count) of one record, of every row. Their values are asked for: most of them are
// recent.
void TopkTile::score_panel(int64_t base, int count, float* scores) {
    int32_t position[kPanel];
    for (int i = 0; i < count; ++i) position[i] = int32_t(base + i);
    int64_t compact = 0;
    for (int r = 0; r < item_->rows; ++r) compact = std::max(compact, rows_[size_t(r)].stored);
    if (base < compact) {
        for (int r = 0; r < item_->rows; ++r) {
            ask_for_values(rows_[size_t(r)], position, count);
            score_at(rows_[size_t(r)], position, count, scores + int64_t(r) * kScoreStride);
        }
        return;
    }
    const Shape& shape = plan_.shape_;
    const void* key[kPanel];
    for (int i = 0; i < count; ++i) key[i] = at(key_, base + i);
    ask_for_values(rows_[0], position, count);
    plan_.paged_.gather({item_->rows, count, shape.head_dim, shape.half, args_->layer.scale, queries_.data(), key, k_panel_,
                         scores});
    item_->bytes += int64_t(count) * shape.head_dim * (shape.half ? 2 : 4);
}

// Scored keys base + [lo, hi), in order of position: candidates, and when these are through the recent keys.
void TopkTile::take_open(Row& row, const float* scores, int64_t base, int lo, int hi) {
    const int recent = int(std::clamp<int64_t>(row.others_end - base, lo, std::max(lo, hi)));
    for (int j = lo; j < recent; ++j) {
        row.candidate[row.num_candidates] = int32_t(base + j);
        row.value[row.num_candidates] = scores[j];
        row.bound[row.num_candidates++] = 0.0f;
    }
    if (recent >= hi) return;
    contest(row);
    take(row, scores, base, recent, hi);
}

void TopkTile::contest(Row& row) {
    if (row.settled) return;
    tighten(row);
    rescore(row);
}

// Up to kSpan keys, in `count` records that start at these positions: what may win becomes a candidate. What `ask` has
// is asked for meanwhile, see ScanTask.
void TopkTile::scan_some(int row0, int rows, const ScanQuery* queries, const int32_t* start, int count,
                         const uint8_t* const* ask) {
    const uint8_t* record[kSpan / kRecordKeys];
    for (int i = 0; i < count; ++i) record[i] = scan_record(start[i]);
    plan_.paged_.scan({rows, plan_.shape_.head_dim, queries, count, record, ask, values_, bounds_});
    item_->bytes += count * record_layout(plan_.shape_.head_dim).bytes;
    int32_t stay[kSpan + kPanel];
    for (int r = 0; r < rows; ++r) {
        Row& row = rows_[size_t(row0 + r)];
        const float *value = values_ + int64_t(r) * kScoreStride, *bound = bounds_ + int64_t(r) * kScoreStride;
        // A window cuts the first record only.
        const int lo = int(std::clamp<int64_t>(row.first - start[0], 0, count * kRecordKeys));
        const int seen = count * kRecordKeys - lo;
        // The first to be scanned: most of them need not become candidates.
        if (row.limit == -kInf && lo == 0 && seen > 2 * row.best.places && row.num_candidates == 0)
            raise(row, plan_.paged_.limit({seen, row.best.places, value, bound, lower_.data()}));
        const int n = plan_.paged_.sift({lo, count * kRecordKeys, value, bound, row.limit, row.top, &row.dropped, stay});
        for (int i = 0; i < n; ++i) {
            row.candidate[row.num_candidates] = start[stay[i] / kRecordKeys] + stay[i] % kRecordKeys;
            row.value[row.num_candidates] = value[stay[i]];
            row.bound[row.num_candidates++] = bound[stay[i]];
        }
        limit_candidates(row);
    }
}

void TopkTile::limit_candidates(Row& row) {
    const int most = 2 * row.best.places + kTopkSlack;
    if (row.num_candidates <= most) return;
    tighten(row);
    // Bounds do not tell them apart: scores will.
    if (row.num_candidates > most) rescore(row);
}

void TopkTile::begin_part(const TopkLayerArgs& args, TopkPlan::Part* part) {
    args_ = &args;
    item_ = &part->item;
    part_ = part;
    start();
    if (item_->way == TopkPlan::Way::rank) {
        split_queries();
        part->rank.resize(size_t(item_->rows * (part->end - part->begin)));
    } else {
        part_queries_ = scan_queries();
        part->found.resize(size_t(item_->rows));
    }
}

// `count` records of the part, from this one on: no more than kSpan keys to scan, or kRankRecords to rank.
void TopkTile::read_part(int64_t record, int count, const uint8_t* const* ask) {
    if (item_->way == TopkPlan::Way::rank) {
        rank_some(record, count, ask, part_->rank.data() + (record - part_->begin), part_->end - part_->begin);
        return;
    }
    int32_t start[kSpan / kRecordKeys];
    for (int i = 0; i < count; ++i) start[i] = int32_t((record + i) * kRecordKeys);
    scan_some(0, item_->rows, part_queries_.data(), start, count, ask);
}

void TopkTile::end_part() {
    for (size_t r = 0; r < part_->found.size(); ++r) {
        tighten(rows_[r]);
        keep_found(rows_[r], &part_->found[r]);
    }
}

// Those with a score come first: they were met first.
void TopkTile::keep_found(Row& row, TopkPlan::Found* found) {
    Mass alive = {-std::numeric_limits<float>::infinity(), 0.0f};
    plan_.select_.settle(row.best, order_.data());
    plan_.paged_.mass(row.best.score, row.best.count, &alive.m, &alive.l);
    found->position.assign(row.best.position, row.best.position + row.best.count);
    found->value.assign(row.best.score, row.best.score + row.best.count);
    found->bound.assign(size_t(row.best.count), 0.0f);
    found->position.insert(found->position.end(), row.candidate, row.candidate + row.num_candidates);
    found->value.insert(found->value.end(), row.value, row.value + row.num_candidates);
    found->bound.insert(found->bound.end(), row.bound, row.bound + row.num_candidates);
    found->limit = row.limit;
    found->dropped = row.dropped;
    found->rescored = row.rescored;
    if (!row.best.limited) return;
    // What was scored and lost here, as dropped_bound has it.
    const double off = 1e-5 + double(row.visible) * 0x1p-25, top = row.top;
    const double lost = double(row.scored.l) * (1.0 + off) * std::exp(row.scored.m - top) -
                        double(alive.l) * (1.0 - off) * std::exp(alive.m - top);
    found->dropped += float((lost < 0.0 ? 0.0 : lost) * (1.0 + 1e-6));
}

// What another thread has found, as if it had been scanned here.
void TopkTile::take_found(Row& row, const TopkPlan::Found& found) {
    raise(row, found.limit);
    if (found.dropped != 0.0f) row.dropped += float(double(found.dropped) * std::exp(double(found.limit) - double(row.top)));
    row.rescored += found.rescored;
    for (size_t from = 0; from < found.position.size(); from += kSpan) {
        const size_t n = std::min(found.position.size() - from, size_t(kSpan));
        std::copy_n(found.position.data() + from, n, row.candidate + row.num_candidates);
        std::copy_n(found.value.data() + from, n, row.value + row.num_candidates);
        std::copy_n(found.bound.data() + from, n, row.bound + row.num_candidates);
        row.num_candidates += int(n);
        limit_candidates(row);
    }
}

void TopkTile::raise(Row& row, float limit) {
    if (!(row.limit < limit)) return;
    if (row.dropped != 0.0f) row.dropped *= float(std::exp(double(row.top) - double(limit)));
    row.limit = row.top = limit;
}

// Raises the limit by the lower bounds of the candidates, and drops those that cannot reach it.
void TopkTile::tighten(Row& row) {
    if (row.num_candidates <= row.best.places) return;
    raise(row, plan_.paged_.limit({row.num_candidates, row.best.places, row.value, row.bound, lower_.data()}));
    const int stay = plan_.paged_.sift(
        {0, row.num_candidates, row.value, row.bound, row.limit, row.top, &row.dropped, order_.data()});
    for (int i = 0; i < stay; ++i) {
        const int from = order_[size_t(i)];
        row.candidate[i] = row.candidate[from];
        row.value[i] = row.value[from];
        row.bound[i] = row.bound[from];
    }
    row.num_candidates = stay;
}

// Candidates get their scores, sixteen at a time, and compete for the places.
void TopkTile::rescore(Row& row) {
    const bool few = row.num_candidates <= 2 * row.best.places;
    if (!row.asked) ask_for_keys(row, row.candidate, row.num_candidates);
    row.asked = false;
    for (int first = 0; first < row.num_candidates; first += kPanel) {
        const int n = std::min(kPanel, row.num_candidates - first);
        int32_t position[kPanel];
        float scores[kScoreStride];
        int unknown = 0;
        for (int i = 0; i < n; ++i)
            if (row.bound[first + i] != 0.0f) position[unknown++] = row.candidate[first + i];
        if (unknown > 0) score_at(row, position, unknown, scores);
        // Most of them will be kept.
        if (few) ask_for_values(row, row.candidate + first, n);
        row.rescored += unknown;
        if (row.best.count > 2 * row.best.places + kTopkSlack) plan_.select_.settle(row.best, order_.data());
        float* to = row.best.score + row.best.count;
        for (int i = 0, next = 0; i < n; ++i) {
            to[i] = row.bound[first + i] != 0.0f ? scores[next++] : row.value[first + i];
            row.best.position[row.best.count + i] = row.candidate[first + i];
        }
        plan_.paged_.mass(to, n, &row.scored.m, &row.scored.l);
        row.best.count += n;
    }
    row.num_candidates = 0;
    if (row.best.limited) raise(row, row.best.limit);
}

}  // namespace octavo
