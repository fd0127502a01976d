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

// The layer's compact history, records of compact_rows.h: key and value [num_blocks, num_kv_heads, block_size / 16].
struct CompactArgs {
    const uint8_t* key = nullptr;
    const uint8_t* value = nullptr;
    int64_t num_blocks = 0;
    int value_bits = 0;
    const uint16_t* mean_value = nullptr;  // for top-k attention, as in its planes
    const uint16_t* bounds = nullptr;
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
};

struct Sequence {
    int64_t first_row;  // of q
    int64_t q_len;      // its last queries
    int64_t seq_len;
    int64_t first_block;  // in PagedBatch::blocks
    int64_t first_compact;  // in PagedBatch::compact
};

// Which blocks are read in compact form: with a window above 0 those that lie wholly before position - window, through
// table [num_seqs, max_blocks].
struct History {
    const int32_t* table = nullptr;
    int64_t max_blocks = 0;
    int64_t window = 0;
};

// A step's integers, checked and copied.
struct PagedBatch {
    // block_table [num_seqs, max_blocks], seq_lens [num_seqs], cu_seqlens_q [num_seqs + 1] are read
    // here and not kept. Throws std::invalid_argument, in one sentence, for what cannot be right.
    PagedBatch(const int32_t* block_table, const int32_t* seq_lens, const int32_t* cu_seqlens_q, int64_t num_seqs,
               int64_t max_blocks, int block_size, const History& history);
    // Throws std::invalid_argument if a block lies outside a cache of so many.
    void check_blocks(int64_t num_blocks, const CompactArgs& compact) const;
    // How many of the first blocks a query at this position reads in compact form.
    int64_t compact_blocks(int64_t position) const {
        return history_window > 0 && position > history_window ? (position - history_window) / block_size : 0;
    }

    std::vector<Sequence> seqs;
    std::vector<int32_t> blocks;
    std::vector<int32_t> compact;  // those that its last query reads in compact form
    int64_t num_tokens = 0;
    int32_t max_block = -1, max_compact = -1;
    int64_t history_window;
    int block_size;
};

class AttentionPlan {
public:
    // topk [num_seqs] or nullptr: sequences with a number above 0 are left out, and their rows of the result
    // alone. share: what sequences have in common is read once; it changes no result.
    AttentionPlan(const PagedBatch& batch, const int32_t* topk, const Shape& shape, bool share, ThreadPool& pool,
                  const Isa& isa);

    void run(const LayerArgs& layer);

    int64_t num_tokens() const { return batch_.num_tokens; }
    const Shape& shape() const { return shape_; }
    const Isa& isa() const { return isa_; }
    // Memory that the plan holds for its layers, once one has run.
    int64_t scratch_bytes() const { return memory_size_ * int64_t(sizeof(float)); }
    // Of the last layer that ran: (key, KV head) pairs whose K and V were read, counted again for
    // every tile of rows that read them.
    int64_t keys_read() const;

private:
    // Rows row0 .. row0 + rows - 1 of a sequence's (token, head of the group) pairs, one KV head. Its
    // partials are merged in the order of position, whoever computed them.
    struct Job {
        int64_t seq;
        int kv_head;
        int64_t row0;
        int rows;
        int64_t span_begin;
        int64_t span_end;
        int64_t partials = -1;  // where its partials lie, when it is not one item alone
        int64_t own_begin = 0;  // while work is divided: the first span that no item has yet
    };
    // What one thread computes at a stretch: the rows of some jobs, whose sequences have the same
    // blocks there, against some spans.
    struct Item {
        int64_t first_part;  // in parts_
        int64_t parts;
        int rows;
        int64_t span_begin;
        int64_t span_end;
        int64_t keys_read = 0;
    };

    void divide_work(int64_t window);
    void make_jobs(int64_t window);
    void share_spans(const Group& group, int kv_head);
    void add_items(const int64_t* jobs, int64_t count, int64_t span_begin, int64_t span_end);
    bool keep_partials(Job* job);
    void run_item(const LayerArgs& layer, Item* item, float* scratch, float* partials) const;
    void complete(const LayerArgs& layer, const Item& item, float* partials);
    void finish(const LayerArgs& layer, const Job& job, const float* m, const float* l, const float* acc) const;
    int64_t partial_floats(int rows) const { return int64_t(rows) * (shape_.head_dim + 2); }
    int64_t scratch_floats() const;
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
