#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "linear_int8.h"

namespace octavo {
namespace {

// Rows that are computed straight from the packed weights, tile by tile; with more of them, a piece of a panel is
// expanded to float32 first. Where the two ways cross was measured (docs/decisions.md).
constexpr int64_t kMostDirectRows = 12, kMostDirectQuantizedRows = 8;
// A piece of one panel, as float32. Tiles read it as fast from a second-level cache as from the first, and every
// piece costs a load and a store of all sums.
constexpr int64_t kPieceBytes = 72 << 10;
// Prepared rows of x that are walked together, again and again: half of a second-level cache.
constexpr int64_t kRowBlockBytes = 512 << 10;

constexpr int kMostPanels = 4;
// How many k ahead of its reads a single tile asks for memory.
constexpr int64_t kAhead = 64;

// rows into tiles of nearly equal size: tile i starts here.
int64_t tile_start(int64_t rows, int64_t tiles, int64_t i) { return rows * i / tiles; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A run of panels of one part; of gate and up, the same panels.
struct Group {
    const PackedWeight* weight;
    const PackedWeight* up;  // or nullptr
    int64_t panel;           // the first
    int64_t panels;          // how many
    int64_t output;          // where the first panel's outputs begin in out
};

// All panels in order, groups of at most so many; those of thread t are [starts[t], starts[t + 1]).
struct Shares {
    std::vector<Group> groups;
    std::vector<int64_t> starts;

    Shares(const std::vector<const PackedWeight*>& weights, bool gated, int64_t most_panels, int64_t threads) {
        const size_t parts = gated ? 2 : 1;
        int64_t panels = 0, first = 0, output = 0;
        for (size_t i = 0; i < weights.size(); i += parts) panels += weights[i]->panels();
        starts.push_back(0);
        for (size_t i = 0; i < weights.size(); i += parts) {
            for (int64_t panel = 0; panel < weights[i]->panels();) {
                const auto share_end = [&] { return panels * int64_t(starts.size()) / threads - first; };
                while (panel == share_end()) starts.push_back(int64_t(groups.size()));
                const int64_t end = std::min({panel + most_panels, weights[i]->panels(), share_end()});
                groups.push_back({weights[i], gated ? weights[i + 1] : nullptr, panel, end - panel,
                                  output + panel * kLinearPanel});
                panel = end;
            }
            first += weights[i]->panels();
            output += weights[i]->outputs();
        }
        starts.resize(size_t(threads) + 1, int64_t(groups.size()));
    }
};

// body(block, group, the next group or nullptr), each once. A thread walks its own share in order, block by block: long
// stretches of memory, and it is known what comes next. Who is done with it helps the others.
template <class F>
void for_groups(const Shares& shares, int64_t blocks, ThreadPool& pool, const F& body) {
    struct alignas(64) Taken {
        std::atomic<int64_t> count{0};
    };
    const int64_t threads = int64_t(shares.starts.size()) - 1;
    std::vector<Taken> taken(static_cast<size_t>(threads));
    pool.run(threads, [&](int, int64_t own) {
        for (int64_t i = 0; i < threads; ++i) {
            const size_t share = size_t((own + i) % threads);
            const Group *begin = shares.groups.data() + shares.starts[share],
                        *end = shares.groups.data() + shares.starts[share + 1];
            const int64_t count = end - begin;
            for (int64_t item = taken[share].count++; item < blocks * count; item = taken[share].count++) {
                const Group* group = begin + item % count;
                body(item / count, *group, group + 1 < end ? group + 1 : nullptr);
            }
        }
    });
}

// What one call of linear() shares.
struct Call {
    const LinearKernels& kernels;
    const Isa& isa;
    const LinearArgs& args;
};

int widest(const LinearKernels::Tile* tiles, int64_t panels) {
    int i = 2;
    while (i > 0 && ((1 << i) > panels || tiles[i] == nullptr)) --i;
    return i;
}

void add_bias(const float* bias, int rows, int outputs, float* sums) {
    if (bias == nullptr) return;
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < outputs; ++n) sums[r * kLinearPanel + n] += bias[n];
}

// From the sums of rows [row, row + rows) of one panel to the result. `up` has those of up, where there is one.
void finish(const Call& call, const Group& group, int64_t panel, int64_t row, int rows, float* sums, float* up) {
    const LinearArgs& args = call.args;
    const int64_t begin = panel * kLinearPanel, output = group.output + begin - group.panel * kLinearPanel;
    const int outputs = int(std::min<int64_t>(group.weight->outputs() - begin, kLinearPanel));
    const float* bias = args.bias == nullptr ? nullptr : args.bias + output;
    if (args.activation != nullptr) {
        add_bias(bias, rows, outputs, sums);
        if (up != nullptr) add_bias(bias == nullptr ? nullptr : bias + group.weight->outputs(), rows, outputs, up);
        for (int64_t at = 0; at < int64_t(rows) * kLinearPanel; at += kLinearPanel)
            call.isa.rows->activate(*args.activation, sums + at, up == nullptr ? nullptr : up + at, outputs, sums + at);
        bias = nullptr;
    }
    call.kernels.finish({sums, rows, outputs, bias,
                         args.residual == nullptr ? nullptr : args.residual + row * args.out_stride + output,
                         args.out + row * args.out_stride + output, args.out_stride});
}

// Tile t of `tiles`, with a kernel that asks every so many k, asks for its share of `bytes` at `next`, of every panel.
template <class Task>
void ask_for(Task* task, int every, const uint8_t* next, int64_t bytes, int64_t t, int64_t tiles) {
    const int64_t share = divide_up(divide_up(bytes, 64), tiles);
    task->prefetch_lines = int(divide_up(share, divide_up(task->k, every)));
    task->prefetch = next + t * share * 64;
    task->prefetch_end = std::min(task->prefetch + share * 64, next + bytes);
}

// Panels that are read together.
struct Panels {
    const PackedWeight* weight = nullptr;
    int64_t panel = 0;
    int wide = 0;  // 1 << wide of them

