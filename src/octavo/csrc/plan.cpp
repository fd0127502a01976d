// Who computes what. Nothing here can change a result: see span_kernel.inl.
#include "plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "compact_rows.h"
#include "linear_kernels.h"

namespace octavo {
namespace {

// More partials than this are not kept: the job then stays with one thread.
constexpr int64_t kMaxPartialFloats = int64_t(64) << 20;
// Of all KV heads together there must be so many spans a thread; and so many items a thread are made of them.
constexpr int64_t kSpansEach = 4;

// Each piece of memory starts on a line of its own.
int64_t line_up(int64_t floats) { return (floats + 15) & ~int64_t(15); }

int log2_exact(int x) {
    int shift = 0;
    while ((1 << shift) < x) ++shift;
    return shift;
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

const Isa& choose_isa(const std::string& name) {
    const bool have_avx2 = avx2_isa() != nullptr && avx2_linear() != nullptr && cpu_has_avx2();
    const bool have_avx512 = have_avx2 && cpu_has_avx512() && avx512_linear() != nullptr;
    if (name == "portable" || (name == "auto" && !have_avx2)) return portable_isa();
    if (name != "auto" && name != "avx2" && name != "avx512")
        refuse("isa must be auto, avx512, avx2 or portable, got '" + name + "'");
    if (!have_avx2) refuse("isa " + name + " needs a CPU with AVX2, FMA and F16C");
    if (name == "avx2" || (name == "auto" && !have_avx512)) return *avx2_isa();
    if (!have_avx512) refuse("isa avx512 needs a CPU with AVX-512 F, BW, VL and DQ");
    // Wider vectors are for linear layers; everything else is as on AVX2, with the same results.
    static const Isa avx512 = [] {
        Isa isa = *avx2_isa();
        isa.name = "avx512";
        return isa;
    }();
    return avx512;
}

AttentionPlan::AttentionPlan(const PagedBatch& batch, const int32_t* topk, const Shape& shape, bool share,
                             ThreadPool& pool, const Isa& isa)
    : batch_(batch),
      shape_(shape),
      pool_(pool),
      isa_(isa),
      group_(shape.num_heads / shape.num_kv_heads),
      block_shift_(log2_exact(shape.block_size)) {
    for (size_t s = 0; topk != nullptr && s < batch_.seqs.size(); ++s)
        if (topk[s] > 0) batch_.seqs[s].q_len = 0;
    if (!share) return;
    for (int64_t s = 0; s < int64_t(batch_.seqs.size()); ++s) {
        const Sequence& seq = batch_.seqs[size_t(s)];
        // More rows than a tile holds gain nothing from company.
        if (seq.q_len == 0 || seq.q_len * group_ > kTileRows || seq.seq_len < kSpan) continue;
        // What is read in place of a span differs from query to query then.
        if (batch_.summarised_at(seq.seq_len - 1) > 0) continue;
        chains_.push_back({s, batch_.blocks.data() + seq.first_block, seq.seq_len / kSpan});
        if (batch_.history_window == 0) continue;
        identities_.push_back(identity(seq));
        chains_.back().blocks = identities_.back().data();
    }
    groups_ = find_groups(&chains_, (batch_.history_window > 0 ? 2 : 1) * (kSpan >> block_shift_));
}

// Two numbers a block: its compact id where some query of the step reads it so, its id where some query reads it as
// stored, else -1. Sequences with the same numbers can be read together.
std::vector<int32_t> AttentionPlan::identity(const Sequence& seq) const {
    const int64_t some = batch_.compact_blocks(seq.seq_len - 1), all = batch_.compact_blocks(seq.seq_len - seq.q_len);
    const int64_t count = (seq.seq_len + batch_.block_size - 1) / batch_.block_size;
    std::vector<int32_t> numbers;
    numbers.reserve(size_t(2 * count));
    for (int64_t b = 0; b < count; ++b) {
        numbers.push_back(b < some ? batch_.compact[size_t(seq.first_compact + b)] : -1);
        numbers.push_back(b < all ? -1 : batch_.blocks[size_t(seq.first_block + b)]);
    }
    return numbers;
}

void AttentionPlan::make_jobs(int64_t window) {
    for (size_t s = 0; s < batch_.seqs.size(); ++s) {
        const int64_t rows = batch_.seqs[s].q_len * group_, start = batch_.seqs[s].seq_len - batch_.seqs[s].q_len;
        first_job_.push_back(int64_t(jobs_.size()));
        for (int64_t row0 = 0; row0 < rows; row0 += kTileRows) {
            const int count = int(std::min<int64_t>(kTileRows, rows - row0));
            const int64_t first = start + row0 / group_, last = start + (row0 + count - 1) / group_;
            const int64_t kept = summaries_ ? batch_.first_kept(batch_.summarised_at(first)) : 0;
            const int64_t lowest = std::max(kept, window > 0 ? first - window + 1 : 0);
            const bool summarised = summaries_ && batch_.summarised_at(last) > 0;
            for (int h = 0; h < shape_.num_kv_heads; ++h) {
                jobs_.push_back({int64_t(s), h, row0, count, lowest / kSpan, last / kSpan + 1, summarised});
                jobs_.back().own_begin = jobs_.back().span_begin;
                work_ += count * (jobs_.back().span_end - jobs_.back().span_begin);
            }
        }
    }
}

// Memory for a job's partials, so that several items can compute them; false when there is none left.
bool AttentionPlan::keep_partials(Job* job) {
    if (job->partials >= 0) return true;
    const int64_t count = job->span_end - job->span_begin + (job->summarised ? 1 : 0);
    const int64_t floats = count * line_up(partial_floats(job->rows));
    if (partials_size_ + floats > kMaxPartialFloats) return false;
    job->partials = partials_size_;
    partials_size_ += floats;
    return true;
}

// How many KV heads' jobs, from this one on, are better computed together: all of a sequence's, or this one alone.
int64_t AttentionPlan::heads_together(int64_t job) {
    const Job& first = jobs_[size_t(job)];
    const int64_t heads = shape_.num_kv_heads, rows = heads * group_;
    const bool fits = heads > 1 && group_ <= kMicroRows && heads <= kMaxMicroTiles && rows <= kTileRows;
    if (!fits || first.kv_head != 0 || batch_.seqs[size_t(first.seq)].q_len != 1 || batch_.history_window > 0) return 1;
    // Every thread needs something to do.
    if (work_ < rows * pool_.num_threads() * kSpansEach) return 1;
    for (int64_t j = job; j < job + heads; ++j)
        if (jobs_[size_t(j)].own_begin != first.own_begin || !keep_partials(&jobs_[size_t(j)])) return 1;
    return heads;
}

// The rows of these jobs against these spans, which is one item or, for the threads' sake, several.
void AttentionPlan::add_items(const int64_t* jobs, int64_t count, int64_t span_begin, int64_t span_end) {
    int rows = 0;
    for (int64_t i = 0; i < count; ++i) rows += jobs_[size_t(jobs[i])].rows;
    max_rows_ = std::max(max_rows_, rows);
    // About eight items a thread, or half as many with several heads: an item's first span has nobody to prefetch it.
    const bool several_heads = count > 1 && jobs_[size_t(jobs[0])].seq == jobs_[size_t(jobs[1])].seq;
    const int64_t items = int64_t(pool_.num_threads()) * (several_heads ? kSpansEach : 8);
    int64_t piece = std::max<int64_t>(1, work_ / (rows * items));
    const int64_t spans = span_end - span_begin;
    if (pool_.num_threads() == 1 || spans <= 2 * piece || !keep_partials(&jobs_[size_t(*jobs)])) piece = spans;
    const int64_t first_part = int64_t(parts_.size());
    parts_.insert(parts_.end(), jobs, jobs + count);
    for (int64_t span = span_begin; span < span_end; span += piece)
        items_.push_back({first_part, count, rows, several_heads, span, std::min(span + piece, span_end)});
}

// One KV head's items for the spans of a group: whole sequences are put together until a tile is full.
void AttentionPlan::share_spans(const Group& group, int kv_head) {
    std::vector<int64_t> tile;
    int rows = 0;
    int64_t begin = 0;
    const auto close = [&] {
        if (tile.size() > 1) {
            for (int64_t j : tile) {
                Job& job = jobs_[size_t(j)];
                if (job.own_begin < begin) add_items(&j, 1, job.own_begin, begin);
                job.own_begin = group.span_end;
            }
            add_items(tile.data(), int64_t(tile.size()), begin, group.span_end);
        }
        tile.clear();
        rows = 0;
    };
    for (int64_t i = group.first; i < group.first + group.count; ++i) {
        const int64_t j = first_job_[size_t(chains_[size_t(i)].seq)] + kv_head;
        Job& job = jobs_[size_t(j)];
        // Its window has left these spans, or there is no memory to share them.
        if (job.span_begin >= group.span_end || !keep_partials(&job)) continue;
        if (rows + job.rows > kTileRows) close();
        const int64_t first = std::max(group.span_begin, job.span_begin);
        begin = tile.empty() ? first : std::min(begin, first);
        tile.push_back(j);
        rows += job.rows;
    }
    close();
}

// What sequences share comes first, then what is left of each; the costliest items are dealt out first.
void AttentionPlan::divide_work(int64_t window) {
    summaries_ = batch_.reads_summaries(window);
    jobs_.clear();
    items_.clear();
    parts_.clear();
    first_job_.clear();
    max_rows_ = 0;
    partials_size_ = work_ = 0;
    make_jobs(window);
    for (const Group& group : groups_)
        for (int h = 0; h < shape_.num_kv_heads; ++h) share_spans(group, h);
    for (int64_t j = 0; j < int64_t(jobs_.size()); ++j) {
        const Job& job = jobs_[size_t(j)];
        if (job.own_begin >= job.span_end) continue;
        std::vector<int64_t> together(size_t(heads_together(j)));
        std::iota(together.begin(), together.end(), j);
        add_items(together.data(), int64_t(together.size()), job.own_begin, job.span_end);
        j = together.back();
    }
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
        return a.rows * (a.span_end - a.span_begin) > b.rows * (b.span_end - b.span_begin);
    });
    spans_left_.reset(new std::atomic<int64_t>[jobs_.size()]);
    divided_window_ = window;
}

int64_t AttentionPlan::scratch_floats() const {
    const int64_t rows = max_rows_, d = shape_.head_dim;
    return line_up(rows * d) + line_up(rows * kScoreStride) + line_up(kPanel * d) + line_up(kValueKeys * d) +
           (2 + (batch_.history_window > 0) + (batch_.budget > 0)) * line_up(partial_floats(max_rows_)) + recall_floats();
}

int64_t AttentionPlan::keys_read() const {
    int64_t keys = 0;
    for (const Item& item : items_) keys += item.keys_read;
    return keys;
}

void AttentionPlan::run(const LayerArgs& layer) {
    const std::lock_guard<std::mutex> guard(busy_);
    batch_.check_blocks(layer.num_blocks, layer.compact);
    if (divided_window_ != layer.window) divide_work(layer.window);
    if (items_.empty()) return;
    const bool watched = summaries_ && (layer.mass != nullptr || layer.recall != nullptr);
    for (std::vector<double>* each : {&mass_, &peak_})
        each->assign(size_t(watched ? batch_.num_tokens * shape_.num_heads : 0), -std::numeric_limits<double>::infinity());
    if (layer.recall != nullptr) check_recall(*layer.recall);

    const int threads = pool_.num_threads();
    const int64_t per_thread = scratch_floats();
    const int64_t needed = partials_size_ + threads * per_thread + 16;
    if (needed > memory_size_) {
        memory_.reset(new float[size_t(needed)]);
        memory_size_ = needed;
    }
    float* memory = memory_.get() + ((64 - (reinterpret_cast<uintptr_t>(memory_.get()) & 63)) & 63) / 4;
    float* partials = memory + threads * per_thread;
    for (size_t j = 0; j < jobs_.size(); ++j)
        spans_left_[j].store(jobs_[j].span_end - jobs_[j].span_begin, std::memory_order_relaxed);
    pool_.run(int64_t(items_.size()), [&](int thread, int64_t i) {
        run_item(layer, &items_[size_t(i)], memory + thread * per_thread, partials);
        complete(layer, items_[size_t(i)], memory + thread * per_thread, partials);
    });
}

void AttentionPlan::run_item(const LayerArgs& layer, Item* item, float* scratch, float* partials) {
    const int64_t* parts = parts_.data() + item->first_part;
    const Job& lead = jobs_[size_t(parts[0])];
    const Sequence& lead_seq = batch_.seqs[size_t(lead.seq)];
    const int d = shape_.head_dim, rows = item->rows;
    float* const scratch_end = scratch + scratch_floats();
    auto take = [&scratch](int64_t floats) {
        float* piece = scratch;
        scratch += line_up(floats);
        return piece;
    };
    float* q_packed = take(int64_t(rows) * d);
    SpanTask task;
    task.rows = rows;
    task.head_dim = d;
    task.scale = layer.scale;
    task.q_packed = q_packed;
    task.scores = take(int64_t(rows) * kScoreStride);
    task.k_panel = take(int64_t(kPanel) * d);
    task.v_block = take(int64_t(kValueKeys) * d);
    task.m = take(partial_floats(rows));
    task.l = task.m + rows;
    task.acc = task.l + rows;
    float* total = take(partial_floats(rows));
    int32_t lo[kTileRows], hi[kTileRows];
    task.lo = lo;
    task.hi = hi;
    task.bias = nullptr;
    task.half = shape_.half;
    task.block_shift = block_shift_;
    task.block_stride = int64_t(shape_.num_kv_heads) * shape_.block_size * d;
    const int64_t head_offset = int64_t(lead.kv_head) * shape_.block_size * d * (shape_.half ? 2 : 4);
    task.key = static_cast<const char*>(layer.key) + head_offset;
    task.value = static_cast<const char*>(layer.value) + head_offset;
    task.value_bits = 0;

    const float* query[kTileRows];
    // A row sees its window's keys [first, position], in compact form those before `stored`.
    int64_t first[kTileRows], stored[kTileRows], position[kTileRows], last = 0, last_compact = 0;
    int64_t num_summarised[kTileRows];  // blocks that it reads as summaries
    for (int64_t part = 0, row = 0; part < item->parts; ++part) {
        const Job& job = jobs_[size_t(parts[part])];
        const Sequence& seq = batch_.seqs[size_t(job.seq)];
        for (int64_t at = job.row0; at < job.row0 + job.rows; ++at, ++row) {
            query[row] = layer.q + (seq.first_row + at / group_) * layer.q_stride +
                         (int64_t(job.kv_head) * group_ + at % group_) * d;
            position[row] = seq.seq_len - seq.q_len + at / group_;
            first[row] = layer.window > 0 ? std::max<int64_t>(0, position[row] - layer.window + 1) : 0;
            num_summarised[row] = summaries_ ? batch_.summarised_at(position[row]) : 0;
            first[row] = std::max(first[row], batch_.first_kept(num_summarised[row]));
            stored[row] = std::max(first[row], batch_.compact_blocks(position[row]) * shape_.block_size);
            last = std::max(last, position[row]);
            last_compact = std::max(last_compact, stored[row]);
        }
    }
    task.head_stride = item->several_heads ? int64_t(shape_.block_size) * d : 0;
    task.num_micro = item->several_heads ? int(item->parts) : (rows + kMicroRows - 1) / kMicroRows;
    for (int i = 0, row = 0; i < task.num_micro; ++i) {
        const int size = (rows - row + task.num_micro - i - 1) / (task.num_micro - i);
        task.micro[i] = size;
        for (int r = 0; r < size; ++r)
            for (int k = 0; k < d; ++k) q_packed[int64_t(row) * d + int64_t(k) * size + r] = query[row + r][k];
        row += size;
    }

    // A job that is this item alone keeps a running total; every other one its partials.
    const bool alone = lead.partials < 0;
    if (alone) {
        std::fill(total, total + rows, -std::numeric_limits<float>::infinity());
        std::fill(total + rows, total + partial_floats(rows), 0.0f);
    }
    item->keys_read = 0;
    // A span that rows see in both forms has one partial: that of its compact keys, merged with that of the others.
    const bool has_compact = batch_.history_window > 0;
    SpanTask compact = task;
    if (has_compact) {
        compact.m = take(partial_floats(rows));
        compact.l = compact.m + rows;
        compact.acc = compact.l + rows;
        const int64_t records = shape_.block_size / kRecordKeys;
        compact.block_stride = shape_.num_kv_heads * records;
        compact.key = layer.compact.key + lead.kv_head * records * record_layout(d).bytes;
        compact.value = layer.compact.value + lead.kv_head * records * value_layout(d, layer.compact.value_bits).bytes;
        compact.value_bits = layer.compact.value_bits;
    }
    float* summaries = nullptr;
    if (lead.summarised && item->span_begin == lead.span_begin) {
        const int64_t behind = (lead.span_end - lead.span_begin) * line_up(partial_floats(rows));
        summaries = alone ? take(partial_floats(rows)) : partials + lead.partials + behind;
        item->keys_read += run_summaries(lead, num_summarised, compact, summaries);
    }
    // The keys that rows see of those from their own `from` to before their own `to` + more; false if there are none.
    const auto see = [&](int64_t base, const int64_t* from, const int64_t* to, int64_t more) {
        int lowest = kSpan, highest = 0;
        for (int r = 0; r < rows; ++r) {
            lo[r] = int32_t(std::clamp<int64_t>(from[r] - base, 0, kSpan));
            hi[r] = int32_t(std::clamp<int64_t>(to[r] + more - base, 0, kSpan));
            if (lo[r] >= hi[r]) continue;
            lowest = std::min(lowest, lo[r]);
            highest = std::max(highest, hi[r]);
        }
        item->keys_read += std::max(0, highest - lowest) * (item->several_heads ? item->parts : 1);
        return lowest < highest;
    };
    bool asked = false, compact_asked = false;  // somebody has asked for the span's K
    for (int64_t span = item->span_begin; span < item->span_end; ++span) {
        const int64_t base = span * kSpan;
        const bool more = span + 1 < item->span_end;
        const bool some = has_compact && see(base, first, stored, 0);
        if (some) {
            compact.blocks = batch_.compact.data() + lead_seq.first_compact + (base >> block_shift_);
            compact.cold = !compact_asked;
            compact.next_keys = more ? int(std::clamp<int64_t>(last_compact - base - kSpan, 0, kSpan)) : 0;
            compact_asked = compact.next_keys > 0;
            isa_.span(compact);
        }
        const bool rest = see(base, stored, position, 1);
        if (rest || !some) {
            task.blocks = batch_.blocks.data() + lead_seq.first_block + (base >> block_shift_);
            task.cold = !asked;
            task.next_keys = more ? int(std::min<int64_t>(kSpan, last + 1 - base - kSpan)) : 0;
            asked = rest;
            isa_.span(task);
        }
        if (some && rest) isa_.merge(rows, d, task.m, task.l, task.acc, compact.m, compact.l, compact.acc);
        const SpanTask& result = some ? compact : task;
        if (alone) {
            isa_.merge(rows, d, result.m, result.l, result.acc, total, total + rows, total + 2 * rows);
            continue;
        }
        for (int64_t part = 0, row = 0; part < item->parts; ++part) {
            const Job& job = jobs_[size_t(parts[part])];
            if (span >= job.span_begin) {
                float* m = partials + job.partials + (span - job.span_begin) * line_up(partial_floats(job.rows));
                std::copy(result.m + row, result.m + row + job.rows, m);
                std::copy(result.l + row, result.l + row + job.rows, m + job.rows);
                std::copy(result.acc + row * d, result.acc + (row + job.rows) * d, m + 2 * job.rows);
            }
            row += job.rows;
        }
    }
    if (alone) finish(layer, lead, scratch_end, total, summaries);
}

// Whoever computed the last of a job's partials merges them.
void AttentionPlan::complete(const LayerArgs& layer, const Item& item, float* scratch, float* partials) {
    for (int64_t part = 0; part < item.parts; ++part) {
        const int64_t j = parts_[size_t(item.first_part + part)];
        const Job& job = jobs_[size_t(j)];
        const int64_t done = item.span_end - std::max(item.span_begin, job.span_begin);
        if (job.partials < 0 || done <= 0 || spans_left_[size_t(j)].fetch_sub(done) != done) continue;
        const int64_t stride = line_up(partial_floats(job.rows));
        float* m = partials + job.partials;
        for (int64_t p = 1; p < job.span_end - job.span_begin; ++p) {
            const float* later = m + p * stride;
            isa_.merge(job.rows, shape_.head_dim, later, later + job.rows, later + 2 * job.rows, m, m + job.rows,
                       m + 2 * job.rows);
        }
        finish(layer, job, scratch + scratch_floats(), m, m + (job.span_end - job.span_begin) * stride);
    }
}

// `spans` is what the partials of its spans give together, `summaries` that of the summaries, where it has them.
void AttentionPlan::finish(const LayerArgs& layer, const Job& job, float* scratch_end, float* spans, float* summaries) {
    const float *m = spans, *l = m + job.rows, *acc = l + job.rows;
    if (job.summarised) {
        isa_.merge(job.rows, shape_.head_dim, m, l, acc, summaries, summaries + job.rows, summaries + 2 * job.rows);
        m = summaries, l = m + job.rows, acc = l + job.rows;
        for (int r = 0; layer.recall != nullptr && r < job.rows; ++r)
            recall_row(layer, job, r, scratch_end - recall_floats(), spans, summaries);
    }
    for (int r = 0; r < job.rows; ++r) {
        const int64_t index = row_index(job, r);
        isa_.divide(acc + int64_t(r) * shape_.head_dim, l[r], shape_.head_dim, layer.out + index * shape_.head_dim);
        if (layer.lse == nullptr && layer.mass == nullptr) continue;
        const double lse = double(m[r]) + std::log(double(l[r]));
        if (layer.lse != nullptr) layer.lse[index] = float(lse);
        if (layer.mass != nullptr && summaries_) layer.mass[index] += float(std::exp(mass_[size_t(index)] - lse));
    }
}

// Of a row of a job, in [num_tokens, num_heads].
int64_t AttentionPlan::row_index(const Job& job, int row) const {
    const int64_t at = job.row0 + row;
    return (batch_.seqs[size_t(job.seq)].first_row + at / group_) * shape_.num_heads + int64_t(job.kv_head) * group_ +
           at % group_;
}

void write_kv(const WriteArgs& args, const Shape& shape, const Isa& isa) {
    const int64_t num_slots = args.num_blocks * shape.block_size;
    for (int64_t t = 0; t < args.num_tokens; ++t)
        if (args.slots[t] < -1 || args.slots[t] >= num_slots)
            refuse("slot_mapping[" + std::to_string(t) + "] is " + std::to_string(args.slots[t]) +
                   ", allowed are -1 (skip) to " + std::to_string(num_slots - 1));
    const int d = shape.head_dim;
    for (int64_t t = 0; t < args.num_tokens; ++t) {
        if (args.slots[t] < 0) continue;
        const int64_t block = args.slots[t] / shape.block_size, offset = args.slots[t] % shape.block_size;
        for (int h = 0; h < shape.num_kv_heads; ++h) {
            const int64_t at = ((block * shape.num_kv_heads + h) * shape.block_size + offset) * d;
            const float* k = args.k + t * args.k_stride + int64_t(h) * d;
            const float* v = args.v + t * args.v_stride + int64_t(h) * d;
            if (shape.half) {
                isa.to_half(k, d, static_cast<uint16_t*>(args.key) + at);
                isa.to_half(v, d, static_cast<uint16_t*>(args.value) + at);
            } else {
                std::memcpy(static_cast<float*>(args.key) + at, k, size_t(d) * 4);
                std::memcpy(static_cast<float*>(args.value) + at, v, size_t(d) * 4);
            }
        }
    }
}

uint64_t read_memory(const void* data, int64_t bytes, ThreadPool& pool, const Isa& isa) {
    constexpr int64_t kPiece = 1 << 20;
    std::atomic<uint64_t> sum{0};
    pool.run((bytes + kPiece - 1) / kPiece, [&](int, int64_t piece) {
        const int64_t first = piece * kPiece;
        sum += isa.read(static_cast<const char*>(data) + first, std::min(kPiece, bytes - first));
    });
    return sum;
}

}  // namespace octavo
