// Where a tile's rows find keys, values and what is known of records: in compact history or as stored.
//
// What is known of a record in both forms is the same to the bit, but for the error that the plane bounds: a compact key
// has none. So a record that all rows of a tile read in compact form is taken from there, and any other from the plane.
#include <algorithm>

#include "topk_tile.h"

namespace octavo {

// The same rows against compact history; none where value_bits is 0.
SpanTask TopkTile::compact_task(const SpanTask& stored) const {
    SpanTask task = stored;
    const Shape& shape = plan_.shape_;
    const CompactArgs& compact = args_->layer.compact;
    const int64_t records = shape.block_size / kRecordKeys;
    task.value_bits = compact.value_bits;
    task.key = compact.key + item_->kv_head * records * key_layout_.bytes;
    task.value = compact.value + item_->kv_head * records * value_layout_.bytes;
    task.block_stride = shape.num_kv_heads * records;
    return task;
}

// The index of the position's record in a plane.
int64_t TopkTile::record_of(int64_t position) const {
    const Shape& shape = plan_.shape_;
    const int64_t block = blocks_[position >> plan_.block_shift_], records = shape.block_size / kRecordKeys;
    return (block * shape.num_kv_heads + item_->kv_head) * records + (position & (shape.block_size - 1)) / kRecordKeys;
}

int64_t TopkTile::compact_record_of(int64_t position) const {
    const Shape& shape = plan_.shape_;
    const int64_t block = compact_blocks_[position >> plan_.block_shift_], records = shape.block_size / kRecordKeys;
    return (block * shape.num_kv_heads + item_->kv_head) * records + (position & (shape.block_size - 1)) / kRecordKeys;
}

const uint8_t* TopkTile::scan_record(int64_t position) const {
    if (position < all_compact_) return args_->layer.compact.key + compact_record_of(position) * key_layout_.bytes;
    return args_->planes.scan + record_of(position) * key_layout_.bytes;
}

const uint8_t* TopkTile::bounds_of(int64_t position) const {
    const int64_t size = bounds_bytes(plan_.shape_.head_dim);
    if (position < all_compact_) return args_->layer.compact.bounds + compact_record_of(position) * size;
    return args_->planes.bounds + record_of(position) * size;
}

const uint16_t* TopkTile::mean_value_of(int64_t position) const {
    const int64_t size = plan_.shape_.head_dim;
    if (position < all_compact_) return args_->layer.compact.mean_value + compact_record_of(position) * size;
    return args_->planes.mean_value + record_of(position) * size;
}

const void* TopkTile::at(const char* base, int64_t position) const {
    const Shape& shape = plan_.shape_;
    const int64_t element = blocks_[position >> plan_.block_shift_] * stride_ +
                            (position & (shape.block_size - 1)) * shape.head_dim;
    return base + element * (shape.half ? 2 : 4);
}

void TopkTile::score_keys(const Row& row, const int32_t* position, int count, float* score) {
    const Shape& shape = plan_.shape_;
    const void* key[kPanel];
    int place[kPanel], compact = 0, stored = 0;
    for (int i = 0; i < count; ++i)
        if (position[i] < row.stored) place[compact++] = i;
    GatherTask task{1, count, shape.head_dim, shape.half, args_->layer.scale, &row.query.q, key, k_panel_, score};
    if (compact == 0) {
        for (int i = 0; i < count; ++i) key[i] = at(key_, position[i]);
        plan_.paged_.gather(task);
        return;
    }
    float some[kScoreStride];
    task.score = some;
    for (int i = 0; i < compact; ++i) {
        const int32_t p = position[place[i]];
        float* expanded = expanded_ + i * shape.head_dim;
        const uint8_t* record = args_->layer.compact.key + compact_record_of(p) * key_layout_.bytes;
        plan_.paged_.expand(record, p % kRecordKeys, shape.head_dim, expanded);
        key[i] = expanded;
    }
    task.count = compact;
    task.half = false;
    plan_.paged_.gather(task);
    for (int i = 0; i < compact; ++i) score[place[i]] = some[i];
    for (int i = 0; i < count; ++i) {
        if (position[i] < row.stored) continue;
        place[stored] = i;
        key[stored++] = at(key_, position[i]);
    }
    if (stored == 0) return;
    task.count = stored;
    task.half = shape.half;
    plan_.paged_.gather(task);
    for (int i = 0; i < stored; ++i) score[place[i]] = some[i];
}

void TopkTile::score_at(const Row& row, const int32_t* position, int count, float* score) {
    score_keys(row, position, count, score);
    for (int i = 0; i < count; ++i) item_->bytes += bytes_of(row, position[i]);
}

// Of a key.
int64_t TopkTile::bytes_of(const Row& row, int64_t position) const {
    if (position < row.stored) return key_layout_.bytes / kRecordKeys;
    return plan_.shape_.head_dim * (plan_.shape_.half ? 2 : 4);
}

// A compact key lies all over its record.
void TopkTile::ask_for_keys(const Row& row, const int32_t* position, int count) {
    for (int first = 0; first < count; first += kPanel) {
        const void *stored[kPanel], *compact[kPanel];
        int num_stored = 0, num_compact = 0;
        for (int i = first; i < std::min(count, first + kPanel); ++i) {
            if (position[i] < row.stored) {
                compact[num_compact++] = args_->layer.compact.key + compact_record_of(position[i]) * key_layout_.bytes;
            } else {
                stored[num_stored++] = at(key_, position[i]);
            }
        }
        plan_.paged_.prefetch(stored, num_stored, plan_.shape_.head_dim * (plan_.shape_.half ? 2 : 4));
        plan_.paged_.prefetch(compact, num_compact, key_layout_.bytes);
    }
}

// Values lie across lines; with them their scales are asked for.
void TopkTile::ask_for_values(const Row& row, const int32_t* position, int count) {
    for (int first = 0; first < count; first += kPanel) {
        const void *stored[kPanel], *compact[kPanel], *scale[kPanel];
        int num_stored = 0, num_compact = 0;
        for (int i = first; i < std::min(count, first + kPanel); ++i) {
            if (position[i] < row.stored) {
                const uint8_t* record = args_->layer.compact.value + compact_record_of(position[i]) * value_layout_.bytes;
                scale[num_compact] = record + value_layout_.scale;
                compact[num_compact++] = record + position[i] % kRecordKeys * value_layout_.code_bytes;
            } else {
                stored[num_stored++] = at(value_, position[i]);
            }
        }
        plan_.paged_.prefetch(stored, num_stored, plan_.shape_.head_dim * (plan_.shape_.half ? 2 : 4));
        plan_.paged_.prefetch(compact, num_compact, value_layout_.code_bytes + 60);
        plan_.paged_.prefetch(scale, num_compact, value_layout_.bytes - value_layout_.scale);
    }
}

}  // namespace octavo