    const uint8_t* data() const { return weight->data() + panel * weight->panel_bytes(); }
};

// The sums of one tile of x with some panels, straight from the stored weights. `next` are read after these, if known.
void direct_sums(const Call& call, const Panels& panels, const Panels& next, int64_t t, int64_t tiles, float* sums) {
    const LinearArgs& args = call.args;
    const int64_t row = tile_start(args.rows, tiles, t);
    const int rows = int(tile_start(args.rows, tiles, t + 1) - row);
    const PackedWeight& weight = *panels.weight;
    TileTask task;
    task.weights = panels.data();
    task.panel_bytes = weight.panel_bytes();
    task.k = weight.inputs();
    task.x = args.x + row * args.x_stride;
    task.x_stride = args.x_stride;
    task.sums = sums;
    task.sums_panel = rows * kLinearPanel;
    const int every = kAskEvery[int(weight.type())];
    const UnitLayout unit = kUnits[int(weight.type())];
    if (tiles > 1) {
        // The tiles share in asking for the next panels, while these are in the cache.
        if (next.weight != nullptr) ask_for(&task, every, next.data(), next.weight->panel_bytes(), t, tiles);
        task.prefetch_panel = next.weight == nullptr ? 0 : next.weight->panel_bytes();
    } else if (unit.k > 2 || kLinearPanel * unit.k * rows >= 2 * unit.bytes) {
        // Few rows of plain types are read as fast as the hardware's prefetcher fetches; the others hardly overlap with
        // it.
        const int64_t ahead = std::min(weight.panel_bytes(), weight.panel_bytes() * kAhead / task.k);
        ask_for(&task, every, task.weights + ahead, weight.panel_bytes() - ahead, 0, 1);
        task.prefetch_lines = int(divide_up(weight.panel_bytes() / 64, divide_up(task.k, every)));
        task.prefetch_panel = weight.panel_bytes();
        if (next.weight != nullptr) {
            task.prefetch_then = next.data();
            task.prefetch_then_panel = next.weight->panel_bytes();
        }
    }
    call.kernels.direct[int(weight.type())][rows - 1][panels.wide](task);
}

void direct_group(const Call& call, const Group& group, const Group* next_group) {
    const int64_t tiles = divide_up(call.args.rows, call.kernels.rows);
    const int64_t most_rows = divide_up(call.args.rows, tiles);
    const auto widest_of = [&](const PackedWeight& weight, int64_t panels) {
        return widest(call.kernels.direct[int(weight.type())][most_rows - 1], panels);
    };
    float sums[kMostPanels * kLinearRows * kLinearPanel], up[kMostPanels * kLinearRows * kLinearPanel];
    for (int64_t panel = group.panel; panel < group.panel + group.panels;) {
        const int64_t left = group.panel + group.panels - panel;
        int wide = widest_of(*group.weight, left);
        if (group.up != nullptr) wide = std::min(wide, widest_of(*group.up, left));
        const Panels own{group.weight, panel, wide}, own_up{group.up, panel, wide};
        Panels next;
        if (panel + (1 << wide) < group.panel + group.panels) {
            next = {group.weight, panel + (1 << wide), wide};
        } else if (next_group != nullptr) {
            next = {next_group->weight, next_group->panel, wide};
        }
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = tile_start(call.args.rows, tiles, t);
            const int rows = int(tile_start(call.args.rows, tiles, t + 1) - row);
            direct_sums(call, own, group.up == nullptr ? next : own_up, t, tiles, sums);
            if (group.up != nullptr) direct_sums(call, own_up, next, t, tiles, up);
            for (int p = 0; p < 1 << wide; ++p) {
                const int at = p * rows * kLinearPanel;
                finish(call, group, panel + p, row, rows, sums + at, group.up == nullptr ? nullptr : up + at);
            }
        }
        panel += 1 << wide;
    }
}

// Memory of one thread, kept from call to call.
float* scratch(int64_t count) {
    thread_local std::vector<float> floats;
    if (int64_t(floats.size()) < count) floats.resize(size_t(count));
    return floats.data();
}

// k's that are expanded together: whole units, in pieces of nearly equal length.
struct Pieces {
    int64_t step, steps, count;

