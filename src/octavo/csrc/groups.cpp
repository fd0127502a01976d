#include "groups.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace octavo {
namespace {

struct Finder {
    const std::vector<int64_t>& common;  // spans of chain i that chain i - 1 has too
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
    const size_t span_bytes = size_t(blocks_per_span) * sizeof(int32_t);
    // By bytes: any order will do that puts common starts side by side.
    std::sort(chains->begin(), chains->end(), [span_bytes](const Chain& a, const Chain& b) {
        const int order = std::memcmp(a.blocks, b.blocks, size_t(std::min(a.spans, b.spans)) * span_bytes);
        if (order != 0) return order < 0;
        return a.spans != b.spans ? a.spans < b.spans : a.seq < b.seq;
    });
    std::vector<int64_t> common(chains->size(), 0);
    for (size_t i = 1; i < chains->size(); ++i) {
        const Chain &a = (*chains)[i - 1], &b = (*chains)[i];
        const int64_t both = std::min(a.spans, b.spans);
        int64_t& same = common[i];
        while (same < both && std::memcmp(a.blocks + same * blocks_per_span, b.blocks + same * blocks_per_span,
                                          span_bytes) == 0)
            ++same;
    }
    Finder finder{common};
    finder.split(0, int64_t(chains->size()), 0);
    return std::move(finder.groups);
}

}  // namespace octavo
