// Summaries: compact blocks whose 16 entries are means of the entries of other compact blocks.
#include <stdexcept>
#include <string>

#include "compact.h"
#include "compact_rows.h"
#include "half.h"

namespace octavo {
namespace {

constexpr int kFan = 4;

// The sources of a summary, which is also how many entries of a source become one of its own.
int sources_of(int32_t level) { return level == 0 ? kRecordKeys : kFan; }

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

void check(const SummariseArgs& args) {
    for (int64_t i = 0; i < args.count; ++i) {
        const int32_t* operation = args.operations + i * kOperationInts;
        const int32_t level = operation[1];
        if (level < 0) refuse("a summary has level " + std::to_string(level) + ", which is negative");
        if (args.turns != nullptr && level >= args.levels)
            refuse("a summary has level " + std::to_string(level) + " but turns are there for " +
                   std::to_string(args.levels));
        for (int j = -1; j < sources_of(level); ++j) {
            const int32_t block = j < 0 ? operation[0] : operation[2 + j];
            if (block < 0 || block >= args.num_compact)
                refuse("a summary is made of or in compact block " + std::to_string(block) + ", allowed are 0 to " +
                       std::to_string(args.num_compact - 1));
        }
    }
}

// The numbers that attention reads in place of a record's: products of a scale and a code and their sums with a mean or
// a minimum are exact in double, so each is rounded once.
float expand(uint16_t scale, int code, uint16_t from) {
    return float(double(half_to_float(scale)) * code + double(half_to_float(from)));
}

const uint16_t* halves(const uint8_t* record, int offset) { return reinterpret_cast<const uint16_t*>(record + offset); }

void expand_key(const uint8_t* record, int entry, int head_dim, float* key) {
    const RecordLayout layout = record_layout(head_dim);
    const int8_t* code = reinterpret_cast<const int8_t*>(record);
    for (int d = 0; d < head_dim; ++d)
        key[d] = expand(halves(record, layout.scale)[entry], code[(d / 2 * kRecordKeys + entry) * 2 + d % 2],
                        halves(record, layout.mean)[d]);
}

void expand_value(const uint8_t* record, int entry, int head_dim, int value_bits, float* value) {
    const ValueLayout layout = value_layout(head_dim, value_bits);
    const uint8_t* code = record + entry * layout.code_bytes;
    const uint16_t scale = halves(record, layout.scale)[entry];
    for (int d = 0; d < head_dim; ++d) {
        if (value_bits == 4) {
            value[d] = expand(scale, code[d / 2] >> d % 2 * 4 & 15, halves(record, layout.minimum)[entry]);
        } else {
            value[d] = expand(scale, int8_t(code[d]), 0);
        }
    }
}

// sum += key, turned by cos and sin where there are any; dimension d turns with d + head_dim / 2.
void add_turned(const float* key, const float* turn, int head_dim, double* sum) {
    for (int d = 0; d < head_dim; ++d) {
        const double x = key[d];
        if (turn == nullptr) {
            sum[d] += x;
        } else {
            const int partner = d < head_dim / 2 ? d + head_dim / 2 : d - head_dim / 2;
            sum[d] += x * turn[d] + double(key[partner]) * turn[head_dim + d];
        }
    }
}

void store_mean(const double* sum, int count, int head_dim, float* mean) {
    for (int d = 0; d < head_dim; ++d) mean[d] = float(sum[d] / count);
}

}  // namespace

void summarise_compact(const SummariseArgs& args, const Shape& shape, ThreadPool& pool, const Isa& isa) {
    check(args);
    const int head_dim = shape.head_dim;
    const int64_t key_bytes = record_layout(head_dim).bytes, value_bytes = value_layout(head_dim, args.value_bits).bytes;
    // An operation may read what one before it wrote, so a head's are done by one thread.
    pool.run(shape.num_kv_heads, [&](int, int64_t head) {
        const auto record = [&](int32_t block) { return block * int64_t(shape.num_kv_heads) + head; };
        float key[256], value[256], mean_key[kRecordKeys * 256], mean_value[kRecordKeys * 256];
        for (int64_t i = 0; i < args.count; ++i) {
            const int32_t* operation = args.operations + i * kOperationInts;
            const int32_t level = operation[1];
            const int each = sources_of(level);
            for (int e = 0; e < kRecordKeys; ++e) {
                const int64_t source = record(operation[2 + (e * each / kRecordKeys)]);
                const int first = e * each % kRecordKeys;
                double key_sum[256] = {}, value_sum[256] = {};
                for (int j = 0; j < each; ++j) {
                    expand_key(args.compact_key + source * key_bytes, first + j, head_dim, key);
                    expand_value(args.compact_value + source * value_bytes, first + j, head_dim, args.value_bits, value);
                    const float* turn =
                        args.turns == nullptr ? nullptr : args.turns + (level * kRecordKeys + j) * 2 * int64_t(head_dim);
                    add_turned(key, turn, head_dim, key_sum);
                    add_turned(value, nullptr, head_dim, value_sum);
                }
                store_mean(key_sum, each, head_dim, mean_key + e * head_dim);
                store_mean(value_sum, each, head_dim, mean_value + e * head_dim);
            }
            const int64_t to = record(operation[0]);
            seal_keys(mean_key, false, head_dim, Reference::middle, isa, args.compact_key + to * key_bytes);
            seal_values(mean_value, false, head_dim, args.value_bits, isa, args.compact_value + to * value_bytes);
        }
    });
}

}  // namespace octavo
