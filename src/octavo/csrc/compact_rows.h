// Compact history: what takes the place of 16 keys and values of one KV head. Keys are as in the scan plane, see
// RecordLayout in topk_rows.h: key j is fma(scale_j, code_j, mean), and NaN where its scale is.
//
// Plain data and declarations only, for the reason given in attention.h.
#pragma once

#include "topk_rows.h"

namespace octavo {

// A record of values. Offsets in bytes.
//   8 bits: code [16][head_dim] int8, -127 .. 127; scale [16] float16. Value j is scale_j code_j.
//   4 bits: code [16][head_dim / 2], two of 0 .. 15 a byte, the lower half first; scale [16], minimum [16] float16.
//           Value j is fma(scale_j, code_j, minimum_j).
// Products of a scale and a code are exact in fp32. A value is NaN where its scale is.
struct ValueLayout {
    int code_bytes;  // of one value
    int scale, minimum, bytes;
};

static inline ValueLayout value_layout(int head_dim, int value_bits) {
    const int code_bytes = head_dim * value_bits / 8, scale = kRecordKeys * code_bytes;
    const int minimum = scale + 2 * kRecordKeys;
    return {code_bytes, scale, minimum, value_bits == 4 ? minimum + 2 * kRecordKeys : minimum};
}

}  // namespace octavo
