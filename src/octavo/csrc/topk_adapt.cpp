// An adaptive budget: a row keeps its recent keys, and of the others those that hold at least a share of its softmax,
// which is smaller the more keys it sees.
//
// What a key holds is decided by what the scan plane says of its score: one number of (query, record), made by the same
// integers and the same order of sums whoever else is scanned with it. A key that the plane knows nothing of, or that
// lies in no record that the row sees whole, or in the one it stands in, is told by its score. So is the sum over
// all keys, in spans of absolute positions. Then the kept keys are scored from K.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "topk_tile.h"

namespace octavo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// While the sum grows a key that lies below its share by this much is let go: more than rounding can undo.
constexpr float kMargin = 0x1p-6f;
const float kNoBound[kScoreStride] = {};

}  // namespace

void TopkTile::adapt_all() {
    const Shape& shape = plan_.shape_;
    const int rows = item_->rows;
    const std::vector<ScanQuery> queries = scan_queries();
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    // The others that are scanned.
    std::vector<std::pair<int64_t, int64_t>> scanned(static_cast<size_t>(rows));
    for (int r = 0; r < rows; ++r) {
        Row& row = rows_[size_t(r)];
        auto& [lo, hi] = scanned[size_t(r)];
        lo = std::min((row.first + kRecordKeys - 1) / kRecordKeys * kRecordKeys, row.others_end);
        hi = std::max(lo, std::min(row.others_end, row.position / kRecordKeys * kRecordKeys));
        begin = std::min(begin, lo);
        end = std::max(end, hi);
        float* recent = row.value;
        for (int64_t p = row.others_end; p <= row.position; p += kPanel) {
            int32_t position[kPanel];
            const int n = int(std::min<int64_t>(kPanel, row.position + 1 - p));
            for (int i = 0; i < n; ++i) position[i] = int32_t(p + i);
            float score[kScoreStride];
            score_at(row, position, n, score);
            std::copy(score, score + n, recent);
            recent += n;
        }
        plan_.paged_.mass(row.value, int(recent - row.value), &row.recent.m, &row.recent.l);
        adapt_keys(row, row.first, lo);
    }
    const int64_t record_bytes = record_layout(shape.head_dim).bytes;
    const uint8_t* record[kSpan / kRecordKeys + kRecordsAhead];
    for (int64_t base = begin / kSpan * kSpan; base < end; base += kSpan) {
        const int64_t from = std::max(base, begin / kRecordKeys * kRecordKeys);
        const int64_t stop = std::min(base + kSpan, (end + kRecordKeys - 1) / kRecordKeys * kRecordKeys);
        const int count = int((stop - from) / kRecordKeys);
        for (int i = 0; i < count + kRecordsAhead; ++i) {
            const int64_t p = from + i * kRecordKeys;
            record[i] = p < end ? scan_record(p) : nullptr;
        }
        plan_.paged_.scan({rows, shape.head_dim, queries.data(), count, record, record + kRecordsAhead, values_, bounds_});
        item_->bytes += count * record_bytes;
        for (int r = 0; r < rows; ++r) {
            const auto& [lo, hi] = scanned[size_t(r)];
            const int first = int(std::clamp<int64_t>(lo - from, 0, stop - from));
            const int last = int(std::clamp<int64_t>(hi - from, 0, stop - from));
            if (first >= last) continue;
            float* value = values_ + int64_t(r) * kScoreStride;
            adapt_span(rows_[size_t(r)], from, first, last, value, bounds_ + int64_t(r) * kScoreStride);
        }
    }
    for (int r = 0; r < rows; ++r) {
        Row& row = rows_[size_t(r)];
        adapt_keys(row, scanned[size_t(r)].second, row.others_end);
        adapt_choose(row);
    }
}

// The score that a key must reach to hold its share of what the row has met.
float TopkTile::least_score(const Row& row) const {
    const Mass &a = row.recent, &b = row.scored;
    const double top = std::max(a.m, b.m);
    if (top == double(-kInf)) return -kInf;
    const double sum = double(a.l) * std::exp(a.m - top) + double(b.l) * std::exp(b.m - top);
    const int64_t visible = std::clamp(row.position + 1 - row.first, kAdaptFrom, kAdaptTo);
    const double share = policy_.least * 1e-6 * double(kAdaptTo) / double(visible);
    return float(top + std::log(sum) + std::log(share));
}

// The keys base + [lo, hi) of one span, by what the scan says of them.
void TopkTile::adapt_span(Row& row, int64_t base, int lo, int hi, float* value, const float* bound) {
    // Bounds are not negative, so their bits are in their order, and NaN is above infinity: a maximum of integers, which
    // the compiler makes a vector of.
    constexpr int32_t kInfBits = 0x7f800000;
    int32_t highest = 0;
    for (int j = lo; j < hi; ++j) {
        int32_t bits;
        std::memcpy(&bits, bound + j, sizeof bits);
        bits &= 0x7fffffff;
        highest = bits > highest ? bits : highest;
    }
    float widest = 0.0f;
    if (highest < kInfBits) {
        std::memcpy(&widest, &highest, sizeof widest);
    } else {
        for (int j = lo; j < hi; ++j) {
            if (bound[j] < kInf) {
                widest = std::max(widest, bound[j]);
                continue;
            }
            const int32_t position = int32_t(base + j);
            float score[kScoreStride];
            score_at(row, &position, 1, score);
            value[j] = score[0];
            ++row.rescored;
        }
    }
    row.slack = std::max(row.slack, widest);
    plan_.paged_.mass(value + lo, hi - lo, &row.scored.m, &row.scored.l);
    const float limit = least_score(row) - kMargin;
    int32_t stay[kSpan];
    float unused = 0.0f;
    const int n = plan_.paged_.sift({lo, hi, value, kNoBound, limit, limit, &unused, stay});
    if (row.best.count + n > 2 * row.best.places + kTopkSlack + kSpan) plan_.select_.settle(row.best, order_.data());
    for (int i = 0; i < n; ++i) {
        row.best.score[row.best.count] = value[stay[i]];
        row.best.position[row.best.count++] = int32_t(base + stay[i]);
    }
}

// The keys [begin, end), fewer than 16 or so, by their scores.
void TopkTile::adapt_keys(Row& row, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p += kPanel) {
        const int n = int(std::min<int64_t>(kPanel, end - p));
        int32_t position[kPanel];
        float score[kScoreStride];
        for (int i = 0; i < n; ++i) position[i] = int32_t(p + i);
        score_at(row, position, n, score);
        adapt_span(row, p, 0, n, score, kNoBound);
    }
}

// What stays of the candidates, with its scores, and the recent keys.
void TopkTile::adapt_choose(Row& row) {
    const float least = least_score(row);
    TopkRow& best = row.best;
    int count = 0;
    for (int i = 0; i < best.count; ++i) {
        if (best.score[i] < least) continue;
        best.score[count] = best.score[i];
        best.position[count++] = best.position[i];
    }
    best.count = count;
    plan_.select_.settle(best, order_.data());
    plan_.paged_.mass(best.score, best.count, &row.kept.m, &row.kept.l);
    ask_for_keys(row, best.position, best.count);
    for (int i = 0; i < best.count; i += kPanel) {
        const int n = std::min(kPanel, best.count - i);
        float score[kScoreStride];
        score_at(row, best.position + i, n, score);
        std::copy(score, score + n, best.score + i);
    }
    row.settled = true;
    for (int64_t p = row.others_end; p <= row.position; ++p) {
        best.score[best.count] = row.value[p - row.others_end];
        best.position[best.count++] = int32_t(p);
    }
}

}  // namespace octavo
