#include "groups.h"

#include <algorithm>

namespace octavo {
namespace {

// Whole spans in which two chains have the same blocks.
int64_t common_spans(const Chain& a, const Chain& b, int64_t blocks_per_span) {
    const int64_t blocks = std::min(a.spans, b.spans) * blocks_per_span;
    return (std::mismatch(a.blocks, a.blocks + blocks, b.blocks).first - a.blocks) / blocks_per_span;
}

struct Finder {
    const std::vector<int64_t>& common;  // of chain i with chain i - 1
    std::vector<Group> groups = {};

    // Chains [first, end) share the first `depth` spans and lie in a group already as far as these.
    void split(int64_t first, int64_t end, int64_t depth) {
        if (end - first < 2) return;
        const int64_t all = *std::min_element(common.begin() + first + 1, common.begin() + end);
        if (all > depth) groups.push_back({first, end - first, depth, all});
        for (int64_t i = first + 1; i <= end; ++i) {
            if (i < end && common[size_t(i)] > all) continue;
            split(first, i, all);
            first = i;
        }
    }
};

}  // namespace

std::vector<Group> find_groups(std::vector<Chain>* chains, int64_t blocks_per_span) {
    std::sort(chains->begin(), chains->end(), [blocks_per_span](const Chain& a, const Chain& b) {
        const int64_t a_blocks = a.spans * blocks_per_span, b_blocks = b.spans * blocks_per_span;
        const int64_t both = std::min(a_blocks, b_blocks);
        const int64_t same = std::mismatch(a.blocks, a.blocks + both, b.blocks).first - a.blocks;
        if (same < both) return a.blocks[same] < b.blocks[same];
        return a_blocks != b_blocks ? a_blocks < b_blocks : a.seq < b.seq;
    });
    std::vector<int64_t> common(chains->size(), 0);
    for (size_t i = 1; i < chains->size(); ++i)
        common[i] = common_spans((*chains)[i - 1], (*chains)[i], blocks_per_span);
    Finder finder{common};
    finder.split(0, int64_t(chains->size()), 0);
    return std::move(finder.groups);
}

}  // namespace octavo
