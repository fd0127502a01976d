// Top-k attention over a paged cache: one step's plan.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "plan.h"
#include "topk_rows.h"

namespace octavo {

class TopkTile;

// The kernels that go with an instruction set.
const PagedTopkIsa& paged_kernels(const Isa& isa);

// The least float16 that is no smaller than x >= 0; infinite above the greatest, and for NaN.
uint16_t half_up(double x, const Isa& isa);
// Writes the record of 16 keys: element (key, d) at key + (i * head_dim + d). False where nothing is known of them.
bool seal_record(const void* key, bool half, int head_dim, Reference reference, const Isa& isa, uint8_t* record);
// The mean of 16 values as float16 [head_dim]; its first is NaN where it or the keys' mean is not `known`.
void seal_mean_value(const void* value, bool half, bool known, int head_dim, const Isa& isa, uint16_t* mean);
// The least and then the greatest of 16 keys in each dimension: int8 codes [2][head_dim], and the float that a code
// stands for; that is NaN where a key is not finite.
constexpr int bounds_bytes(int head_dim) { return 2 * head_dim + 4; }
void seal_bounds(const void* key, bool half, int head_dim, uint8_t* bounds);
// Fills all of `query` but q itself; `code` is [head_dim].
void prepare_query(const float* q, int head_dim, float scale, int16_t* code, ScanQuery* query);

// For tests: what the scan says of keys [16 num_records, head_dim], and the scores, one chain of fused
// multiply-adds over d times the scale, by the shortest code. value, bound, score: [num_queries, 16 num_records].
struct ScanKeys {
    const void* key;
    bool half;
    int num_records;
    int head_dim;
    float scale;
    Reference reference;
};
void scan_bounds(const float* q, int num_queries, const ScanKeys& keys, float* value, float* bound, float* score,
                 const Isa& isa);

// What became of a sequence's rows, a row being a query and a head; sums over rows and layers.
struct TopkReport {
    double rows, visible, kept, rescored, dropped_sum, dropped_max;
    // Steps of few queries only, where reading is what costs: K, V and plane that were read, and K and V of the
    // keys that they see, each read once for all queries and heads of its group.
    double bytes, dense_bytes;
};

// How the rows of a sequence are attended to.
struct TopkPolicy {
    int32_t topk;    // keys that a row keeps; 0: it is dense
    int32_t recent;  // of these, the last visible ones
    int32_t tail;    // 1: what is not kept enters by the means of its spans
    int32_t fast;    // 1: only keys of the records that rank highest compete
    int32_t least;   // above 0: keys compete that have so many millionths of the row's softmax, where it sees kAdaptTo
                     // keys or more, and kAdaptTo / n times as many where it sees n >= kAdaptFrom; see topk_adapt.cpp
};

// Between these numbers of visible keys an adaptive budget asks for a fixed multiple of an equal share.
constexpr int64_t kAdaptFrom = 1024, kAdaptTo = 8192;

// Rows that see no more than these keys are dense.
inline int dense_keys(const TopkPolicy& policy) { return policy.least > 0 ? policy.recent : policy.topk; }

// What lies beside K and V, [num_blocks, num_kv_heads, block_size / 16] each; nullptr for what there is not.
struct TopkPlanes {
    uint8_t* scan;         // records; without it nothing is scanned
    uint16_t* mean_value;  // [head_dim], see seal_mean_value
    uint8_t* bounds;       // [bounds_bytes(head_dim)], see seal_bounds
};

struct TopkLayerArgs {
    LayerArgs layer;
    TopkPlanes planes;
    TopkReport* report;   // [num_seqs], added to
    int32_t* position;    // [num_tokens, num_heads, max_topk] the kept keys, then -1; or nullptr
    float* dropped;       // [num_tokens, num_heads] an upper bound of the dropped mass; or nullptr
};

// The sequences with a budget above 0 of a step, every row by the definition: of its visible keys the last
// `recent`, and of the others the topk - recent with the highest scores, ties to the lowest position. A row
// that sees no more than topk keys is dense. A row depends on its query and the keys it sees, to the bit.
class TopkPlan {
public:
    TopkPlan(const PagedBatch& batch, const TopkPolicy* policies, const Shape& shape, ThreadPool& pool, const Isa& isa);

    ~TopkPlan();

    void run(const TopkLayerArgs& args);
    int64_t num_tokens() const { return batch_.num_tokens; }
    int max_topk() const { return max_topk_; }
    // Bytes of K, V and plane that the last layer read.
    int64_t bytes_read() const;

private:
    friend class TopkTile;

    // How the keys of a tile of rows are found.
    enum class Way { score, scan, rank, adapt };
    struct Item {
        int64_t seq;
        int kv_head;
        int64_t row0;  // of the sequence's (token, head of the group) pairs
        int rows;
        Way way;
        double cost;
        TopkReport report;
        int64_t bytes;
        // Where few queries read many keys, these are scanned before it runs, in parts: every num_kv_heads-th from this one.
        int64_t first_part, parts;
        int part_row;      // of a part's rows: its own first
        int64_t scan_end;  // keys behind it are scored
    };
    // What a part of a row's keys leaves in the race.
    struct Found {
        std::vector<int32_t> position;
        std::vector<float> value, bound;  // bound 0: `value` is the score
        float limit, dropped;             // `dropped` is relative to the limit
        int64_t rescored;
    };
    // Rows against the records [begin, end). The parts of all KV heads lie one after the other, and one thread reads
    // them together, so that it reads memory in the order of addresses.
    struct Part {
        Item item;
        int64_t begin, end;
        std::vector<Found> found;
        std::vector<float> rank;  // [rows][end - begin]
    };
    // A span of 16 that this step completes.
    struct Seal {
        int64_t seq;
        int64_t record;
    };

    void divide(int64_t window, bool planes);
    void cut(const Item& item, int64_t window, int64_t scans);
    void run_piece(const TopkLayerArgs& args, int thread, int64_t piece);
    // Keys whose records all rows of an item see whole, before their queries and recent keys.
    std::pair<int64_t, int64_t> scan_range(const Item& item, int64_t window) const;
    static std::pair<int64_t, int64_t> ranked(const TopkPolicy& policy, int64_t position, int64_t window);
    std::pair<int64_t, int64_t> rank_range(const Item& item, int64_t window) const;
    void seal(const TopkLayerArgs& args);
    void check(const TopkPlanes& planes, const CompactArgs& compact) const;
    // Whether rows of the sequence may be other than dense.
    bool active(size_t seq) const;

    PagedBatch batch_;
    std::vector<TopkPolicy> policies_;
    Shape shape_;
    ThreadPool& pool_;
    const Isa& isa_;
    const TopkIsa& select_;
    const PagedTopkIsa& paged_;
    int group_;
    int block_shift_;
    int max_topk_ = 0, max_places_ = 0;
    bool any_tail_ = false, any_fast_ = false, any_adaptive_ = false;
    std::vector<Seal> seals_;

    std::mutex busy_;
    int64_t divided_window_ = -1;
    bool divided_planes_ = false;
    std::vector<Item> items_;
    std::vector<Part> parts_;
    std::vector<std::unique_ptr<TopkTile>> tiles_;       // of each thread
    std::vector<std::unique_ptr<TopkTile>> part_tiles_;  // of each thread and KV head
};

}  // namespace octavo
