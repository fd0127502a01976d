// The scan plane: an approximation of K whose error is known, and what bounds of a score are made of.
//
// A score is s = fl(scale * fl(q.k)), one chain of D fused multiply-adds and a product; u = 2^-24. With k's record
// (r_hat = s_k c, k = m + r) and q in 16 bits, the scan gives a = scale * (q.m + q_hat.r_hat). Then |s - a| is at
// most the sum of four terms, each times the scale:
//   |q| e_k                         what rounding k's residual lost, e_k >= |r - r_hat|
//   |q - q_hat| |r_hat|             what rounding q lost; |r_hat| <= 127 s_k sqrt(D)
//   rho |q| (|m| + |r_hat|)         fp32 rounding of the scan: D multiply-adds for q.m, and a few products
//   D u |q| |k|                     fp32 rounding of the score itself, |k| <= |m| + |r_hat| + e_k
// Codes are multiplied in integers, which is exact. rho = (2 D + 32) u holds both last terms, and everything is
// widened by 2^-12 for the arithmetic of the bounds themselves; 1e-36 covers what underflows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "half.h"
#include "topk_paged.h"

namespace octavo {
namespace {

constexpr double kMaxCode = 127.0;
// With 127 * 32767 a product and 128 pairs of them a sum stays below 2^31 up to a head_dim of 256.
constexpr double kMaxQueryCode = 32767.0;
constexpr double kWiden = 1.0 + 0x1p-12;
// Above this a partial sum of the score could overflow where the whole does not: nothing is known then.
constexpr double kMaxQuery = 1e28;
constexpr float kLeastFloat = std::numeric_limits<float>::min();
constexpr double kRoundTo = 0x1.8p52;  // adding and subtracting it rounds to a whole number
constexpr double kLeastScale = 0x1p-14;  // the least normal float16
constexpr uint16_t kNotKnown = 0x7e00;    // NaN

float float_up(double x) {
    const float f = float(x);
    return double(f) < x ? std::nextafter(f, std::numeric_limits<float>::infinity()) : f;
}

}  // namespace

uint16_t half_up(double x, const Isa& isa) {
    if (!(x <= 65504.0)) return 0x7c00;
    float in[8] = {float(x)};
    uint16_t out[8];
    isa.to_half(in, 8, out);
    if (double(half_to_float(out[0])) < x) ++out[0];
    return out[0];
}

bool seal_record(const void* key, bool half, int head_dim, Reference reference, const Isa& isa, uint8_t* record) {
    const RecordLayout layout = record_layout(head_dim);
    float k[kRecordKeys][256], mean[256], sum[256] = {}, low[256], high[256];
    // Of the numbers that are finite: what else there is costs its own key alone.
    std::fill(low, low + head_dim, std::numeric_limits<float>::max());
    std::fill(high, high + head_dim, -std::numeric_limits<float>::max());
    uint16_t mean_half[256], scale[kRecordKeys], error[kRecordKeys];
    for (int i = 0; i < kRecordKeys; ++i) {
        for (int d = 0; d < head_dim; ++d) {
            const int at = i * head_dim + d;
            k[i][d] = half ? half_to_float(static_cast<const uint16_t*>(key)[at]) : static_cast<const float*>(key)[at];
            sum[d] += k[i][d];
            if (!std::isfinite(k[i][d])) continue;
            low[d] = std::min(low[d], k[i][d]);
            high[d] = std::max(high[d], k[i][d]);
        }
    }
    for (int d = 0; d < head_dim; ++d)
        mean[d] = reference == Reference::mean ? sum[d] * (1.0f / kRecordKeys) : 0.5f * low[d] + 0.5f * high[d];
    isa.to_half(mean, head_dim, mean_half);
    double square = 0.0;
    bool known = true;
    for (int d = 0; d < head_dim; ++d) {
        mean[d] = half_to_float(mean_half[d]);
        known = known && std::isfinite(mean[d]);
        square += double(mean[d]) * double(mean[d]);
    }
    int8_t* code = reinterpret_cast<int8_t*>(record);
    for (int i = 0; i < kRecordKeys; ++i) {
        double largest = 0.0, lost = 0.0;
        bool finite = known;
        for (int d = 0; d < head_dim; ++d) {
            largest = std::max(largest, std::fabs(double(k[i][d]) - double(mean[d])));
            finite = finite && std::isfinite(k[i][d]);
        }
        scale[i] = half_up(std::max(largest / kMaxCode, kLeastScale), isa);
        finite = finite && scale[i] != 0x7c00;
        if (!finite) scale[i] = half_up(kLeastScale, isa);
        const double step = half_to_float(scale[i]);
        for (int d = 0; d < head_dim; ++d) {
            const double r = finite ? double(k[i][d]) - double(mean[d]) : 0.0;
            const double c = std::clamp((r / step + kRoundTo) - kRoundTo, -kMaxCode, kMaxCode);
            code[(d / 2 * kRecordKeys + i) * 2 + d % 2] = int8_t(c);
            lost += (r - step * c) * (r - step * c);
        }
        error[i] = half_up(finite ? std::sqrt(lost) * (1.0 + 1e-9) : std::numeric_limits<double>::infinity(), isa);
    }
    if (!known) {
        std::fill(mean_half, mean_half + head_dim, uint16_t(0));
        square = 0.0;
    }
    const float norm = float_up(std::sqrt(square) * (1.0 + 1e-9));
    std::memcpy(record + layout.mean, mean_half, size_t(head_dim) * 2);
    std::memcpy(record + layout.scale, scale, sizeof scale);
    std::memcpy(record + layout.error, error, sizeof error);
    std::memcpy(record + layout.norm, &norm, sizeof norm);
    return known;
}

void seal_mean_value(const void* value, bool half, bool known, int head_dim, const Isa& isa, uint16_t* mean) {
    float sum[256] = {};
    for (int i = 0; i < kRecordKeys; ++i)
        for (int d = 0; d < head_dim; ++d) {
            const int at = i * head_dim + d;
            sum[d] += half ? half_to_float(static_cast<const uint16_t*>(value)[at]) : static_cast<const float*>(value)[at];
        }
    for (int d = 0; d < head_dim; ++d) sum[d] *= 1.0f / kRecordKeys;
    isa.to_half(sum, head_dim, mean);
    for (int d = 0; d < head_dim; ++d) known = known && (mean[d] & 0x7c00) != 0x7c00;
    if (!known) mean[0] = kNotKnown;
}

void seal_bounds(const void* key, bool half, int head_dim, uint8_t* bounds) {
    constexpr float kMostCode = 127.0f;
    float low[256], high[256], largest = 0.0f;
    for (int i = 0; i < kRecordKeys; ++i)
        for (int d = 0; d < head_dim; ++d) {
            const int at = i * head_dim + d;
            const float k = half ? half_to_float(static_cast<const uint16_t*>(key)[at]) : static_cast<const float*>(key)[at];
            low[d] = i == 0 ? k : std::min(low[d], k);
            high[d] = i == 0 ? k : std::max(high[d], k);
            // A NaN stays: nothing is greater.
            if (std::fabs(k) > largest || k != k) largest = std::fabs(k);
        }
    float step = largest / kMostCode;
    if (!(largest <= std::numeric_limits<float>::max())) step = std::numeric_limits<float>::quiet_NaN();
    auto* code = reinterpret_cast<int8_t*>(bounds);
    for (int d = 0; d < head_dim; ++d) {
        code[d] = step > 0.0f ? int8_t(std::nearbyint(low[d] / step)) : int8_t(0);
        code[head_dim + d] = step > 0.0f ? int8_t(std::nearbyint(high[d] / step)) : int8_t(0);
    }
    std::memcpy(bounds + 2 * head_dim, &step, sizeof step);
}

void prepare_query(const float* q, int head_dim, float scale, int16_t* code, ScanQuery* query) {
    double square = 0.0, largest = 0.0, lost = 0.0;
    for (int d = 0; d < head_dim; ++d) {
        square += double(q[d]) * double(q[d]);
        largest = std::max(largest, std::fabs(double(q[d])));
    }
    const double norm = std::sqrt(square);
    const float step = largest > 0.0 ? float(largest / kMaxQueryCode) : 1.0f;
    query->code = code;
    query->q = q;
    query->mean_scale = scale;
    // Too large, see kMaxQuery; or so small that the steps themselves are not exact to u.
    const bool too_small = !(step >= kLeastFloat && step * scale >= kLeastFloat);
    if (!(norm <= kMaxQuery) || !(norm * scale <= kMaxQuery) || too_small) {
        // Every bound is infinite or NaN: each key is rescored.
        std::fill(code, code + head_dim, int16_t(0));
        query->code_scale = 0.0f;
        query->per_error = query->per_scale = query->per_norm = std::numeric_limits<float>::infinity();
        return;
    }
    for (int d = 0; d < head_dim; ++d) {
        const double c = std::clamp((double(q[d]) / double(step) + kRoundTo) - kRoundTo, -kMaxQueryCode, kMaxQueryCode);
        code[d] = int16_t(c);
        lost += (double(q[d]) - double(step) * c) * (double(q[d]) - double(step) * c);
    }
    const double rho = (2.0 * head_dim + 32.0) * 0x1p-24;
    query->code_scale = step * scale;
    query->per_error = float_up(scale * norm * kWiden);
    query->per_scale = float_up(scale * kMaxCode * std::sqrt(double(head_dim)) * (std::sqrt(lost) + rho * norm) * kWiden);
    query->per_norm = float_up(scale * rho * norm * kWiden);
}

void scan_bounds(const float* q, int num_queries, const ScanKeys& keys, float* value, float* bound, float* score,
                 const Isa& isa) {
    const int d = keys.head_dim, num_keys = kRecordKeys * keys.num_records;
    const int record_bytes = record_layout(d).bytes;
    const size_t element = keys.half ? 2 : 4;
    std::vector<uint8_t> plane(size_t(record_bytes) * size_t(keys.num_records));
    for (int i = 0; i < keys.num_records; ++i)
        seal_record(static_cast<const char*>(keys.key) + size_t(i * kRecordKeys * d) * element, keys.half, d, keys.reference,
                    isa, plane.data() + size_t(i) * size_t(record_bytes));
    std::vector<int16_t> code(static_cast<size_t>(d));
    float values[kScoreStride], bounds[kScoreStride], k[256];
    for (int r = 0; r < num_queries; ++r) {
        ScanQuery query{};
        prepare_query(q + r * d, d, keys.scale, code.data(), &query);
        for (int i = 0; i < keys.num_records; ++i) {
            const uint8_t* record = plane.data() + size_t(i) * size_t(record_bytes);
            const uint8_t* nothing = nullptr;
            paged_kernels(isa).scan({1, d, &query, 1, &record, &nothing, values, bounds});
            const int64_t at = int64_t(r) * num_keys + i * kRecordKeys;
            std::copy(values, values + kRecordKeys, value + at);
            std::copy(bounds, bounds + kRecordKeys, bound + at);
        }
        for (int j = 0; j < num_keys; ++j) {
            float sum = 0.0f;
            for (int i = 0; i < d; ++i) {
                k[i] = keys.half ? half_to_float(static_cast<const uint16_t*>(keys.key)[j * d + i])
                                 : static_cast<const float*>(keys.key)[j * d + i];
                sum = std::fma(q[r * d + i], k[i], sum);
            }
            score[int64_t(r) * num_keys + j] = sum * keys.scale;
        }
    }
}

}  // namespace octavo
