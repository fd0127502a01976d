// Reading the tokens behind a summary again, where a row gives much of its softmax to it.
//
// Which entries those are is decided by the row's own scores before anything is recalled, and each row is computed alone:
// so neither its company nor what others recall changes its result.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "compact_rows.h"
#include "plan.h"

namespace octavo {
namespace {

constexpr int kSpanBlocks = kSpan / kGroupBlocks;
// What rounding may do to the logarithm of a share; exact shares decide above it.
constexpr double kSlack = 1e-3;

int64_t line_up(int64_t floats) { return (floats + 15) & ~int64_t(15); }

// (m, l, acc) of one row.
struct RowPartial {
    float *m, *l, *acc;
};

void merge(const Isa& isa, int head_dim, const SpanTask& task, const RowPartial& into) {
    isa.merge(1, head_dim, task.m, task.l, task.acc, into.m, into.l, into.acc);
}

}  // namespace

int64_t AttentionPlan::recall_floats() const {
    if (batch_.budget == 0) return 0;
    const int64_t d = shape_.head_dim;
    // The largest value records are those with 8 bits.
    const int64_t records = kSpanBlocks * int64_t(record_layout(int(d)).bytes + value_layout(int(d), 8).bytes) / 4 + 16;
    return line_up(d) + line_up(kScoreStride) + line_up(kPanel * d) + line_up(kValueKeys * d) + 2 * line_up(d + 2) +
           line_up(records);
}

void AttentionPlan::check_recall(const RecallArgs& recall) const {
    for (size_t s = 0; s < batch_.seqs.size(); ++s) {
        if (batch_.seqs[s].q_len == 0) continue;
        const int64_t blocks = batch_.first_kept(batch_.summarised_at(batch_.seqs[s].seq_len - 1)) / batch_.block_size;
        if (blocks > recall.max_blocks)
            throw std::invalid_argument("sequence " + std::to_string(s) + " has " + std::to_string(blocks) +
                                        " blocks that may be recalled, but recall_table holds " +
                                        std::to_string(recall.max_blocks));
    }
}

// Replaces `result` of a row by what it gives with recalled entries, if there are any. `spans` and `result` are the job's:
// what its spans give together, and that with all summaries.
void AttentionPlan::recall_row(const LayerArgs& layer, const Job& job, int row, float* scratch, const float* spans,
                               float* result) {
    const RecallArgs& recall = *layer.recall;
    const Sequence& seq = batch_.seqs[size_t(job.seq)];
    const int64_t at = job.row0 + row, index = row_index(job, row), d = shape_.head_dim;
    const double lse = double(result[row]) + std::log(double(result[job.rows + row]));
    if (!(peak_[size_t(index)] - lse > std::log(recall.share) - kSlack)) return;
    const int64_t num_summarised = batch_.summarised_at(seq.seq_len - seq.q_len + at / group_);
    const Summarised& read = batch_.summarised_of(seq, num_summarised);

    auto take = [&scratch](int64_t floats) {
        float* piece = scratch;
        scratch += line_up(floats);
        return piece;
    };
    const int value_bits = layer.compact.value_bits;
    const int64_t key_bytes = record_layout(int(d)).bytes, value_bytes = value_layout(int(d), value_bits).bytes;
    float* q = take(d);
    std::copy_n(layer.q + (seq.first_row + at / group_) * layer.q_stride + (job.kv_head * group_ + at % group_) * d, d, q);
    SpanTask task{};
    task.rows = task.num_micro = task.micro[0] = 1;
    task.head_dim = int(d);
    task.scale = layer.scale;
    task.q_packed = q;
    task.block_shift = block_shift_;
    task.value_bits = value_bits;
    task.scores = take(kScoreStride);
    task.k_panel = take(kPanel * d);
    task.v_block = take(kValueKeys * d);
    task.m = take(d + 2);
    task.l = task.m + 1;
    task.acc = task.m + 2;
    float* own = take(d + 2);
    const RowPartial total{own, own + 1, own + 2};
    uint8_t* records = reinterpret_cast<uint8_t*>(scratch);
    const int32_t lo = 0;
    int32_t hi = 0;
    task.lo = &lo;
    task.hi = &hi;

    // The partials of the summaries, as run_summaries has them, with these biases; f(first key, keys) after each.
    std::vector<float> bias(batch_.summary_bias.begin() + read.first * kGroupBlocks,
                            batch_.summary_bias.begin() + (read.first + read.count) * kGroupBlocks);
    const auto each_partial = [&](const auto& f) {
        SpanTask part = task;
        part.key = layer.compact.key + job.kv_head * key_bytes;
        part.value = layer.compact.value + job.kv_head * value_bytes;
        part.block_stride = shape_.num_kv_heads;
        for (int block = 0; block < read.count; block += kSpanBlocks) {
            hi = std::min(kSpan, read.keys - block * kGroupBlocks);
            part.blocks = batch_.summary_blocks.data() + read.first + block;
            part.bias = bias.data() + block * kGroupBlocks;
            isa_.span(part);
            f(part, block * kGroupBlocks, hi);
        }
    };

    const int64_t* table = recall.table + job.seq * recall.max_blocks * 2;
    const int64_t* strides = recall.strides + job.seq * recall.max_blocks * 2;
    std::vector<int64_t> blocks;
    std::vector<int> entries;
    int64_t missing = 0;
    each_partial([&](const SpanTask& part, int first, int keys) {
        for (int j = 0; j < keys; ++j) {
            const StandsFor& summary = batch_.stands_for[size_t(read.first + (first + j) / kGroupBlocks)];
            if (summary.each == 0) continue;
            if (!(double(part.scores[j]) * std::exp(double(*part.m) - lse) > recall.share)) continue;
            const int64_t begin = summary.block + (first + j) % kGroupBlocks * summary.each;
            if (std::find(table + 2 * begin, table + 2 * (begin + summary.each), 0) != table + 2 * (begin + summary.each)) {
                ++missing;
                continue;
            }
            entries.push_back(first + j);
            for (int64_t i = 0; i < summary.each; ++i) blocks.push_back(begin + i);
        }
    });
    if (recall.report != nullptr && (missing > 0 || !entries.empty())) {
        const std::lock_guard<std::mutex> guard(report_);
        recall.report[2 * job.seq] += double(entries.size());
        recall.report[2 * job.seq + 1] += double(missing);
    }
    if (entries.empty()) return;

    // The others of the summaries, the recalled keys in order of position, then the row's spans.
    for (const int entry : entries) bias[size_t(entry)] = -std::numeric_limits<float>::infinity();
    *total.m = -std::numeric_limits<float>::infinity();
    std::fill(total.l, total.acc + d, 0.0f);
    double peak = -std::numeric_limits<double>::infinity(), mass = peak;
    each_partial([&](const SpanTask& part, int first, int keys) {
        note_weights(part, 0, first == 0 ? kGroupBlocks : 0, keys, &mass, &peak);
        merge(isa_, int(d), part, total);
    });
    mass_[size_t(index)] = mass;
    int32_t order[kSpanBlocks];
    for (int i = 0; i < kSpanBlocks; ++i) order[i] = i;
    task.blocks = order;
    task.block_stride = 1;
    task.key = records;
    task.value = records + kSpanBlocks * key_bytes;
    for (size_t first = 0; first < blocks.size(); first += kSpanBlocks) {
        const int count = int(std::min<size_t>(kSpanBlocks, blocks.size() - first));
        for (int i = 0; i < count; ++i) {
            const int64_t* address = table + 2 * blocks[first + size_t(i)];
            const int64_t* stride = strides + 2 * blocks[first + size_t(i)];
            const auto at_layer = [&](int which, int64_t bytes) {
                return reinterpret_cast<const uint8_t*>(address[which] + recall.layer * stride[which] + job.kv_head * bytes);
            };
            std::memcpy(records + i * key_bytes, at_layer(0, key_bytes), size_t(key_bytes));
            std::memcpy(records + kSpanBlocks * key_bytes + i * value_bytes, at_layer(1, value_bytes), size_t(value_bytes));
        }
        hi = count * kGroupBlocks;
        isa_.span(task);
        merge(isa_, int(d), task, total);
    }
    const float *m = spans + row, *l = spans + job.rows + row, *acc = spans + 2 * job.rows + row * d;
    isa_.merge(1, int(d), m, l, acc, total.m, total.l, total.acc);
    result[row] = *total.m;
    result[job.rows + row] = *total.l;
    std::copy_n(total.acc, d, result + 2 * job.rows + row * d);
}

}  // namespace octavo
