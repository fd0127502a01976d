#include "paged_batch.h"

#include <cmath>
#include <map>
#include <stdexcept>
#include <utility>

namespace octavo {
namespace {

constexpr int kFan = 4;  // units of a level that become one of the next, as in kernels/history_layout.py

struct SummaryUnit {
    int64_t level, unit;
};

// The summaries that stand for so many blocks, oldest first.
std::vector<SummaryUnit> summary_layout(int64_t num_summarised) {
    std::vector<SummaryUnit> newest_first;
    const int64_t groups = num_summarised / kGroupBlocks;
    if (num_summarised % kGroupBlocks > 0) newest_first.push_back({0, groups});
    for (int64_t level = 0, units = groups; units > 0; ++level) {
        const int64_t kept = units <= kFan ? units : (units - 1) % kFan + 1;
        for (int64_t i = 1; i <= kept; ++i) newest_first.push_back({level, units - i});
        units = (units - kept) / kFan;
    }
    return {newest_first.rbegin(), newest_first.rend()};
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::string who(int64_t s) { return "sequence " + std::to_string(s); }

}  // namespace

PagedBatch::PagedBatch(const int32_t* block_table, const int32_t* seq_lens, const int32_t* cu_seqlens_q,
                       int64_t num_seqs, int64_t max_blocks, int block_size, const History& history)
    : history_window(history.window), budget(history.budget), block_size(block_size) {
    if (cu_seqlens_q[0] != 0) refuse("cu_seqlens_q must start with 0, got " + std::to_string(cu_seqlens_q[0]));
    int64_t num_blocks = 0;
    seqs.reserve(size_t(num_seqs));
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t q_len = int64_t(cu_seqlens_q[s + 1]) - cu_seqlens_q[s], seq_len = seq_lens[s];
        if (q_len < 0) refuse("cu_seqlens_q must not fall, but it does at " + who(s));
        if (seq_len < q_len)
            refuse(who(s) + " has " + std::to_string(q_len) + " queries but seq_len " + std::to_string(seq_len));
        const int64_t count = (seq_len + block_size - 1) / block_size;
        if (count > max_blocks)
            refuse(who(s) + " needs " + std::to_string(count) + " blocks for seq_len " + std::to_string(seq_len) +
                   " but block_table holds " + std::to_string(max_blocks));
        seqs.push_back({cu_seqlens_q[s], q_len, seq_len, num_blocks, int64_t(compact.size()), int64_t(summarised.size())});
        read_history(s, history);
        if (q_len > 0 && summarised_at(seq_len - 1) > 0) read_summaries(s, history);
        num_blocks += count;
    }
    num_tokens = cu_seqlens_q[num_seqs];
    blocks.resize(size_t(num_blocks));
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t count = (seqs[size_t(s)].seq_len + block_size - 1) / block_size;
        const int32_t* from = block_table + s * max_blocks;
        int32_t lowest = 0;
        for (int64_t b = 0; b < count; ++b) {
            lowest = std::min(lowest, from[b]);
            max_block = std::max(max_block, from[b]);
        }
        if (lowest < 0) refuse(who(s) + " has block " + std::to_string(lowest) + ", which is negative");
        std::copy(from, from + count, blocks.data() + seqs[size_t(s)].first_block);
    }
}

void PagedBatch::read_history(int64_t s, const History& history) {
    const Sequence& seq = seqs[size_t(s)];
    const int64_t count = compact_blocks(seq.seq_len - 1);
    if (count > history.max_blocks)
        refuse(who(s) + " reads " + std::to_string(count) + " blocks in compact form but compact_table holds " +
               std::to_string(history.max_blocks));
    // Blocks that every query reads as summaries, the first one aside, are not there.
    const int64_t kept = seq.q_len > 0 ? first_kept(summarised_at(seq.seq_len - seq.q_len)) / block_size : 0;
    for (int64_t b = 0; b < count; ++b) {
        const int32_t block = b > 0 && b < kept ? 0 : history.table[s * history.max_blocks + b];
        if (block < 0) refuse(who(s) + " has compact block " + std::to_string(block) + ", which is negative");
        max_compact = std::max(max_compact, block);
        compact.push_back(block);
    }
}

void PagedBatch::read_summaries(int64_t s, const History& history) {
    const Sequence& seq = seqs[size_t(s)];
    std::map<std::pair<int64_t, int64_t>, int32_t> blocks;
    for (int64_t i = 0; i < history.max_summaries; ++i) {
        const int32_t* row = history.summaries + (s * history.max_summaries + i) * 3;
        if (row[0] < 0) continue;
        if (row[2] < 0) refuse(who(s) + " has a summary in compact block " + std::to_string(row[2]) + ", which is negative");
        blocks[{row[0], row[1]}] = row[2];
    }
    const auto add = [this](int32_t block, const StandsFor& blocks) {
        max_summary = std::max(max_summary, block);
        summary_blocks.push_back(block);
        stands_for.push_back(blocks);
        const double tokens = blocks.each == 0 ? 1.0 : double(blocks.each * block_size);
        summary_bias.insert(summary_bias.end(), kGroupBlocks, float(std::log(tokens)));
    };
    const int64_t first = summarised_at(seq.seq_len - seq.q_len), last = summarised_at(seq.seq_len - 1);
    for (int64_t number = std::max<int64_t>(1, first); number <= last; ++number) {
        const std::vector<SummaryUnit> units = summary_layout(number);
        const int count = int(1 + units.size()), unread = int((kGroupBlocks - number % kGroupBlocks) % kGroupBlocks);
        summarised.push_back({int64_t(summary_blocks.size()), count, count * kGroupBlocks - unread});
        add(compact[size_t(seq.first_compact)], {0, 0});
        for (const SummaryUnit& unit : units) {
            const auto found = blocks.find({unit.level, unit.unit});
            if (found == blocks.end())
                refuse(who(s) + " reads the summary of level " + std::to_string(unit.level) + ", unit " +
                       std::to_string(unit.unit) + ", but summary_table does not hold it");
            const int64_t each = int64_t(1) << 2 * unit.level;
            add(found->second, {1 + unit.unit * each * kGroupBlocks, each});
        }
    }
}

bool PagedBatch::reads_summaries(int64_t window) const {
    if (budget == 0 || summarised.empty()) return false;
    if (window == 0) return true;
    if (window <= budget - kGroupBlocks * block_size) return false;
    for (int64_t s = 0; s < int64_t(seqs.size()); ++s)
        if (seqs[size_t(s)].q_len > 0 && summarised_at(seqs[size_t(s)].seq_len - 1) > 0 && seqs[size_t(s)].seq_len > window)
            refuse("a layer's window of " + std::to_string(window) + " tokens hides part of what " + who(s) +
                   " reads as summaries: with a budget of " + std::to_string(budget) + " it may have at most " +
                   std::to_string(budget - kGroupBlocks * block_size));
    return true;
}

void PagedBatch::check_blocks(int64_t num_blocks, const CompactArgs& compact) const {
    if (max_summary >= compact.num_blocks)
        refuse("summary_table holds block " + std::to_string(max_summary) + " but the cache has " +
               std::to_string(compact.num_blocks) + " compact blocks");
    if (max_compact >= compact.num_blocks)
        refuse("compact_table holds block " + std::to_string(max_compact) + " but the cache has " +
               std::to_string(compact.num_blocks) + " compact blocks");
    if (max_block >= num_blocks)
        refuse("block_table holds block " + std::to_string(max_block) + " but the cache has " +
               std::to_string(num_blocks) + " blocks");
}

}  // namespace octavo