    explicit Pieces(const PackedWeight& weight) {
        step = std::max(kUnits[int(weight.type())].k, 32);
        steps = divide_up(weight.inputs(), step);
        count = divide_up(steps, kPieceBytes / (kLinearPanel * 4 * step));
    }
    int64_t start(int64_t i) const { return steps * i / count * step; }
    int64_t longest() const { return divide_up(steps, count) * step; }
};

// The sums [rows, 16] of one panel with rows whose packed x, tile by tile, is at `x`. `piece` has room for one.
void packed_sums(const LinearKernels& kernels, const PackedWeight& weight, int64_t panel, int64_t rows, const float* x,
                 float* piece, float* sums) {
    const UnitLayout unit = kUnits[int(weight.type())];
    const int64_t tiles = divide_up(rows, kernels.rows);
    const bool expand = weight.type() != WeightType::kF32;
    const Pieces pieces(weight);
    for (int64_t i = 0; i < pieces.count; ++i) {
        const int64_t begin = pieces.start(i), k = std::min(pieces.start(i + 1), weight.inputs()) - begin;
        const uint8_t* stored = weight.data() + panel * weight.panel_bytes() + begin / unit.k * unit.bytes;
        const int64_t stored_bytes = divide_up(k, unit.k) * unit.bytes;
        // Some kernels expand while they multiply the first tile: arithmetic that would wait for memory and stores.
        const int64_t height = tile_start(rows, tiles, 1);
        const LinearKernels::Tile expand_first = kernels.expand_first[int(weight.type())][height - 1];
        if (expand && expand_first == nullptr) kernels.expand[int(weight.type())](stored, k, piece);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t first = tile_start(rows, tiles, t), count = tile_start(rows, tiles, t + 1) - first;
            const bool expands = t == 0 && expand_first != nullptr;
            TileTask task;
            task.weights = expand && !expands ? reinterpret_cast<const uint8_t*>(piece) : stored;
            task.expanded = piece;
            task.k = k;
            task.x = x + first * weight.inputs() + begin * count;
            task.sums = sums + first * kLinearPanel;
            task.first = i == 0;
            ask_for(&task, kAskEvery[int(WeightType::kF32)], stored + stored_bytes, stored_bytes, t, tiles);
            (expands ? expand_first : kernels.packed[count - 1])(task);
        }
    }
}

// Rows [row, row + rows), of which packed_sums speaks.
void packed_group(const Call& call, const Group& group, int64_t row, int64_t rows, const float* x) {
    int64_t longest = Pieces(*group.weight).longest();
    if (group.up != nullptr) longest = std::max(longest, Pieces(*group.up).longest());
    float* piece = scratch(kLinearPanel * (2 * rows + longest));
    float* sums = piece + kLinearPanel * longest;
    float* up = group.up == nullptr ? nullptr : sums + kLinearPanel * rows;
    for (int64_t panel = group.panel; panel < group.panel + group.panels; ++panel) {
        packed_sums(call.kernels, *group.weight, panel, rows, x, piece, sums);
        if (up != nullptr) packed_sums(call.kernels, *group.up, panel, rows, x, piece, up);
        finish(call, group, panel, row, int(rows), sums, up);
    }
}

