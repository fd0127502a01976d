#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

float* panel(const PackedWeight& weight, int64_t index) {
    return reinterpret_cast<float*>(const_cast<uint8_t*>(weight.data())) + index * kLinearPanel * weight.inputs();
}

int64_t panels(int64_t outputs) { return (outputs + kLinearPanel - 1) / kLinearPanel; }

}  // namespace

WeightType weight_type(const std::string& name) {
    if (name == "f32") return WeightType::kF32;
    throw std::invalid_argument("weight type must be f32, got '" + name + "'");
}

PackedWeight::PackedWeight(WeightType type, int64_t outputs, int64_t inputs)
    : type_(type), outputs_(outputs), inputs_(inputs), bytes_(panels(outputs) * kLinearPanel * inputs * 4) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a weight must have at least one output and input");
    data_.reset(new uint8_t[size_t(bytes_)]());
}

void PackedWeight::pack_rows(const void* data, int64_t first, int64_t rows, ThreadPool&) {
    if (first < 0 || rows < 0 || first + rows > outputs_)
        throw std::invalid_argument("rows lie outside the weight");
    const float* in = static_cast<const float*>(data);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < inputs_; ++k)
            panel(*this, (first + r) / kLinearPanel)[k * kLinearPanel + (first + r) % kLinearPanel] =
                in[r * inputs_ + k];
}

void PackedWeight::expand_row(int64_t row, float* out) const {
    if (row < 0 || row >= outputs_) throw std::invalid_argument("row lies outside the weight");
    for (int64_t k = 0; k < inputs_; ++k)
        out[k] = panel(*this, row / kLinearPanel)[k * kLinearPanel + row % kLinearPanel];
}

void linear(const std::vector<const PackedWeight*>& weights, const LinearArgs& args, ThreadPool& pool, const Isa&) {
    int64_t first = 0;
    for (const PackedWeight* weight : weights) {
        pool.run(panels(weight->outputs()), [&](int, int64_t index) {
            const float* w = panel(*weight, index);
            const int64_t begin = index * kLinearPanel;
            const int64_t end = std::min(begin + kLinearPanel, weight->outputs());
            for (int64_t r = 0; r < args.rows; ++r) {
                float sum[kLinearPanel] = {};
                for (int64_t k = 0; k < weight->inputs(); ++k)
                    for (int n = 0; n < kLinearPanel; ++n)
                        sum[n] = std::fma(args.x[r * args.x_stride + k], w[k * kLinearPanel + n], sum[n]);
                for (int64_t n = begin; n < end; ++n) {
                    const int64_t at = r * args.out_stride + first + n;
                    float y = sum[n - begin];
                    if (args.bias != nullptr) y += args.bias[first + n];
                    if (args.residual != nullptr) y += args.residual[at];
                    args.out[at] = y;
                }
            }
        });
        first += weight->outputs();
    }
}

}  // namespace octavo
