#include "compact.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "compact_rows.h"
#include "half.h"
#include "topk_paged.h"

namespace octavo {
namespace {

constexpr double kRoundTo = 0x1.8p52;  // adding and subtracting it rounds to a whole number
constexpr uint16_t kNan = 0x7e00;

// The greatest float16 that is no larger than x; -infinity below the least.
uint16_t half_down(float x, const Isa& isa) {
    float in[8] = {x};
    uint16_t out[8];
    isa.to_half(in, 8, out);
    if (half_to_float(out[0]) <= x) return out[0];
    if ((out[0] & 0x8000) != 0) return uint16_t(out[0] + 1);
    return out[0] == 0 ? 0x8001 : uint16_t(out[0] - 1);
}

double rounded(double x, double least, double most) { return std::clamp((x + kRoundTo) - kRoundTo, least, most); }

}  // namespace

// Where the record says that a key cannot be approximated, its scale says so too. The others are what they are: their
// errors are 0, and rho of topk_scan.cpp also holds the rounding of mean + scale code. False where no key is held.
bool seal_keys(const void* key, bool half, int head_dim, Reference reference, const Isa& isa, uint8_t* record) {
    const bool known = seal_record(key, half, head_dim, reference, isa, record);
    const RecordLayout layout = record_layout(head_dim);
    for (int i = 0; i < kRecordKeys; ++i) {
        uint16_t error;
        std::memcpy(&error, record + layout.error + 2 * i, 2);
        const bool held = error != 0x7c00;
        error = held ? uint16_t(0) : error;
        std::memcpy(record + layout.error + 2 * i, &error, 2);
        if (!held) std::memcpy(record + layout.scale + 2 * i, &kNan, 2);
    }
    return known;
}

// Scales are rounded up, so that the largest code is in range; the minimum down, so that the least code is.
void seal_values(const void* value, bool half, int head_dim, int value_bits, const Isa& isa, uint8_t* record) {
    const ValueLayout layout = value_layout(head_dim, value_bits);
    for (int i = 0; i < kRecordKeys; ++i) {
        float v[256], low = 0.0f, high = 0.0f;
        bool finite = true;
        for (int d = 0; d < head_dim; ++d) {
            const int at = i * head_dim + d;
            v[d] = half ? half_to_float(static_cast<const uint16_t*>(value)[at]) : static_cast<const float*>(value)[at];
            finite = finite && std::isfinite(v[d]);
            low = d == 0 || v[d] < low ? v[d] : low;
            high = d == 0 || v[d] > high ? v[d] : high;
        }
        const uint16_t minimum = value_bits == 4 && finite ? half_down(low, isa) : uint16_t(0);
        const double from = half_to_float(minimum);
        const double most = value_bits == 4 ? 15.0 : 127.0, least = value_bits == 4 ? 0.0 : -127.0;
        const double range = value_bits == 4 ? double(high) - from : std::max(double(high), -double(low));
        uint16_t scale = finite ? half_up(range / most, isa) : kNan;
        if (scale == 0x7c00) scale = kNan;
        const double step = half_to_float(scale);
        uint8_t* code = record + i * layout.code_bytes;
        std::fill(code, code + layout.code_bytes, uint8_t(0));
        for (int d = 0; step > 0.0 && d < head_dim; ++d) {
            const double c = rounded((double(v[d]) - from) / step, least, most);
            if (value_bits == 4) {
                code[d / 2] = uint8_t(code[d / 2] | int(c) << d % 2 * 4);
            } else {
                code[d] = uint8_t(int8_t(c));
            }
        }
        std::memcpy(record + layout.scale + 2 * i, &scale, 2);
        if (value_bits == 4) std::memcpy(record + layout.minimum + 2 * i, &minimum, 2);
    }
}

namespace {

void check_pair(const char* what, int32_t block, int64_t num_blocks) {
    if (block < 0 || block >= num_blocks)
        throw std::invalid_argument("a pair has " + std::string(what) + " " + std::to_string(block) +
                                    ", allowed are 0 to " + std::to_string(num_blocks - 1));
}

}  // namespace

void seal_compact(const SealArgs& args, const Shape& shape, ThreadPool& pool, const Isa& isa) {
    for (int64_t i = 0; i < args.count; ++i) {
        check_pair("block", args.pairs[2 * i], args.num_blocks);
        check_pair("compact block", args.pairs[2 * i + 1], args.num_compact);
    }
    const int d = shape.head_dim, records = shape.block_size / kRecordKeys;
    const int64_t key_bytes = record_layout(d).bytes, value_bytes = value_layout(d, args.value_bits).bytes;
    // As in the layer's scan plane: where rows of a tile differ, what a record says of its keys is taken from there.
    const Reference reference = args.mean_value == nullptr ? Reference::middle : Reference::mean;
    pool.run(args.count * shape.num_kv_heads, [&](int, int64_t task) {
        const int32_t* pair = args.pairs + 2 * (task / shape.num_kv_heads);
        const int64_t head = task % shape.num_kv_heads;
        for (int i = 0; i < records; ++i) {
            const int64_t at =
                ((pair[0] * int64_t(shape.num_kv_heads) + head) * shape.block_size + i * kRecordKeys) * d * (shape.half ? 2 : 4);
            const int64_t record = (pair[1] * int64_t(shape.num_kv_heads) + head) * records + i;
            const char *key = static_cast<const char*>(args.key) + at, *value = static_cast<const char*>(args.value) + at;
            uint8_t* to = args.compact_key + record * key_bytes;
            const bool known = seal_keys(key, shape.half, d, reference, isa, to);
            seal_values(value, shape.half, d, args.value_bits, isa, args.compact_value + record * value_bytes);
            if (args.bounds != nullptr) seal_bounds(key, shape.half, d, args.bounds + record * bounds_bytes(d));
            if (args.mean_value != nullptr)
                seal_mean_value(value, shape.half, known, d, isa, args.mean_value + record * d);
        }
    });
}

}  // namespace octavo