// Rows are cut into blocks of whole tiles, about equally long, of at most so many rows (but 8 tiles).
struct RowBlocks {
    int64_t rows, tile_rows, count;

    RowBlocks(int64_t rows, int64_t tile_rows, int64_t most) : rows(rows), tile_rows(tile_rows) {
        count = divide_up(rows, std::max<int64_t>(8 * tile_rows, most));
    }
    int64_t start(int64_t i) const {
        return std::min(rows, divide_up(rows, count * tile_rows) * tile_rows * i);
    }
};

// body(first, end) for every tile of every block.
template <class F>
void for_tiles(const RowBlocks& blocks, ThreadPool& pool, const F& body) {
    const int64_t most_tiles = divide_up(blocks.start(1), blocks.tile_rows);
    pool.run(blocks.count * most_tiles, [&](int, int64_t item) {
        const int64_t begin = blocks.start(item / most_tiles), rows = blocks.start(item / most_tiles + 1) - begin;
        const int64_t tiles = divide_up(rows, blocks.tile_rows), t = item % most_tiles;
        if (t < tiles) body(begin + tile_start(rows, tiles, t), begin + tile_start(rows, tiles, t + 1));
    });
}

// Rows [first, end) of x, normed where there is a norm, in memory of this thread if so. Sets the rows' stride.
const float* normed_rows(const Call& call, int64_t first, int64_t end, int64_t inputs, int64_t* stride) {
    const LinearArgs& args = call.args;
    const float* from = args.x + first * args.x_stride;
    *stride = args.x_stride;
    if (args.norm.weight == nullptr) return from;
    *stride = inputs;
    float* normed = scratch((end - first) * inputs);
    for (int64_t r = 0; r < end - first; ++r)
        call.isa.rows->norm(args.norm, from + r * args.x_stride, inputs, normed + r * inputs);
    return normed;
}

// The sums [rows, 16] of one panel with tile t of `tiles`, quantised at `x`.
void int8_sums(const Int8Kernels& kernels, const PackedWeight& weight, int64_t panel, int rows, const uint8_t* x,
               int64_t t, int64_t tiles, float* sums) {
    const uint8_t* base = weight.data() + panel * weight.panel_bytes();
    Int8Task task{base, weight.inputs(), x, sums};
    // The tiles share in asking for the next panel, while this one is in the cache. A single one is bound by memory, and
    // the hardware's prefetcher does better alone (docs/decisions.md).
    if (tiles > 1) ask_for(&task, int(kInt8Block), base + weight.panel_bytes(), weight.panel_bytes(), t, tiles);
    kernels.tile[int(weight.type())][rows - 1](task);
}

// Rows [row, row + rows), quantised tile by tile at `x`.
void int8_group(const Call& call, const Int8Kernels& kernels, const Group& group, int64_t row, int64_t rows,
                const uint8_t* x) {
    const int64_t row_bytes = group.weight->inputs() / kInt8Block * kInt8BlockBytes;
    const int64_t tiles = divide_up(rows, kernels.rows);
    float sums[kInt8Rows * kLinearPanel], up[kInt8Rows * kLinearPanel];
    for (int64_t panel = group.panel; panel < group.panel + group.panels; ++panel) {
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t first = tile_start(rows, tiles, t);
            const int count = int(tile_start(rows, tiles, t + 1) - first);
            const uint8_t* tile = x + first * row_bytes;
            int8_sums(kernels, *group.weight, panel, count, tile, t, tiles, sums);
            if (group.up != nullptr) int8_sums(kernels, *group.up, panel, count, tile, t, tiles, up);
            finish(call, group, panel, row + first, count, sums, group.up == nullptr ? nullptr : up);
        }
    }
}

