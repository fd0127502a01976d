// Who computes what. Nothing here can change a result: see span_kernel.inl.
#include "plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "linear_kernels.h"

namespace octavo {
namespace {

// More partials than this are not kept: the job then stays with one thread.
constexpr int64_t kMaxPartialFloats = int64_t(64) << 20;

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

AttentionPlan::AttentionPlan(const int32_t* block_table, const int32_t* seq_lens, const int32_t* cu_seqlens_q,
                             int64_t num_seqs, int64_t max_blocks, const Shape& shape, ThreadPool& pool,
                             const Isa& isa)
    : shape_(shape),
      pool_(pool),
      isa_(isa),
      group_(shape.num_heads / shape.num_kv_heads),
      block_shift_(log2_exact(shape.block_size)) {
    if (cu_seqlens_q[0] != 0) refuse("cu_seqlens_q must start with 0, got " + std::to_string(cu_seqlens_q[0]));
    for (int64_t s = 0; s < num_seqs; ++s) {
        const std::string who = "sequence " + std::to_string(s);
        const int64_t q_len = int64_t(cu_seqlens_q[s + 1]) - cu_seqlens_q[s], seq_len = seq_lens[s];
        if (q_len < 0) refuse("cu_seqlens_q must not fall, but it does at " + who);
        if (seq_len < q_len)
            refuse(who + " has " + std::to_string(q_len) + " queries but seq_len " + std::to_string(seq_len));
        const int64_t count = (seq_len + shape.block_size - 1) / shape.block_size;
        if (count > max_blocks)
            refuse(who + " needs " + std::to_string(count) + " blocks for seq_len " + std::to_string(seq_len) +
                   " but block_table holds " + std::to_string(max_blocks));
        seqs_.push_back({cu_seqlens_q[s], q_len, seq_len, int64_t(blocks_.size())});
        for (int64_t b = 0; b < count; ++b) {
            const int32_t block = block_table[s * max_blocks + b];
            if (block < 0) refuse(who + " has block " + std::to_string(block) + ", which is negative");
            max_block_ = std::max(max_block_, block);
            blocks_.push_back(block);
        }
    }
    num_tokens_ = cu_seqlens_q[num_seqs];
}

// Row tiles, and of the costly ones also their spans, are dealt out, the costliest first.
void AttentionPlan::divide_work(int64_t window) {
    jobs_.clear();
    items_.clear();
    max_rows_ = 0;
    partials_size_ = 0;
    int64_t total = 0;
    for (size_t s = 0; s < seqs_.size(); ++s) {
        const int64_t rows = seqs_[s].q_len * group_, start = seqs_[s].seq_len - seqs_[s].q_len;
        for (int64_t row0 = 0; row0 < rows; row0 += kTileRows) {
            const int count = int(std::min<int64_t>(kTileRows, rows - row0));
            const int64_t first = start + row0 / group_, last = start + (row0 + count - 1) / group_;
            const int64_t lowest = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
            for (int h = 0; h < shape_.num_kv_heads; ++h) {
                jobs_.push_back({int64_t(s), h, row0, count, lowest / kSpan, last / kSpan + 1});
                total += count * (jobs_.back().span_end - jobs_.back().span_begin);
            }
            max_rows_ = std::max(max_rows_, count);
        }
    }
    for (size_t j = 0; j < jobs_.size(); ++j) {
        Job& job = jobs_[j];
        const int64_t spans = job.span_end - job.span_begin;
        const int64_t partials = spans * line_up(partial_floats(job));
        // About eight items a thread: an item's first span has nobody to prefetch it.
        const int64_t piece = std::max<int64_t>(1, total / (int64_t(job.rows) * pool_.num_threads() * 8));
        const bool split = pool_.num_threads() > 1 && spans > 2 * piece && partials_size_ + partials <= kMaxPartialFloats;
        if (!split) {
            items_.push_back({int64_t(j), job.span_begin, job.span_end});
            continue;
        }
        job.partials = partials_size_;
        partials_size_ += partials;
        for (int64_t span = job.span_begin; span < job.span_end; span += piece)
            items_.push_back({int64_t(j), span, std::min(span + piece, job.span_end)});
    }
    std::stable_sort(items_.begin(), items_.end(), [this](const Item& a, const Item& b) {
        return jobs_[a.job].rows * (a.span_end - a.span_begin) > jobs_[b.job].rows * (b.span_end - b.span_begin);
    });
    divided_window_ = window;
}

int64_t AttentionPlan::scratch_floats() const {
    const int64_t rows = max_rows_, d = shape_.head_dim;
    return line_up(rows * d) + line_up(rows * kScoreStride) + line_up(kPanel * d) + line_up(kValueKeys * d) +
           2 * line_up(rows * (d + 2)) + line_up(2 * rows);
}

void AttentionPlan::run(const LayerArgs& layer) {
    const std::lock_guard<std::mutex> guard(busy_);
    if (max_block_ >= layer.num_blocks)
        refuse("block_table holds block " + std::to_string(max_block_) + " but the cache has " +
               std::to_string(layer.num_blocks) + " blocks");
    if (divided_window_ != layer.window) divide_work(layer.window);
    if (items_.empty()) return;

    const int threads = pool_.num_threads();
    const int64_t per_thread = scratch_floats();
    const int64_t needed = partials_size_ + threads * per_thread + 16;
    if (needed > memory_size_) {
        memory_.reset(new float[size_t(needed)]);
        memory_size_ = needed;
    }
    float* memory = memory_.get() + ((64 - (reinterpret_cast<uintptr_t>(memory_.get()) & 63)) & 63) / 4;
    float* partials = memory + threads * per_thread;
    std::unique_ptr<std::atomic<int64_t>[]> spans_left;
    if (partials_size_ > 0) {
        spans_left.reset(new std::atomic<int64_t>[jobs_.size()]);
        for (size_t j = 0; j < jobs_.size(); ++j) spans_left[j] = jobs_[j].span_end - jobs_[j].span_begin;
    }
    pool_.run(int64_t(items_.size()), [&](int thread, int64_t i) {
        const Item& item = items_[size_t(i)];
        const Job& job = jobs_[size_t(item.job)];
        run_item(layer, item, memory + thread * per_thread, partials);
        // Whoever completes a shared job merges it, in the order of position all the same.
        if (job.partials < 0) return;
        const int64_t done = item.span_end - item.span_begin;
        if (spans_left[size_t(item.job)].fetch_sub(done) != done) return;
        const int64_t stride = line_up(partial_floats(job));
        float* m = partials + job.partials;
        for (int64_t p = 1; p < job.span_end - job.span_begin; ++p) {
            const float* later = m + p * stride;
            isa_.merge(job.rows, shape_.head_dim, later, later + job.rows, later + 2 * job.rows, m, m + job.rows,
                       m + 2 * job.rows);
        }
        finish(layer, job, m, m + job.rows, m + 2 * job.rows);
    });
}

void AttentionPlan::run_item(const LayerArgs& layer, const Item& item, float* scratch, float* partials) const {
    const Job& job = jobs_[size_t(item.job)];
    const Sequence& seq = seqs_[size_t(job.seq)];
    const int d = shape_.head_dim, rows = job.rows;
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
    float* partial = take(partial_floats(job));
    float* total = take(partial_floats(job));
    int32_t* lo = reinterpret_cast<int32_t*>(take(2 * rows));
    int32_t* hi = lo + rows;
    task.lo = lo;
    task.hi = hi;
    task.half = shape_.half;
    task.block_shift = block_shift_;
    task.block_stride = int64_t(shape_.num_kv_heads) * shape_.block_size * d;
    const int64_t head_offset = int64_t(job.kv_head) * shape_.block_size * d * (shape_.half ? 2 : 4);
    task.key = static_cast<const char*>(layer.key) + head_offset;
    task.value = static_cast<const char*>(layer.value) + head_offset;

    task.num_micro = (rows + kMicroRows - 1) / kMicroRows;
    for (int i = 0, row = 0; i < task.num_micro; ++i) {
        const int size = (rows - row + task.num_micro - i - 1) / (task.num_micro - i);
        task.micro[i] = size;
        for (int r = 0; r < size; ++r) {
            const int64_t at = job.row0 + row + r;
            const float* q = layer.q + (seq.first_row + at / group_) * layer.q_stride +
                             (int64_t(job.kv_head) * group_ + at % group_) * d;
            for (int k = 0; k < d; ++k) q_packed[int64_t(row) * d + int64_t(k) * size + r] = q[k];
        }
        row += size;
    }

    const int64_t start = seq.seq_len - seq.q_len;
    std::fill(total, total + rows, -std::numeric_limits<float>::infinity());
    std::fill(total + rows, total + partial_floats(job), 0.0f);
    for (int64_t span = item.span_begin; span < item.span_end; ++span) {
        const int64_t base = span * kSpan;
        for (int r = 0; r < rows; ++r) {
            const int64_t p = start + (job.row0 + r) / group_;
            const int64_t first = layer.window > 0 ? p - layer.window + 1 : 0;
            lo[r] = int32_t(std::clamp<int64_t>(first - base, 0, kSpan));
            hi[r] = int32_t(std::clamp<int64_t>(p + 1 - base, 0, kSpan));
        }
        task.blocks = blocks_.data() + seq.first_block + (base >> block_shift_);
        const int64_t last = start + (job.row0 + rows - 1) / group_;
        task.cold = span == item.span_begin;
        task.next_keys = span + 1 < item.span_end ? int(std::min<int64_t>(kSpan, last + 1 - base - kSpan)) : 0;
        float* m = job.partials < 0
                       ? partial
                       : partials + job.partials + (span - job.span_begin) * line_up(partial_floats(job));
        task.m = m;
        task.l = m + rows;
        task.acc = m + 2 * rows;
        isa_.span(task);
        if (job.partials < 0)
            isa_.merge(rows, d, task.m, task.l, task.acc, total, total + rows, total + 2 * rows);
    }
    if (job.partials < 0) finish(layer, job, total, total + rows, total + 2 * rows);
}

void AttentionPlan::finish(const LayerArgs& layer, const Job& job, const float* m, const float* l,
                           const float* acc) const {
    for (int r = 0; r < job.rows; ++r) {
        const int64_t at = job.row0 + r;
        const int64_t index = (seqs_[size_t(job.seq)].first_row + at / group_) * shape_.num_heads +
                              int64_t(job.kv_head) * group_ + at % group_;
        isa_.divide(acc + int64_t(r) * shape_.head_dim, l[r], shape_.head_dim, layer.out + index * shape_.head_dim);
        if (layer.lse != nullptr) layer.lse[index] = float(double(m[r]) + std::log(double(l[r])));
    }
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
