// What a row did not keep, by the means of its spans of 16 keys.
//
// A span takes part when the row sees all of it and does not stand in it: so whatever a row makes of a span depends on
// the span's 16 keys, the query, and what was kept. Keys of other spans (the row's own, and the one that a sliding
// window cuts) that were not kept enter one by one, as if they had been.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "topk_tile.h"

namespace octavo {

void TopkTile::attend_with_tail() {
    const Shape& shape = plan_.shape_;
    const RecordLayout layout = record_layout(shape.head_dim);
    int64_t first = rows_[0].first, last = 0;
    for (int r = 0; r < item_->rows; ++r) {
        Row& row = rows_[size_t(r)];
        first = std::min(first, row.first);
        last = std::max(last, row.position);
        row.all_kept = {-std::numeric_limits<float>::infinity(), 0.0f};
        plan_.paged_.mass(row.best.score, row.best.count, &row.all_kept.m, &row.all_kept.l);
        add_edges(row);
        plan_.paged_.clear(row.kept_row);
    }
    // The means as a cache of their own, one key a block: scored by the kernel that scores keys.
    SpanTask task = span_task();
    task.key = task.value = means_.data();
    task.block_stride = shape.head_dim;
    task.block_shift = 0;
    task.half = true;
    int32_t place[kPanel];
    for (int i = 0; i < kPanel; ++i) place[i] = i;
    const uint16_t* mean_value[kPanel];
    task.blocks = place;
    for (int64_t base = first / kSpan * kSpan; base <= last; base += kSpan) {
        int lowest = kPanel, highest = 0;
        for (int r = 0; r < item_->rows; ++r) {
            const Row& row = rows_[size_t(r)];
            const int64_t from = (row.first + kRecordKeys - 1) / kRecordKeys - base / kRecordKeys;
            lo_[size_t(r)] = int32_t(std::clamp<int64_t>(from, 0, kPanel));
            hi_[size_t(r)] = int32_t(std::clamp<int64_t>((row.position - base) / kRecordKeys, 0, kPanel));
            if (lo_[size_t(r)] >= hi_[size_t(r)]) continue;
            lowest = std::min(lowest, lo_[size_t(r)]);
            highest = std::max(highest, hi_[size_t(r)]);
        }
        for (int i = lowest; i < highest; ++i) {
            const int64_t p = base + i * kRecordKeys;
            std::memcpy(means_.data() + i * shape.head_dim, scan_record(p) + layout.mean, size_t(shape.head_dim) * 2);
            mean_value[i] = mean_value_of(p);
        }
        item_->bytes += int64_t(std::max(0, highest - lowest)) * shape.head_dim * 4;
        ask_for_means(base + kSpan, last);
        plan_.select_.score(task);
        for (int r = 0; r < item_->rows; ++r) {
            Row& row = rows_[size_t(r)];
            const int before = row.next;
            while (row.next < row.kept_row.count && row.best.position[row.next] < base + kSpan) ++row.next;
            const int lo = lo_[size_t(r)], hi = hi_[size_t(r)];
            if (before == row.next && lo >= hi) continue;
            const float* score = scores_ + int64_t(r) * kScoreStride;
            plan_.paged_.attend_span(row.kept_row, before, row.next, {lo, hi, score, mean_value});
        }
    }
}

// Asks memory for the means of a span, which nothing has read yet where records were ranked.
void TopkTile::ask_for_means(int64_t base, int64_t last) {
    const int bytes = plan_.shape_.head_dim * 2, mean = record_layout(plan_.shape_.head_dim).mean;
    const void *key[kPanel], *value[kPanel];
    int count = 0;
    for (int64_t p = base; p < base + kSpan && p + kRecordKeys <= last; p += kRecordKeys) {
        key[count] = scan_record(p) + mean;
        value[count++] = mean_value_of(p);
    }
    // Records lie across lines.
    plan_.paged_.prefetch(key, count, bytes + 60);
    plan_.paged_.prefetch(value, count, bytes);
}

// Merges the keys at the row's edges that were not kept into those that were, in order of position.
void TopkTile::add_edges(Row& row) {
    const int64_t whole = (row.first + kRecordKeys - 1) / kRecordKeys * kRecordKeys;
    const int64_t own = row.position / kRecordKeys * kRecordKeys;
    const int kept = row.best.count;
    int count = 0;
    int32_t position[2 * kRecordKeys];
    const auto add = [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            if (std::binary_search(row.best.position, row.best.position + kept, int32_t(p))) continue;
            position[count++] = int32_t(p);
        }
    };
    add(row.first, std::min(whole, row.position + 1));
    add(std::max(own, std::min(whole, row.position + 1)), row.position + 1);
    float score[2 * kScoreStride];
    for (int first = 0; first < count; first += kPanel)
        score_at(row, position + first, std::min(kPanel, count - first), score + first);
    row.best.count = row.kept_row.count = kept + count;
    // From the back: nothing is overwritten before it has moved.
    for (int i = kept - 1, j = count - 1, to = kept + count - 1; j >= 0; --to) {
        const bool edge = i < 0 || row.best.position[i] < position[j];
        row.best.score[to] = edge ? score[j] : row.best.score[i];
        row.best.position[to] = edge ? position[j--] : row.best.position[i--];
    }
}

}  // namespace octavo
