#include "linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

// Rows that are computed straight from the packed weights, tile by tile; with more of them, a piece of a panel is
// expanded to float32 first.
constexpr int64_t kMostDirectRows = 12;
// A piece of one panel, as float32: half of a first-level cache.
constexpr int64_t kPieceBytes = 18 << 10;
// Rows of x whose packed form is walked again and again, for every panel: half of a second-level cache.
constexpr int64_t kRowBlockBytes = 512 << 10;

constexpr int kMostPanels = 4;
// How many k ahead of its reads a single tile asks for memory.
constexpr int64_t kAhead = 64;

// rows into tiles of nearly equal size: tile i starts here.
int64_t tile_start(int64_t rows, int64_t tiles, int64_t i) { return rows * i / tiles; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A run of panels of one part.
struct Group {
    const PackedWeight* weight;
    int64_t panel;   // the first
    int64_t panels;  // how many
    int64_t output;  // where the first panel's outputs begin in out
};

// Groups of about equal bytes: enough of them that no thread waits long for the last, and each long enough to be
// read in one stretch.
std::vector<Group> make_groups(const std::vector<const PackedWeight*>& weights, int num_threads) {
    int64_t bytes = 0;
    for (const PackedWeight* weight : weights) bytes += weight->bytes();
    const int64_t target = std::min<int64_t>(bytes / (num_threads * 6), 512 << 10);
    std::vector<Group> groups;
    int64_t output = 0;
    for (const PackedWeight* weight : weights) {
        const int64_t fours = std::max<int64_t>(1, target / (weight->panel_bytes() * kMostPanels));
        for (int64_t panel = 0; panel < weight->panels(); panel += fours * kMostPanels) {
            const int64_t count = std::min(fours * kMostPanels, weight->panels() - panel);
            groups.push_back({weight, panel, count, output + panel * kLinearPanel});
        }
        output += weight->outputs();
    }
    return groups;
}

int widest(const LinearKernels::Tile* tiles, int64_t panels) {
    int i = 2;
    while (i > 0 && ((1 << i) > panels || tiles[i] == nullptr)) --i;
    return i;
}

// Adds bias and residual to the sums of rows [row, row + rows) of `panels` panels.
void finish(const LinearKernels& kernels, const LinearArgs& args, const Group& group, int64_t panel, int panels,
            int64_t row, int rows, const float* sums, int64_t sums_panel) {
    for (int p = 0; p < panels; ++p) {
        const int64_t begin = (panel + p) * kLinearPanel, left = group.weight->outputs() - begin;
        const int64_t output = group.output + begin - group.panel * kLinearPanel;
        kernels.finish({sums + p * sums_panel, rows, int(std::min<int64_t>(left, kLinearPanel)),
                        args.bias == nullptr ? nullptr : args.bias + output,
                        args.residual == nullptr ? nullptr : args.residual + row * args.out_stride + output,
                        args.out + row * args.out_stride + output, args.out_stride});
    }
}

// Tile t of `tiles`, with a kernel for `type`, asks for its share of `bytes` at `next`, of every panel.
void ask_for(TileTask* task, WeightType type, const uint8_t* next, int64_t bytes, int64_t t, int64_t tiles) {
    const int64_t times = divide_up(task->k, kAskEvery[int(type)]);
    task->prefetch_lines = int(divide_up(divide_up(bytes, 64), tiles * times));
    task->prefetch = next + t * task->prefetch_lines * times * 64;
}

void direct_group(const LinearKernels& kernels, const LinearArgs& args, const Group& group) {
    const PackedWeight& weight = *group.weight;
    const int64_t tiles = divide_up(args.rows, kLinearRows), k = weight.inputs();
    const int most_rows = int(divide_up(args.rows, tiles));
    const LinearKernels::Tile(*table)[3] = kernels.direct[int(weight.type())];
    float sums[kMostPanels * kLinearRows * kLinearPanel];
    for (int64_t panel = group.panel; panel < group.panel + group.panels;) {
        const int wide = widest(table[most_rows - 1], group.panel + group.panels - panel), panels = 1 << wide;
        const uint8_t* base = weight.data() + panel * weight.panel_bytes();
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = tile_start(args.rows, tiles, t);
            const int rows = int(tile_start(args.rows, tiles, t + 1) - row);
            TileTask task{base, weight.panel_bytes(), k, args.x + row * args.x_stride, args.x_stride, sums,
                          rows * kLinearPanel, true, nullptr, weight.panel_bytes(), 0};
            if (tiles > 1) {
                // The tiles share in asking for the next panels, while these are in the cache.
                ask_for(&task, weight.type(), base + panels * weight.panel_bytes(), weight.panel_bytes(), t, tiles);
            } else if (kUnits[int(weight.type())].k > 2) {
                // Plain types are read as fast as the hardware's prefetcher fetches; these hardly overlap with it.
                ask_for(&task, weight.type(), base + weight.panel_bytes() * kAhead / k, weight.panel_bytes(), 0, 1);
            }
            table[rows - 1][wide](task);
            finish(kernels, args, group, panel, panels, row, rows, sums, task.sums_panel);
        }
        panel += panels;
    }
}

// Memory of one thread, kept from call to call.
float* scratch(int64_t count) {
    thread_local std::vector<float> floats;
    if (int64_t(floats.size()) < count) floats.resize(size_t(count));
    return floats.data();
}

