// Which sequences of a step have the same blocks, and for how many whole spans.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// One sequence's leading blocks, as far as they fill whole spans.
struct Chain {
    int64_t seq;
    const int32_t* blocks;
    int64_t spans;
};

// chains[first .. first + count) have the same blocks from position 0 up to span_end. The spans before
// span_begin are those of the group around this one, which comes earlier in the list.
struct Group {
    int64_t first;
    int64_t count;
    int64_t span_begin;
    int64_t span_end;
};

// Sorts the chains so that those with a common start are neighbours, and finds all groups of two or
// more, the outer before the inner. O(n log n) comparisons of chains and O(n * spans) beside them.
std::vector<Group> find_groups(std::vector<Chain>* chains, int64_t blocks_per_span);

}  // namespace octavo
