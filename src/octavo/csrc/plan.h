// Attention over a paged cache: what one step's layers share, and running a layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "groups.h"
#include "paged_batch.h"
#include "pool.h"

namespace octavo {

// Picks the kernels: "auto" (the best that the CPU runs), "avx512", "avx2" or "portable".
// Throws std::invalid_argument for a name that is unknown, not compiled in, or not runnable here.
const Isa& choose_isa(const std::string& name);

struct Shape {
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int block_size;
    bool half;  // K and V are float16

    bool operator==(const Shape& other) const {
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim &&
               block_size == other.block_size && half == other.half;
    }
};

// Tokens behind summaries that rows ask for. An entry whose share of a row's softmax is above `share` is read as its
// blocks, where all of them are there: as addresses of layer 0's key and value records, 0 where a block is not, and bytes
// from one layer to the next, each [num_seqs, max_blocks, 2].
struct RecallArgs {
    double share;
    const int64_t* table;
    const int64_t* strides;
    int64_t max_blocks;
    int64_t layer;
    double* report;  // [num_seqs, 2], to which entries that were recalled and entries that were not there are added
};

// One layer's tensors. q and out: [num_tokens, num_heads, head_dim], a token's heads contiguous,
// tokens q_stride elements apart (out is dense). key and value: [num_blocks, num_kv_heads,
// block_size, head_dim], dense. lse: [num_tokens, num_heads], or nullptr.
struct LayerArgs {
    const float* q;
    int64_t q_stride;
    const void* key;
    const void* value;
    int64_t num_blocks;
    float scale;
    int64_t window;  // 0: none
    float* out;
    float* lse;
    CompactArgs compact = {};
    // [num_tokens, num_heads], to which is added how much of each row's softmax fell on summaries; or nullptr.
    float* mass = nullptr;
    const RecallArgs* recall = nullptr;
};

class AttentionPlan {
public:
    // topk [num_seqs] or nullptr: sequences with a number above 0 are left out, and their rows of the result
    // alone. share: what sequences have in common is read once; it changes no result.
    AttentionPlan(const PagedBatch& batch, const int32_t* topk, const Shape& shape, bool share, ThreadPool& pool,
                  const Isa& isa);

    void run(const LayerArgs& layer);

    int64_t num_tokens() const { return batch_.num_tokens; }
    int64_t num_seqs() const { return int64_t(batch_.seqs.size()); }
    const Shape& shape() const { return shape_; }
    const Isa& isa() const { return isa_; }
    // Memory that the plan holds for its layers, once one has run.
    int64_t scratch_bytes() const { return memory_size_ * int64_t(sizeof(float)); }
    // Of the last layer that ran: (key, KV head) pairs whose K and V were read, counted again for
    // every tile of rows that read them.
    int64_t keys_read() const;

private:
    // Rows row0 .. row0 + rows - 1 of a sequence's (token, head of the group) pairs, one KV head. Its
    // partials are merged in the order of position, whoever computed them; then that of the summaries with what they
    // give together.
    struct Job {
        int64_t seq;
        int kv_head;
        int64_t row0;
        int rows;
        int64_t span_begin;
        int64_t span_end;
        bool summarised = false;  // some of its rows read summaries: their partial is kept behind those of the spans
        int64_t partials = -1;  // where its partials lie, when it is not one item alone
        int64_t own_begin = 0;  // while work is divided: the first span that no item has yet
    };
    // What one thread computes at a stretch, against some spans: the rows of some jobs, either of one KV head and of
    // sequences that have the same blocks there, or of one sequence's single query in several KV heads.
    struct Item {
        int64_t first_part;  // in parts_
        int64_t parts;
        int rows;
        bool several_heads;
        int64_t span_begin;
        int64_t span_end;
        int64_t keys_read = 0;
    };

    void divide_work(int64_t window);
    void make_jobs(int64_t window);
    void share_spans(const Group& group, int kv_head);
    int64_t heads_together(int64_t job);
    void add_items(const int64_t* jobs, int64_t count, int64_t span_begin, int64_t span_end);
    bool keep_partials(Job* job);
    void run_item(const LayerArgs& layer, Item* item, float* scratch, float* partials);
    void complete(const LayerArgs& layer, const Item& item, float* scratch, float* partials);
    void finish(const LayerArgs& layer, const Job& job, float* scratch_end, float* spans, float* summaries);
    void recall_row(const LayerArgs& layer, const Job& job, int row, float* scratch, const float* spans, float* result);
    void check_recall(const RecallArgs& recall) const;
    int64_t run_summaries(const Job& job, const int64_t* num_summarised, SpanTask task, float* partial);
    static void note_weights(const SpanTask& task, int row, int first, int end, double* mass, double* peak);
    int64_t row_index(const Job& job, int row) const;
    int64_t partial_floats(int rows) const { return int64_t(rows) * (shape_.head_dim + 2); }
    int64_t scratch_floats() const;
    int64_t recall_floats() const;
    std::vector<int32_t> identity(const Sequence& seq) const;

    PagedBatch batch_;
    Shape shape_;
    ThreadPool& pool_;
    const Isa& isa_;
    int group_;
    int block_shift_;
    std::vector<std::vector<int32_t>> identities_;  // that chains are of, with compact history
    std::vector<Chain> chains_;
    std::vector<Group> groups_;

    // The division of work of the last window asked for, and memory that layers reuse.
    std::mutex busy_;
    int64_t divided_window_ = -1;
    bool summaries_ = false;  // read in layers of that window
    std::vector<Job> jobs_;
    std::vector<Item> items_;
    std::vector<int64_t> parts_;      // jobs
    std::vector<int64_t> first_job_;  // of each sequence
    int64_t work_ = 0;                // rows times spans
    int max_rows_ = 0;
    std::unique_ptr<std::atomic<int64_t>[]> spans_left_;  // of each job
    int64_t partials_size_ = 0;
    std::unique_ptr<float[]> memory_;
    int64_t memory_size_ = 0;
    // Of each row: log of the sum of exp(score) over its summaries, and the largest score; empty where nobody asks.
    std::vector<double> mass_, peak_;
    std::mutex report_;
};

// Scatters rows of k and v ([num_tokens, num_kv_heads, head_dim], tokens k_stride and v_stride elements apart)
// into the cache; slot -1 is skipped. Throws std::invalid_argument for a slot outside the cache,
// before anything is written.
struct WriteArgs {
    const float* k;
    const float* v;
    int64_t k_stride;
    int64_t v_stride;
    const int64_t* slots;
    int64_t num_tokens;
    void* key;
    void* value;
    int64_t num_blocks;
};
void write_kv(const WriteArgs& args, const Shape& shape, const Isa& isa);

// Reads every byte once, the pool's threads each their own part.
uint64_t read_memory(const void* data, int64_t bytes, ThreadPool& pool, const Isa& isa);

}  // namespace octavo