// Rows [row, row + rows) whose packed x, tile by tile, is at `x`.
void packed_group(const LinearKernels& kernels, const LinearArgs& args, const Group& group, int64_t row, int64_t rows,
                  const float* x) {
    const PackedWeight& weight = *group.weight;
    const UnitLayout unit = kUnits[int(weight.type())];
    const int64_t tiles = divide_up(rows, kLinearRows);
    const int most_rows = int(divide_up(rows, tiles));
    const bool expand = weight.type() != WeightType::kF32;
    for (int64_t panel = group.panel; panel < group.panel + group.panels;) {
        const int wide = widest(kernels.packed[most_rows - 1], group.panel + group.panels - panel), panels = 1 << wide;
        // Whole units, and pieces of nearly equal length.
        const int64_t step = std::max(unit.k, 32);
        const int64_t steps = divide_up(weight.inputs(), step);
        const int64_t most_steps = std::max<int64_t>(1, kPieceBytes / (kLinearPanel * 4 * step));
        const int64_t pieces = divide_up(steps, most_steps);
        float* sums = scratch(panels * kLinearPanel * (rows + divide_up(steps, pieces) * step));
        float* piece = sums + panels * kLinearPanel * rows;
        const uint8_t* base = weight.data() + panel * weight.panel_bytes();
        for (int64_t i = 0; i < pieces; ++i) {
            const int64_t begin = steps * i / pieces * step;
            const int64_t end = std::min(steps * (i + 1) / pieces * step, weight.inputs()), k = end - begin;
            const uint8_t* stored = base + begin / unit.k * unit.bytes;
            const int64_t stored_bytes = divide_up(k, unit.k) * unit.bytes;
            if (expand)
                for (int p = 0; p < panels; ++p)
                    kernels.expand[int(weight.type())](stored + p * weight.panel_bytes(), k,
                                                       piece + p * k * kLinearPanel);
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t first = tile_start(rows, tiles, t), count = tile_start(rows, tiles, t + 1) - first;
                TileTask task{expand ? reinterpret_cast<const uint8_t*>(piece) : stored,
                                    expand ? k * kLinearPanel * 4 : weight.panel_bytes(),
                                    k,
                                    x + first * weight.inputs() + begin * count,
                                    0,
                                    sums + first * kLinearPanel,
                                    rows * kLinearPanel,
                                    i == 0,
                                    nullptr,
                                    weight.panel_bytes(),
                                    0};
                ask_for(&task, WeightType::kF32, stored + stored_bytes, stored_bytes, t, tiles);
                kernels.packed[count - 1][wide](task);
            }
        }
        for (int64_t first = 0; first < rows; first += kLinearRows)
            finish(kernels, args, group, panel, panels, row + first,
                   int(std::min<int64_t>(kLinearRows, rows - first)), sums + first * kLinearPanel,
                   rows * kLinearPanel);
        panel += panels;
    }
}

}  // namespace

const LinearKernels& linear_kernels(const Isa& isa) {
    if (std::strcmp(isa.name, "avx512") == 0) return *avx512_linear();
    if (std::strcmp(isa.name, "avx2") == 0) return *avx2_linear();
    return portable_linear();
}

void linear(const std::vector<const PackedWeight*>& weights, const LinearArgs& args, ThreadPool& pool, const Isa& isa) {
    if (args.rows < 1 || weights.empty()) return;
    for (const PackedWeight* weight : weights)
        if (weight->inputs() != weights[0]->inputs())
            throw std::invalid_argument("weights of one product must have the same inputs, got " +
                                        std::to_string(weights[0]->inputs()) + " and " +
                                        std::to_string(weight->inputs()));
    const LinearKernels& kernels = linear_kernels(isa);
    const std::vector<Group> groups = make_groups(weights, pool.num_threads());
    const int64_t count = int64_t(groups.size());
    if (args.rows <= kMostDirectRows) {
        pool.run(count, [&](int, int64_t i) { direct_group(kernels, args, groups[size_t(i)]); });
        return;
    }
    const int64_t inputs = weights[0]->inputs();
    const int64_t most_rows = std::max<int64_t>(8 * kLinearRows, kRowBlockBytes / (inputs * 4));
    const int64_t blocks = divide_up(args.rows, most_rows);
    const auto block_start = [&](int64_t block) {
        return std::min(args.rows, divide_up(args.rows, blocks * kLinearRows) * kLinearRows * block);
    };
    thread_local std::vector<float> packed;
    if (int64_t(packed.size()) < args.rows * inputs) packed.resize(size_t(args.rows * inputs));
    float* x = packed.data();
    const int64_t most_tiles = divide_up(block_start(1), kLinearRows);
    pool.run(blocks * most_tiles, [&](int, int64_t item) {
        const int64_t block = item / most_tiles, t = item % most_tiles;
        const int64_t begin = block_start(block), rows = block_start(block + 1) - begin;
        const int64_t tiles = divide_up(rows, kLinearRows);
        if (t >= tiles) return;
        const int64_t first = begin + tile_start(rows, tiles, t), end = begin + tile_start(rows, tiles, t + 1);
        kernels.pack_x(args.x + first * args.x_stride, args.x_stride, int(end - first), inputs, x + first * inputs);
    });
    pool.run(blocks * count, [&](int, int64_t item) {
        const int64_t begin = block_start(item / count), rows = block_start(item / count + 1) - begin;
        if (rows > 0) packed_group(kernels, args, groups[size_t(item % count)], begin, rows, x + begin * inputs);
    });
}

}  // namespace octavo
