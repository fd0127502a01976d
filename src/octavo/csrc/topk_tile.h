// A tile of query rows of one sequence and one KV head, and a thread's memory for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "compact_rows.h"
#include "topk_paged.h"

namespace octavo {

class TopkTile {
public:
    // For up to so many rows.
    TopkTile(const TopkPlan& plan, int rows);
    void run(const TopkLayerArgs& args, TopkPlan::Item* item);
    // A part is begun, its records are read in order, and it is ended.
    void begin_part(const TopkLayerArgs& args, TopkPlan::Part* part);
    void read_part(int64_t record, int count, const uint8_t* const* ask);
    void end_part();
    const uint8_t* scan_record(int64_t position) const;
    const uint8_t* bounds_of(int64_t position) const;

private:
    // Sums of exp(score - m).
    struct Mass {
        float m, l;
    };
    struct Row {
        TopkRow best;
        int64_t position;       // of the query
        int64_t first;          // visible key
        int64_t others_end;     // the recent keys start here
        int64_t stored;         // keys before it are read in compact form
        int64_t visible;
        bool settled;
        Mass scored;            // candidates with a score of their own
        Mass kept;              // those of them that won
        Mass recent;            // the recent keys, while a budget adapts
        // While its keys are scanned.
        ScanQuery query;
        int num_candidates;
        bool asked;             // for the memory of their keys
        int32_t* candidate;     // positions, in order
        float* value;
        float* bound;           // 0: `value` is the score
        float limit;            // `places` keys reach it
        float top;              // of `dropped`
        float dropped;
        int64_t rescored;
        bool looked_everywhere; // else nothing is proven of what was dropped
        float slack;            // that scores may lie above what stands for them in `scored` and `kept`
        // While its kept keys are attended to.
        PagedRow kept_row;
        int next;               // of its keys
        int kept_count;         // without the keys that enter beside the kept ones
        Mass all_kept;
    };

    void start();
    void score_all();
    void take(Row& row, const float* scores, int64_t base, int lo, int hi);
    void settle(Row& row);
    void scan_all();
    void scan_some(int row0, int rows, const ScanQuery* queries, const int32_t* start, int count,
                   const uint8_t* const* ask);
    void score_panel(int64_t base, int count, float* scores);
    void ask_for_candidates(Row& row);
    void take_open(Row& row, const float* scores, int64_t base, int lo, int hi);
    void contest(Row& row);
    void limit_candidates(Row& row);
    void keep_found(Row& row, TopkPlan::Found* found);
    void take_found(Row& row, const TopkPlan::Found& found);
    void rank_all();
    void split_queries();
    void rank_some(int64_t begin, int count, const uint8_t* const* ask, float* value, int64_t stride);
    // One of the parts that the item's keys were read in before.
    const TopkPlan::Part& part(int64_t i) const {
        return plan_.parts_[size_t(item_->first_part + i * plan_.shape_.num_kv_heads)];
    }
    void take_ranked(int r, const ScanQuery& query, int64_t first_ranked, int64_t end_ranked);
    void adapt_all();
    void adapt_span(Row& row, int64_t base, int lo, int hi, float* value, const float* bound);
    void adapt_keys(Row& row, int64_t begin, int64_t end);
    void adapt_choose(Row& row);
    float least_score(const Row& row) const;
    std::vector<ScanQuery> scan_queries();
    // The scores of up to 16 keys; the second counts the bytes it reads.
    void score_keys(const Row& row, const int32_t* position, int count, float* score);
    void score_at(const Row& row, const int32_t* position, int count, float* score);
    void take_keys(Row& row, int64_t begin, int64_t end);
    void tighten(Row& row);
    void rescore(Row& row);
    void raise(Row& row, float limit);
    void prefetch_values();
    void start_kept(int r);
    void attend_with_tail();
    void add_edges(Row& row);
    void ask_for_means(int64_t base, int64_t last);
    void finish(int r);
    double dropped_bound(const Row& row) const;
    SpanTask span_task();
    int64_t out_index(int r) const;
    SpanTask compact_task(const SpanTask& stored) const;
    int64_t record_of(int64_t position) const;
    int64_t compact_record_of(int64_t position) const;
    const uint16_t* mean_value_of(int64_t position) const;
    const void* at(const char* base, int64_t position) const;
    void ask_for_keys(const Row& row, const int32_t* position, int count);
    void ask_for_values(const Row& row, const int32_t* position, int count);
    int64_t bytes_of(const Row& row, int64_t position) const;

    const TopkPlan& plan_;
    const TopkLayerArgs* args_ = nullptr;
    TopkPlan::Item* item_ = nullptr;
    TopkPlan::Part* part_ = nullptr;
    std::vector<ScanQuery> part_queries_;
    const Sequence* seq_ = nullptr;
    const int32_t* blocks_ = nullptr;
    int64_t stride_ = 0;
    TopkPolicy policy_{};
    const char *key_ = nullptr, *value_ = nullptr;
    // The compact history of the sequence and KV head, and the keys that all rows read in compact form.
    const int32_t* compact_blocks_ = nullptr;
    ValueLayout value_layout_{};
    RecordLayout key_layout_{};
    int64_t all_compact_ = 0;

    int64_t capacity_;
    std::unique_ptr<float[]> memory_;
    float *q_packed_, *scores_, *values_, *bounds_, *k_panel_, *acc_, *partial_, *expanded_;
    std::vector<Row> rows_;
    std::vector<const float*> queries_;  // of the rows
    std::vector<int32_t> lo_, hi_, order_, ints_, start_;
    std::vector<int16_t> codes_;
    std::vector<uint16_t> means_;  // [16][head_dim] of keys
    std::vector<float> lower_;
    std::vector<float> rank_weight_;  // see RankTask
};

}  // namespace octavo
