// Kernels of top-k attention over a paged cache, and the scan plane that they read.
//
// Plain data and declarations only, for the reason given in attention.h.
#pragma once

#include <cstdint>

#include "topk.h"

namespace octavo {

// Positions per record of the scan plane, whatever the block size.
constexpr int kRecordKeys = 16;
// How many records ahead memory is asked for where they are one KV head's.
constexpr int kRecordsAhead = 4;
// How many are ranked at once.
constexpr int kRankRecords = 64;
static_assert(kRecordKeys == kPanel, "a record's keys are rescored as one panel");

// What a record's residuals are taken from: the keys' mean, which the tail reads, or in each dimension the middle
// between the least and the greatest, which leaves smaller ones beside a key that is unlike the others, as the first of a
// sequence is.
enum class Reference { mean, middle };

// One record: 16 keys of one KV head, approximated. Offsets in bytes. With m the reference in float16
// and r = k - m a key's residual, code c and scale s of the key give r_hat = s c, and |r - r_hat| <= error.
//   code  [head_dim / 2][16 keys][2]  int8, -127 .. 127
//   mean  [head_dim]                  float16, m
//   scale [16]                        float16, finite, at least 2^-14
//   error [16]                        float16, rounded up; infinite where the key cannot be approximated
//   norm                              float32, at least |m|
struct RecordLayout {
    int mean, scale, error, norm, bytes;
};

static inline RecordLayout record_layout(int head_dim) {
    const int mean = head_dim * kRecordKeys, scale = mean + 2 * head_dim, error = scale + 2 * kRecordKeys;
    return {mean, scale, error, error + 2 * kRecordKeys, error + 2 * kRecordKeys + 4};
}

// What the bounds of one query row are made of; see topk_scan.cpp.
struct ScanQuery {
    const int16_t* code;  // [head_dim] q in 16 bits, q_hat = scale * code
    const float* q;       // [head_dim]
    float code_scale;     // attention's scale times q's
    float mean_scale;     // attention's scale
    float per_error;      // a bound is per_error * error + per_scale * scale + per_norm * norm + tiny
    float per_scale;
    float per_norm;
};

// Records against rows. value and bound: [rows][kScoreStride]; the score of key j of record i, as score kernels
// give it, lies within bound of value, at [i * 16 + j]. NaN or an infinite bound: nothing is known.
struct ScanTask {
    int rows;
    int head_dim;
    const ScanQuery* query;
    int num_records;
    const uint8_t* const* record;
    const uint8_t* const* ask;  // [num_records] records to ask memory for meanwhile, nullptr for none
    float* value;
    float* bound;
};

// e^x as a bound, times 2^23 and in the bits of a float: see sift.
constexpr float kExpScale = 0x1.715476p0f * 8388608.0f, kExpOne = 127.0f * 8388608.0f;

// One row's scanned keys [lo, hi) that stay in the race: their upper bound reaches the limit, or is
// NaN. The others add an upper bound of exp(upper - top), at most 1.07 of it, to *dropped.
struct SiftTask {
    int lo, hi;
    const float* value;  // readable up to hi rounded up to 16, as is `bound`
    const float* bound;
    float limit;
    float top;  // at least every upper bound below the limit
    float* dropped;
    int32_t* stay;  // [hi - lo] in order, with room for kPanel more
};

// A limit that at least `places` of the n intervals [value - bound, value + bound] lie at or above, nearly the
// highest there is; -infinity when there are not so many. `lower` is scratch, [n rounded up to 8].
struct LimitTask {
    int n;
    int places;
    const float* value;  // readable up to n rounded up to 8, as is `bound`
    const float* bound;
    float* lower;
};

// Up to 16 keys anywhere in the cache against rows: the numbers that SpanTask's score gives.
struct GatherTask {
    int rows;
    int count;
    int head_dim;
    bool half;
    float scale;
    const float* const* q;   // [rows][head_dim]
    const void* const* key;  // [count]
    float* k_panel;          // [head_dim][kPanel]
    float* score;            // [rows][kScoreStride], kPanel written of each
};

// A row's kept keys in order of position -> (m, l, acc), by the partials of span_kernel.inl: their values are
// to the bit what that kernel makes of a row that sees exactly these keys.
struct PagedRow {
    int count;
    int head_dim;
    bool half;
    int block_shift;
    const float* score;
    const int32_t* position;
    const int32_t* blocks;  // of the sequence
    const void* value;
    int64_t block_stride;
    // Keys before this position are read in compact form: value records of the sequence's compact blocks.
    int64_t stored;
    const int32_t* compact_blocks;
    const uint8_t* compact_value;
    int64_t compact_stride;  // records a block
    int value_bits;
    float* acc;      // [head_dim]
    float* partial;  // [2][head_dim] scratch
    float m, l;      // results
};

// What a row did not keep of some records of 16 keys that lie in one span of kSpan positions. A record's keys that
// were not kept enter as one term: with n of them, the score base + log n, and the mean of the record's values. A
// record whose mean is not known, or that is kept whole, adds nothing.
struct TailTask {
    int lo, hi;         // the row sees these records of the span whole, and they are not its own
    const float* base;  // [16] the score of the mean of each record's keys
    const uint16_t* const* mean_value;  // [16][head_dim] float16; not known where the first is not finite
};

// The highest score, without the scale, that a key within a record's bounds could have with each row's query:
// value[row * value_stride + record].
struct RankTask {
    int rows;
    int head_dim;
    const float* weight;  // [rows][2][head_dim]: q where it is negative, which asks for the least, and where it is not
    int num_records;
    const uint8_t* const* bounds;  // of each record, see seal_bounds
    const uint8_t* const* ask;     // as in ScanTask
    float* value;
    int64_t value_stride;
};

struct PagedTopkIsa {
    void (*scan)(const ScanTask& task);
    int (*sift)(const SiftTask& task);
    float (*limit)(const LimitTask& task);
    // Asks for rows of `bytes` at the given positions: [count] addresses.
    void (*prefetch)(const void* const* row, int count, int bytes);
    void (*gather)(const GatherTask& task);
    void (*attend)(PagedRow& row);
    // The same by spans: (m, l, acc) of nothing, then the kept keys [first, end) of one span, and its tail. Those in
    // compact form and those as stored give a partial each, as in span_kernel.inl's driver; the tail joins the last.
    void (*clear)(PagedRow& row);
    void (*attend_span)(PagedRow& row, int first, int end, const TailTask& tail);
    // (m, l) <- (m, l) with the n more scores: l = sum of exp(score - m).
    void (*mass)(const float* scores, int n, float* m, float* l);
    void (*rank)(const RankTask& task);
    // Key `at` of a record, [head_dim], as compact history has it.
    void (*expand)(const uint8_t* record, int at, int head_dim, float* key);
};

const PagedTopkIsa& portable_paged_topk();
const PagedTopkIsa* avx2_paged_topk();  // as avx2_isa()
const PagedTopkIsa* vnni_paged_topk();  // nullptr where not compiled in; for avx512 with VNNI

}  // namespace octavo
