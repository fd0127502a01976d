// Who computes what of top-k attention over the paged cache, and the life of a row: its candidates are scored, or
// scanned and rescored where they may win; the recent keys follow; what is kept is attended to.
//
// Nothing here can change a result. Which keys are kept is decided by their scores and positions alone: bounds only
// leave out keys that cannot be among the winners. What is kept is attended to in order of position.
#include "topk_paged.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "linear_int8.h"
#include "topk_tile.h"

namespace octavo {
namespace {

// Few queries: reading all K for them is what costs, so the plane is scanned.
constexpr int64_t kMaxScanQueries = 4;
constexpr int kScanRows = 16;
constexpr int64_t kMinScanKeys = 256;
// A part has at least so many records. A thread has one, as each leaves candidates of its own, and then so many items.
constexpr int64_t kPartRecords = 32;
constexpr int64_t kThreadItems = 3;
// Floats of row state that a thread's tile of rows may take.
constexpr int64_t kTileFloats = int64_t(1) << 18;

const TopkIsa& select_kernels(const Isa& isa) { return &isa == &portable_isa() ? portable_topk() : *avx2_topk(); }

int rows_per_tile(int topk) {
    const int64_t floats = 2 * topk_capacity(topk - topk / 2, topk / 2);
    const int64_t rows = std::min<int64_t>(kTileRows, kTileFloats / floats);
    return int(std::max<int64_t>(kMicroRows, rows / kMicroRows * kMicroRows));
}

}  // namespace

const PagedTopkIsa& paged_kernels(const Isa& isa) {
    if (&isa == &portable_isa()) return portable_paged_topk();
    static const bool vnni = cpu_has_vnni() && vnni_paged_topk() != nullptr;
    return vnni && std::strcmp(isa.name, "avx512") == 0 ? *vnni_paged_topk() : *avx2_paged_topk();
}

TopkPlan::TopkPlan(const PagedBatch& batch, const TopkPolicy* policies, const Shape& shape, ThreadPool& pool,
                   const Isa& isa)
    : batch_(batch),
      policies_(policies, policies + batch.seqs.size()),
      shape_(shape),
      pool_(pool),
      isa_(isa),
      select_(select_kernels(isa)),
      paged_(paged_kernels(isa)),
      group_(shape.num_heads / shape.num_kv_heads),
      block_shift_(0) {
    while ((1 << block_shift_) < shape.block_size) ++block_shift_;
    if (shape.block_size % kRecordKeys != 0)
        throw std::invalid_argument("top-k attention needs a block_size that is a multiple of " +
                                    std::to_string(kRecordKeys) + ", got " + std::to_string(shape.block_size));
    for (size_t s = 0; s < policies_.size(); ++s) {
        const TopkPolicy& policy = policies_[s];
        if (policy.recent < 0 || policy.recent > std::max(0, policy.topk))
            throw std::invalid_argument("the recent keys of a budget must be from 0 to the budget");
        if (policy.fast != 0 && policy.least > 0)
            throw std::invalid_argument("an adaptive budget weighs all keys: it cannot be had in fast mode");
        if (policy.topk <= 0) continue;
        const Sequence& seq = batch_.seqs[s];
        for (int64_t r = (seq.seq_len - seq.q_len) / kRecordKeys; (r + 1) * kRecordKeys <= seq.seq_len; ++r)
            if (seq.q_len > 0) seals_.push_back({int64_t(s), r});
        if (!active(s)) continue;
        max_topk_ = std::max(max_topk_, int(policy.topk));
        max_places_ = std::max(max_places_, int(policy.topk - policy.recent));
        any_tail_ = any_tail_ || policy.tail != 0;
        any_fast_ = any_fast_ || policy.fast != 0;
        any_adaptive_ = any_adaptive_ || policy.least > 0;
    }
}

bool TopkPlan::active(size_t seq) const {
    return policies_[seq].topk > 0 && batch_.seqs[seq].seq_len > dense_keys(policies_[seq]);
}

void TopkPlan::check(const TopkPlanes& planes, const CompactArgs& compact) const {
    if (any_tail_ && (planes.scan == nullptr || planes.mean_value == nullptr))
        throw std::invalid_argument("a sequence asks for the tail, which needs the planes of means");
    if (any_fast_ && (planes.bounds == nullptr || planes.scan == nullptr))
        throw std::invalid_argument("a sequence asks for the fast mode, which needs the plane of bounds");
    if (any_adaptive_ && planes.scan == nullptr)
        throw std::invalid_argument("a sequence asks for an adaptive budget, which needs the scan plane");
    if (batch_.compact.empty()) return;
    if (any_tail_ && compact.mean_value == nullptr)
        throw std::invalid_argument("a sequence asks for the tail, which needs the means of compact history");
    if (any_fast_ && compact.bounds == nullptr)
        throw std::invalid_argument("a sequence asks for the fast mode, which needs the bounds of compact history");
}

TopkPlan::~TopkPlan() = default;

void TopkPlan::divide(int64_t window, bool planes) {
    items_.clear();
    parts_.clear();
    int64_t active = 0;
    for (size_t s = 0; s < policies_.size(); ++s) active += this->active(s);
    for (size_t s = 0; s < policies_.size(); ++s) {
        const Sequence& seq = batch_.seqs[s];
        // As many places as keys: AttentionPlan has these.
        if (!this->active(s) || seq.q_len == 0) continue;
        const TopkPolicy& policy = policies_[s];
        const int64_t start = seq.seq_len - seq.q_len, rows = seq.q_len * group_;
        const int64_t visible = window > 0 ? std::min(window, start + 1) : start + 1;
        const bool scan = planes && seq.q_len <= kMaxScanQueries && visible - policy.topk >= kMinScanKeys;
        const Way way = policy.fast != 0 ? Way::rank : policy.least > 0 ? Way::adapt : scan ? Way::scan : Way::score;
        int most = way != Way::score ? kScanRows : std::min(kTileRows, rows_per_tile(policy.topk));
        const bool in_parts = way == Way::scan || (way == Way::rank && seq.q_len <= kMaxScanQueries);
        // Heads of a group share a scan, unless threads would have nothing to do.
        const auto tiles = [&] { return (rows + most - 1) / most * active; };
        while (way != Way::score && !in_parts && most > 1 && tiles() * shape_.num_kv_heads < pool_.num_threads()) most /= 2;
        for (int64_t row0 = 0; row0 < rows; row0 += most) {
            const int count = int(std::min<int64_t>(most, rows - row0));
            const double cost = double(count) * double(start + row0 / group_ + 1);
            Item item{int64_t(s), 0, row0, count, way, cost, {}, 0, 0, 0, 0, 0};
            if (in_parts) {
                cut(item, window, tiles());
                continue;
            }
            for (; item.kv_head < shape_.num_kv_heads; ++item.kv_head) items_.push_back(item);
        }
    }
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    int rows = 0, part_rows = 0;
    for (const Item& item : items_) rows = std::max(rows, item.rows);
    for (const Part& part : parts_) part_rows = std::max(part_rows, part.item.rows);
    tiles_.clear();
    part_tiles_.clear();
    for (int t = 0; t < pool_.num_threads(); ++t) tiles_.emplace_back(new TopkTile(*this, rows));
    for (int t = 0; !parts_.empty() && t < pool_.num_threads() * shape_.num_kv_heads; ++t)
        part_tiles_.emplace_back(new TopkTile(*this, part_rows));
    divided_window_ = window;
    divided_planes_ = planes;
}

std::pair<int64_t, int64_t> TopkPlan::scan_range(const Item& item, int64_t window) const {
    const Sequence& seq = batch_.seqs[size_t(item.seq)];
    // The first row sees the least.
    const int64_t position = seq.seq_len - seq.q_len + item.row0 / group_;
    const int64_t first = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    const int64_t others_end = std::max(first, position + 1 - policies_[size_t(item.seq)].recent);
    const int64_t end = std::min(others_end, position) / kRecordKeys * kRecordKeys;
    return {first / kRecordKeys * kRecordKeys, end};
}

// The keys of an item's rows are scanned, or its records ranked, in parts, by all KV heads at once. What is then left to
// do is an item for each KV head, or for each row where threads would have too little.
void TopkPlan::cut(const Item& item, int64_t window, int64_t scans) {
    const int64_t heads = shape_.num_kv_heads, threads = pool_.num_threads();
    const bool rank = item.way == Way::rank;
    auto [begin, end] = rank ? rank_range(item, window) : scan_range(item, window);
    const int64_t scan_end = end;
    if (!rank) begin /= kRecordKeys, end /= kRecordKeys;
    const int64_t first = int64_t(parts_.size()), wanted = (threads + scans - 1) / scans;
    if (begin < end) {
        const int64_t pieces = std::clamp<int64_t>((end - begin) / kPartRecords, 1, wanted);
        // Of whole spans, so that a scan's pieces stay in step with them.
        const int64_t unit = rank ? 1 : kSpan / kRecordKeys, share = (end - begin + pieces - 1) / pieces,
                      step = (share + unit - 1) / unit * unit;
        for (int64_t from = begin; from < end; from += step)
            for (int64_t h = 0; h < heads; ++h) {
                parts_.push_back({item, from, std::min(from + step, end), {}, {}});
                parts_.back().item.kv_head = int(h);
            }
    }
    const int64_t parts = (int64_t(parts_.size()) - first) / heads;
    // One reading of the means serves all rows.
    const bool apart = policies_[size_t(item.seq)].tail == 0 && scans * heads < kThreadItems * threads;
    const int together = apart ? 1 : item.rows;
    for (int h = 0; h < heads; ++h)
        for (int r = 0; r < item.rows; r += together) {
            Item rest = item;
            rest.kv_head = h;
            rest.row0 += r;
            rest.rows = together;
            rest.cost = item.cost / item.rows * together;
            rest.first_part = first + h;
            rest.parts = parts;
            rest.part_row = r;
            rest.scan_end = scan_end;
            items_.push_back(rest);
        }
}

// What all KV heads read of some records. What comes next is asked for meanwhile, in the order of addresses.
void TopkPlan::run_piece(const TopkLayerArgs& args, int thread, int64_t piece) {
    const int64_t heads = shape_.num_kv_heads, block_records = shape_.block_size / kRecordKeys;
    Part* parts = &parts_[size_t(piece * heads)];
    const std::unique_ptr<TopkTile>* tiles = &part_tiles_[size_t(thread * heads)];
    for (int64_t h = 0; h < heads; ++h) tiles[h]->begin_part(args, &parts[h]);
    const bool rank = parts->item.way == Way::rank;
    const int64_t most = rank ? kRankRecords : kSpan / kRecordKeys, end = parts->end;
    std::vector<const uint8_t*> next;
    const auto look_ahead = [&](int64_t from) {
        next.clear();
        for (int64_t to, stop = std::min(from + most, end); from < stop; from = to) {
            to = std::min((from / block_records + 1) * block_records, stop);
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t r = from; r < to; ++r)
                    next.push_back(rank ? tiles[h]->bounds_of(r * kRecordKeys) : tiles[h]->scan_record(r * kRecordKeys));
        }
    };
    look_ahead(parts->begin);
    const int bytes = rank ? bounds_bytes(shape_.head_dim) : record_layout(shape_.head_dim).bytes;
    paged_.prefetch(reinterpret_cast<const void* const*>(next.data()), int(next.size()), bytes);
    for (int64_t record = parts->begin; record < end; record += most) {
        const int64_t count = std::min(most, end - record);
        look_ahead(record + most);
        next.resize(size_t(heads * count), nullptr);
        for (int64_t h = 0; h < heads; ++h) tiles[h]->read_part(record, int(count), next.data() + h * count);
    }
    for (int64_t h = 0; h < heads; ++h) tiles[h]->end_part();
}

