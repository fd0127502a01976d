// A step's integers: which sequences there are and which blocks each of their queries reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

// Blocks of a group, see History.
constexpr int kGroupBlocks = 16;

// The layer's compact history, records of compact_rows.h: key and value [num_blocks, num_kv_heads, block_size / 16].
struct CompactArgs {
    const uint8_t* key = nullptr;
    const uint8_t* value = nullptr;
    int64_t num_blocks = 0;
    int value_bits = 0;
    const uint16_t* mean_value = nullptr;  // for top-k attention, as in its planes
    const uint8_t* bounds = nullptr;
};

struct Sequence {
    int64_t first_row;  // of q
    int64_t q_len;      // its last queries
    int64_t seq_len;
    int64_t first_block;  // in PagedBatch::blocks
    int64_t first_compact;  // in PagedBatch::compact
    int64_t first_summarised;  // in PagedBatch::summarised
};

// Which blocks are read in compact form: with a window above 0 those that lie wholly before position - window, through
// table [num_seqs, max_blocks].
//
// With a budget above 0 (a multiple of 16, at least window + 256; blocks of 16) the blocks beyond it, but for block 0, are
// read as summaries, through summaries [num_seqs, max_summaries] of (level, unit, compact block), -1 in unused ones: see
// kernels/history_layout.py for which. A summary's 16 entries stand for 16 * 4^level tokens each.
struct History {
    const int32_t* table = nullptr;
    int64_t max_blocks = 0;
    int64_t window = 0;
    const int32_t* summaries = nullptr;
    int64_t max_summaries = 0;
    int64_t budget = 0;
};

// What the queries of a sequence read that have the same number of blocks summarised: block 0 in compact form, then the
// summaries, oldest first. In PagedBatch::summary_blocks and stands_for, and 16 times as far in PagedBatch::summary_bias.
// Of the last summary's entries only the first may be read: so many keys in all.
struct Summarised {
    int64_t first;
    int count;
    int keys;
};

// The blocks that a summary stands for: entry e for block + e * each to block + (e + 1) * each - 1; each is 0 for block 0
// itself.
struct StandsFor {
    int64_t block;
    int64_t each;
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

    // How many blocks a query at this position reads as summaries, in a layer without a window.
    int64_t summarised_at(int64_t position) const {
        return budget > 0 ? std::max<int64_t>(0, position / block_size - budget / block_size) : 0;
    }
    // The first position after block 0 that is not read as a summary where some are; else 0.
    int64_t first_kept(int64_t num_summarised) const { return num_summarised > 0 ? (1 + num_summarised) * block_size : 0; }
    // What a query reads in place of the keys before first_kept(num_summarised), a number above 0 that some query has.
    const Summarised& summarised_of(const Sequence& seq, int64_t num_summarised) const {
        const int64_t first = std::max<int64_t>(1, summarised_at(seq.seq_len - seq.q_len));
        return summarised[size_t(seq.first_summarised + num_summarised - first)];
    }
    // Whether a layer with this window (0: none) reads summaries. Throws std::invalid_argument for a window that hides
    // some summarised keys from a query and not all.
    bool reads_summaries(int64_t window) const;

    std::vector<Sequence> seqs;
    std::vector<int32_t> blocks;
    std::vector<int32_t> compact;  // those that its last query reads in compact form
    int64_t num_tokens = 0;
    int32_t max_block = -1, max_compact = -1, max_summary = -1;
    int64_t history_window;
    int64_t budget;
    int block_size;
    std::vector<Summarised> summarised;  // of each sequence, one for each number above 0 that a query has
    std::vector<int32_t> summary_blocks;
    std::vector<StandsFor> stands_for;
    std::vector<float> summary_bias;  // of each key: the logarithm of the tokens that it stands for

private:
    void read_history(int64_t s, const History& history);
    void read_summaries(int64_t s, const History& history);
};

}  // namespace octavo