void int8_linear(const Call& call, const std::vector<const PackedWeight*>& weights, ThreadPool& pool) {
    const Int8Kernels& kernels = int8_kernels(call.isa);
    const Shares shares(weights, call.args.gated, kMostPanels, pool.num_threads());
    const int64_t inputs = weights[0]->inputs();
    const int64_t row_bytes = inputs / kInt8Block * kInt8BlockBytes;
    const RowBlocks blocks(call.args.rows, kernels.rows, kRowBlockBytes / row_bytes);
    thread_local std::vector<uint8_t> prepared;
    if (int64_t(prepared.size()) < call.args.rows * row_bytes) prepared.resize(size_t(call.args.rows * row_bytes));
    uint8_t* x = prepared.data();
    const auto quantize = [&](int64_t first, int64_t end) {
        int64_t stride;
        const float* rows = normed_rows(call, first, end, inputs, &stride);
        kernels.quantize(rows, stride, int(end - first), inputs / kInt8Block, x + first * row_bytes);
    };
    if (call.args.rows <= kernels.rows) {
        quantize(0, call.args.rows);
    } else {
        for_tiles(blocks, pool, quantize);
    }
    for_groups(shares, blocks.count, pool, [&](int64_t block, const Group& group, const Group*) {
        const int64_t begin = blocks.start(block), rows = blocks.start(block + 1) - begin;
        if (rows > 0) int8_group(call, kernels, group, begin, rows, x + begin * row_bytes);
    });
}

void check_weights(const std::vector<const PackedWeight*>& weights, const LinearArgs& args) {
    for (const PackedWeight* weight : weights)
        if (weight->inputs() != weights[0]->inputs())
            throw std::invalid_argument("weights of one product must have the same inputs, got " +
                                        std::to_string(weights[0]->inputs()) + " and " +
                                        std::to_string(weight->inputs()));
    if (!args.gated) return;
    if (args.activation == nullptr || weights.size() != 2 || weights[0]->outputs() != weights[1]->outputs())
        throw std::invalid_argument("a gated product needs an activation and two weights of the same outputs");
}

}  // namespace

const LinearKernels& linear_kernels(const Isa& isa) {
    if (std::strcmp(isa.name, "avx512") == 0) return *avx512_linear();
    if (std::strcmp(isa.name, "avx2") == 0) return *avx2_linear();
    return portable_linear();
}

const Int8Kernels& int8_kernels(const Isa& isa) {
    if (std::strcmp(isa.name, "portable") == 0) return portable_int8();
    static const bool vnni = cpu_has_vnni() && vnni_int8() != nullptr;
    return vnni && std::strcmp(isa.name, "avx512") == 0 ? *vnni_int8() : *avx2_int8();
}

bool has_int8_kernel(WeightType type) { return portable_int8().tile[int(type)][0] != nullptr; }

void linear(const std::vector<const PackedWeight*>& weights, const LinearArgs& given, ThreadPool& pool,
            const Isa& isa) {
    if (given.rows < 1 || weights.empty()) return;
    check_weights(weights, given);
    LinearArgs args = given;
    const Call call{linear_kernels(isa), isa, args};
    if (args.int8 && std::all_of(weights.begin(), weights.end(),
                                 [](const PackedWeight* weight) { return has_int8_kernel(weight->type()); }))
        return int8_linear(call, weights, pool);
    const int64_t inputs = weights[0]->inputs();
    const bool quantized = std::any_of(weights.begin(), weights.end(),
                                       [](const PackedWeight* weight) { return kUnits[int(weight->type())].k > 2; });
    thread_local std::vector<float> prepared;  // x, normed or packed
    if (int64_t(prepared.size()) < args.rows * inputs) prepared.resize(size_t(args.rows * inputs));
    float* x = prepared.data();
    if (args.rows <= (quantized ? kMostDirectQuantizedRows : kMostDirectRows)) {
        if (args.norm.weight != nullptr) {
            for (int64_t r = 0; r < args.rows; ++r)
                isa.rows->norm(args.norm, args.x + r * args.x_stride, inputs, x + r * inputs);
            args.x = x;
            args.x_stride = inputs;
        }
        for_groups(Shares(weights, args.gated, kMostPanels, pool.num_threads()), 1, pool,
                   [&](int64_t, const Group& group, const Group* next) { direct_group(call, group, next); });
        return;
    }
    const RowBlocks blocks(args.rows, call.kernels.rows, kRowBlockBytes / (inputs * 4));
    for_tiles(blocks, pool, [&](int64_t first, int64_t end) {
        int64_t stride;
        const float* rows = normed_rows(call, first, end, inputs, &stride);
        call.kernels.pack_x(rows, stride, int(end - first), inputs, x + first * inputs);
    });
    for_groups(Shares(weights, args.gated, kMostPanels, pool.num_threads()), blocks.count, pool,
               [&](int64_t block, const Group& group, const Group*) {
        const int64_t begin = blocks.start(block), rows = blocks.start(block + 1) - begin;
        if (rows > 0) packed_group(call, group, begin, rows, x + begin * inputs);
    });
}

}  // namespace octavo
