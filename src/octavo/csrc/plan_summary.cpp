// The partial that rows have of summaries, in place of the spans that these stand for.
//
// Its keys have an order of their own: block 0, read in compact form, and the summaries, oldest first. What a row reads is
// a function of its position, so rows of one tile may read different ones; they are computed apart. 256 keys give a
// partial, as in any span, and a row's are merged in order; then the partials of its spans, which are merged with one
// another first, are merged into that. So the result depends on the row alone here too.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plan.h"

namespace octavo {

// Adds a row's keys [first, end) to *mass, the log of the sum of exp(score), and *peak, the largest score. Their weights
// lie where the scores were.
void AttentionPlan::note_weights(const SpanTask& task, int row, int first, int end, double* mass, double* peak) {
    const float* weight = task.scores + row * kScoreStride;
    double sum = 0.0, most = 0.0;
    for (int j = first; j < end; ++j) {
        sum += weight[j];
        most = std::max(most, double(weight[j]));
    }
    if (sum == 0.0) return;
    const double more = double(task.m[row]) + std::log(sum);
    *mass = std::max(*mass, more) + std::log1p(std::exp(-std::fabs(*mass - more)));
    *peak = std::max(*peak, double(task.m[row]) + std::log(most));
}

// Gives rows with num_summarised[row] > 0 the partial of their summaries, and others an empty one: m, l and acc one after the
// other. `task` has the layer's compact history, and memory of its own for the partials of 256 keys each. Returns how
// many keys were read.
int64_t AttentionPlan::run_summaries(const Job& job, const int64_t* num_summarised, SpanTask task, float* partial) {
    constexpr int kSpanBlocks = kSpan / kGroupBlocks;
    const Sequence& seq = batch_.seqs[size_t(job.seq)];
    int64_t keys_read = 0;
    int32_t lo[kTileRows] = {}, hi[kTileRows];
    float *m = partial, *l = m + job.rows, *acc = l + job.rows;
    std::fill(m, l, -std::numeric_limits<float>::infinity());
    std::fill(l, partial + partial_floats(job.rows), 0.0f);
    task.lo = lo;
    task.hi = hi;
    for (int begin = 0, end = 0; begin < job.rows; begin = end) {
        while (end < job.rows && num_summarised[end] == num_summarised[begin]) ++end;
        if (num_summarised[begin] == 0) continue;
        const Summarised& read = batch_.summarised_of(seq, num_summarised[begin]);
        for (int block = 0; block < read.count; block += kSpanBlocks) {
            const int keys = std::min(kSpan, read.keys - block * kGroupBlocks);
            for (int r = 0; r < job.rows; ++r) hi[r] = begin <= r && r < end ? keys : 0;
            task.blocks = batch_.summary_blocks.data() + read.first + block;
            task.bias = batch_.summary_bias.data() + (read.first + block) * kGroupBlocks;
            task.cold = block == 0;
            task.next_keys = std::clamp(read.keys - (block + kSpanBlocks) * kGroupBlocks, 0, kSpan);
            isa_.span(task);
            isa_.merge(job.rows, shape_.head_dim, task.m, task.l, task.acc, m, l, acc);
            for (int r = begin; r < end && !mass_.empty(); ++r) {
                const int64_t index = row_index(job, r);
                note_weights(task, r, block == 0 ? kGroupBlocks : 0, keys, &mass_[size_t(index)], &peak_[size_t(index)]);
            }
            keys_read += keys;
        }
    }
    return keys_read;
}

}  // namespace octavo
