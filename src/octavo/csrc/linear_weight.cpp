// PackedWeight: memory, packing, reading back.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "linear.h"
#include "linear_pack.h"
#include "plan.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr WeightFormat kFormats[kNumWeightTypes] = {
    {"f32", 1, 4},    {"f16", 1, 2},    {"bf16", 1, 2},     {"q8_0", 32, 34},   {"q4_0", 32, 18},
    {"q4_1", 32, 20}, {"q5_0", 32, 22}, {"q4_k", 256, 144}, {"q6_k", 256, 210},
};

constexpr int64_t kHugePage = int64_t(2) << 20, kSlabBytes = int64_t(64) << 20;

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

void check_inputs(WeightType type, int64_t inputs) {
    const WeightFormat& format = kFormats[int(type)];
    if (inputs % format.block != 0)
        throw std::invalid_argument("inputs of a " + std::string(format.name) + " weight must be a multiple of " +
                                    std::to_string(format.block) + ", got " + std::to_string(inputs));
}

// Bytes of a row as a checkpoint has it.
int64_t stored_row_bytes(WeightType type, int64_t inputs) {
    return inputs / kFormats[int(type)].block * kFormats[int(type)].block_bytes;
}

int64_t panel_bytes_of(WeightType type, int64_t inputs) {
    const UnitLayout unit = kUnits[int(type)];
    return round_up((inputs + unit.k - 1) / unit.k * unit.bytes, 64);
}

#if defined(__linux__)
// Zeroed, at the start of a huge page; memory is used as it is first written.
std::shared_ptr<uint8_t> map_slab(int64_t bytes) {
    const size_t whole = size_t(bytes + kHugePage);
    void* map = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t start = (reinterpret_cast<uintptr_t>(map) + kHugePage - 1) & ~uintptr_t(kHugePage - 1);
    madvise(reinterpret_cast<void*>(start), size_t(bytes), MADV_HUGEPAGE);
    return {reinterpret_cast<uint8_t*>(start), [map, whole](uint8_t*) { munmap(map, whole); }};
}
#else
std::shared_ptr<uint8_t> map_slab(int64_t bytes) {
    void* data = std::calloc(size_t(bytes) + 64, 1);
    if (data == nullptr) throw std::bad_alloc();
    const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + 63) & ~uintptr_t(63);
    return {reinterpret_cast<uint8_t*>(start), [data](uint8_t*) { std::free(data); }};
}
#endif

}  // namespace

std::shared_ptr<uint8_t> WeightMemory::take(int64_t bytes) {
    bytes = round_up(bytes, 64);
    if (bytes > left_) {
        const int64_t size = round_up(std::max(bytes, bytes_ == 0 ? bytes : kSlabBytes), kHugePage);
        slab_ = map_slab(size);
        left_ = size;
        bytes_ += size;
        next_ = slab_.get();
    }
    std::shared_ptr<uint8_t> piece(slab_, next_);
    next_ += bytes;
    left_ -= bytes;
    return piece;
}

const WeightFormat& weight_format(WeightType type) { return kFormats[int(type)]; }

WeightType weight_type(const std::string& name) {
    std::string known;
    for (int i = 0; i < kNumWeightTypes; ++i) {
        if (name == kFormats[i].name) return WeightType(i);
        known += std::string(i == 0 ? "" : i + 1 == kNumWeightTypes ? " or " : ", ") + kFormats[i].name;
    }
    throw std::invalid_argument("weight type must be " + known + ", got '" + name + "'");
}

PackedWeight::PackedWeight(WeightType type, int64_t outputs, int64_t inputs, WeightMemory& memory)
    : type_(type), outputs_(outputs), inputs_(inputs), panel_bytes_(0) {
    if (outputs < 1 || inputs < 1)
        throw std::invalid_argument("a weight must have at least one output and one input, got [" +
                                    std::to_string(outputs) + ", " + std::to_string(inputs) + "]");
    check_inputs(type, inputs);
    panel_bytes_ = panel_bytes_of(type, inputs);
    data_ = memory.take(bytes());
}

void PackedWeight::pack_rows(const void* data, int64_t first, int64_t rows, ThreadPool& pool) {
    if (first < 0 || rows < 0 || first > outputs_ || rows > outputs_ - first)
        throw std::invalid_argument("rows " + std::to_string(first) + " to " + std::to_string(first + rows) +
                                    " do not lie in a weight of " + std::to_string(outputs_));
    if (rows == 0) return;
    const int64_t first_panel = first / kLinearPanel, last_panel = (first + rows - 1) / kLinearPanel;
    const int64_t row_bytes = stored_row_bytes(type_, inputs_);
    pool.run(last_panel - first_panel + 1, [&](int, int64_t i) {
        const int64_t panel = first_panel + i, begin = std::max(first, panel * kLinearPanel);
        const int64_t end = std::min(first + rows, (panel + 1) * kLinearPanel);
        pack_panel(type_, static_cast<const uint8_t*>(data) + (begin - first) * row_bytes, row_bytes,
                   int(begin - panel * kLinearPanel), int(end - panel * kLinearPanel),
                   data_.get() + panel * panel_bytes_);
    });
}

void PackedWeight::pack_expanded(WeightType stored, const void* data, ThreadPool& pool) {
    if (type_ != WeightType::kF32)
        throw std::invalid_argument("only an f32 weight takes expanded values, this one is " +
                                    std::string(kFormats[int(type_)].name));
    check_inputs(stored, inputs_);
    const int64_t row_bytes = stored_row_bytes(stored, inputs_), bytes = panel_bytes_of(stored, inputs_);
    const LinearKernels& kernels = linear_kernels(choose_isa("auto"));
    std::vector<uint8_t> scratch(size_t(pool.num_threads() * bytes));
    pool.run(panels(), [&](int thread, int64_t panel) {
        const int64_t first = panel * kLinearPanel, rows = std::min<int64_t>(outputs_ - first, kLinearPanel);
        uint8_t* packed = scratch.data() + thread * bytes;
        if (rows < kLinearPanel) std::memset(packed, 0, size_t(bytes));
        pack_panel(stored, static_cast<const uint8_t*>(data) + first * row_bytes, row_bytes, 0, int(rows), packed);
        kernels.expand[int(stored)](packed, inputs_, reinterpret_cast<float*>(data_.get() + panel * panel_bytes_));
    });
}

void PackedWeight::expand_row(int64_t row, float* out) const {
    if (row < 0 || row >= outputs_)
        throw std::invalid_argument("row " + std::to_string(row) + " does not lie in a weight of " +
                                    std::to_string(outputs_));
    // A row is read for each token of a prompt, and is small; its 15 neighbours cost little beside the lookup.
    constexpr int64_t kPiece = 256;
    float piece[kPiece * kLinearPanel];
    const UnitLayout unit = kUnits[int(type_)];
    const uint8_t* panel = data() + row / kLinearPanel * panel_bytes_;
    const LinearKernels& kernels = linear_kernels(choose_isa("auto"));
    for (int64_t k = 0; k < inputs_; k += kPiece) {
        const int64_t count = std::min(kPiece, inputs_ - k);
        kernels.expand[int(type_)](panel + k / unit.k * unit.bytes, count, piece);
        for (int64_t i = 0; i < count; ++i) out[k + i] = piece[i * kLinearPanel + row % kLinearPanel];
    }
}

}  // namespace octavo