void TopkPlan::seal(const TopkLayerArgs& args) {
    const int64_t d = shape_.head_dim, record_bytes = record_layout(shape_.head_dim).bytes;
    const int64_t block_records = shape_.block_size / kRecordKeys;
    const Reference reference = args.planes.mean_value == nullptr ? Reference::middle : Reference::mean;
    pool_.run(int64_t(seals_.size()) * shape_.num_kv_heads, [&](int, int64_t i) {
        const Seal& one = seals_[size_t(i / shape_.num_kv_heads)];
        const int64_t head = i % shape_.num_kv_heads;
        const int64_t position = one.record * kRecordKeys;
        const int64_t block = batch_.blocks[size_t(batch_.seqs[size_t(one.seq)].first_block + (position >> block_shift_))];
        const int64_t offset = position & (shape_.block_size - 1);
        const int64_t at = (block * shape_.num_kv_heads + head) * shape_.block_size + offset;
        const char* key = static_cast<const char*>(args.layer.key) + at * d * (shape_.half ? 2 : 4);
        const int64_t record = (block * shape_.num_kv_heads + head) * block_records + offset / kRecordKeys;
        const bool known = seal_record(key, shape_.half, shape_.head_dim, reference, isa_, args.planes.scan + record * record_bytes);
        if (args.planes.bounds != nullptr)
            seal_bounds(key, shape_.half, shape_.head_dim, args.planes.bounds + record * bounds_bytes(shape_.head_dim));
        if (args.planes.mean_value == nullptr) return;
        const char* value = static_cast<const char*>(args.layer.value) + at * d * (shape_.half ? 2 : 4);
        seal_mean_value(value, shape_.half, known, shape_.head_dim, isa_, args.planes.mean_value + record * d);
    });
}

void TopkPlan::run(const TopkLayerArgs& args) {
    const std::lock_guard<std::mutex> guard(busy_);
    batch_.check_blocks(args.layer.num_blocks, args.layer.compact);
    const int64_t window = args.layer.window;
    const bool planes = args.planes.scan != nullptr;
    check(args.planes, args.layer.compact);
    if (divided_window_ != window || divided_planes_ != planes) divide(window, planes);
    if (planes && !seals_.empty()) seal(args);
    pool_.run(int64_t(parts_.size()) / shape_.num_kv_heads,
              [&](int thread, int64_t piece) { run_piece(args, thread, piece); });
    pool_.run(int64_t(items_.size()),
              [&](int thread, int64_t i) { tiles_[size_t(thread)]->run(args, &items_[size_t(i)]); });
    if (args.report == nullptr) return;
    for (const Item& item : items_) {
        TopkReport& sum = args.report[item.seq];
        sum.rows += item.report.rows;
        sum.visible += item.report.visible;
        sum.kept += item.report.kept;
        sum.rescored += item.report.rescored;
        sum.dropped_sum += item.report.dropped_sum;
        sum.dropped_max = std::max(sum.dropped_max, item.report.dropped_max);
        if (batch_.seqs[size_t(item.seq)].q_len <= kMaxScanQueries) sum.bytes += double(item.bytes);
    }
    for (const Part& part : parts_) args.report[part.item.seq].bytes += double(part.item.bytes);
    const double key_bytes = 2.0 * shape_.num_kv_heads * shape_.head_dim * (shape_.half ? 2 : 4);
    const CompactArgs& compact = args.layer.compact;
    const double compact_bytes = double(shape_.num_kv_heads) / kRecordKeys *
                                 (record_layout(shape_.head_dim).bytes + value_layout(shape_.head_dim, compact.value_bits).bytes);
    for (size_t s = 0; s < policies_.size(); ++s) {
        const Sequence& seq = batch_.seqs[s];
        if (policies_[s].topk <= 0 || seq.q_len == 0) continue;
        const int64_t seen = window > 0 ? std::min(seq.seq_len, window + seq.q_len - 1) : seq.seq_len;
        // Of these the last query reads so many in compact form.
        const int64_t before = batch_.compact_blocks(seq.seq_len - 1) * shape_.block_size;
        const int64_t small = std::max<int64_t>(0, before - (seq.seq_len - seen));
        const double all = key_bytes * double(seen - small) + compact_bytes * double(small);
        const double dense = seq.q_len <= kMaxScanQueries ? all : 0.0;
        args.report[s].dense_bytes += dense;
        if (active(s)) continue;
        args.report[s].bytes += dense;
        double visible = 0.0;
        for (int64_t p = seq.seq_len - seq.q_len; p < seq.seq_len; ++p)
            visible += double(window > 0 ? std::min(window, p + 1) : p + 1);
        args.report[s].rows += double(seq.q_len * shape_.num_heads);
        args.report[s].visible += visible * shape_.num_heads;
        args.report[s].kept += visible * shape_.num_heads;
    }
}

int64_t TopkPlan::bytes_read() const {
    int64_t bytes = 0;
    for (const Item& item : items_) bytes += item.bytes;
    for (const Part& part : parts_) bytes += part.item.bytes;
    return bytes;
}

}  // namespace octavo
