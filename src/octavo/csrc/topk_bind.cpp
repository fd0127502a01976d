// The Python face of top-k attention; octavo.kernels.topk_native checks the tensors behind the addresses.
#include "topk_bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "plan.h"
#include "pool.h"
#include "topk_paged.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// Address, then the strides of batch, head and row in elements.
using Tensor = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
Heads<T> heads(const Tensor& x) {
    return {at<T>(std::get<0>(x)), std::get<1>(x), std::get<2>(x), std::get<3>(x)};
}

void check(const TopkShape& s) {
    const bool sizes = s.batch >= 0 && s.num_queries >= 0 && s.num_keys >= 0 && s.num_keys < (int64_t(1) << 31);
    const bool all_heads = s.num_kv_heads >= 1 && s.num_heads >= 1 && s.num_heads % s.num_kv_heads == 0;
    if (!sizes || !all_heads || s.head_dim < 8 || s.head_dim % 8 != 0)
        throw std::invalid_argument(
            "top-k attention needs heads that are a multiple of the KV heads and a head_dim that is a multiple of 8");
    if (s.topk < 0 || s.topk > s.num_keys || s.recent < 0 || s.recent > s.topk || (s.recent > 0 && !s.causal))
        throw std::invalid_argument("top-k attention needs 0 <= recent <= topk <= num_keys, and causal for recent");
    if (s.causal && s.num_keys < s.num_queries)
        throw std::invalid_argument("causal top-k attention needs at least as many keys as queries");
}

}  // namespace

void bind_topk(nb::module_& m) {
    nb::class_<TopkShape>(m, "TopkShape")
        .def(
            "__init__",
            [](TopkShape* self, int64_t batch, int64_t num_heads, int64_t num_kv_heads, int64_t num_queries,
               int64_t num_keys, int head_dim, int topk, int recent, bool causal, bool l2, float scale) {
                const TopkShape shape{batch, num_heads, num_kv_heads, num_queries, num_keys, head_dim,
                                      topk,  recent,    causal,       l2,          scale};
                check(shape);
                new (self) TopkShape(shape);
            },
            nb::kw_only(), "batch"_a, "num_heads"_a, "num_kv_heads"_a, "num_queries"_a, "num_keys"_a, "head_dim"_a,
            "topk"_a, "recent"_a, "causal"_a, "l2"_a, "scale"_a);

    m.def(
        "topk_forward",
        [](const TopkShape& shape, const Tensor& q, const Tensor& k, const Tensor& v, uintptr_t padding,
           const Tensor& out, uintptr_t lse, uintptr_t index, uintptr_t weight, ThreadPool& pool,
           const std::string& isa) {
            const TopkForward args{heads<const float>(q),  heads<const float>(k), heads<const float>(v),
                                   at<const uint8_t>(padding), heads<float>(out),     at<float>(lse),
                                   at<int32_t>(index),     at<float>(weight)};
            const bool portable = &choose_isa(isa) == &portable_isa();
            nb::gil_scoped_release release;
            topk_forward(shape, args, pool, portable);
        },
        nb::kw_only(), "shape"_a, "q"_a, "k"_a, "v"_a, "padding"_a, "out"_a, "lse"_a, "index"_a, "weight"_a,
        "pool"_a, "isa"_a);

    m.def(
        "topk_backward",
        [](const TopkShape& shape, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out_grad,
           uintptr_t index, uintptr_t weight, float threshold, const Tensor& q_grad, const Tensor& k_grad,
           const Tensor& v_grad, ThreadPool& pool, const std::string& isa) {
            const TopkBackward args{heads<const float>(q),
                                    heads<const float>(k),
                                    heads<const float>(v),
                                    heads<const float>(out_grad),
                                    at<const int32_t>(index),
                                    at<const float>(weight),
                                    threshold,
                                    heads<float>(q_grad),
                                    heads<float>(k_grad),
                                    heads<float>(v_grad)};
            const bool portable = &choose_isa(isa) == &portable_isa();
            nb::gil_scoped_release release;
            topk_backward(shape, args, pool, portable);
        },
        nb::kw_only(), "shape"_a, "q"_a, "k"_a, "v"_a, "out_grad"_a, "index"_a, "weight"_a, "threshold"_a, "q_grad"_a,
        "k_grad"_a, "v_grad"_a, "pool"_a, "isa"_a);

    nb::class_<TopkPlan>(m, "TopkPlan")
        .def(
            "__init__",
            [](TopkPlan* self, const PagedBatch& batch, uintptr_t policies, const Shape& shape, ThreadPool& pool,
               const std::string& isa) {
                new (self) TopkPlan(batch, at<const TopkPolicy>(policies), shape, pool, choose_isa(isa));
            },
            nb::kw_only(), "batch"_a, "policies"_a, "shape"_a, "pool"_a, "isa"_a, nb::keep_alive<1, 5>())
        .def_prop_ro("num_tokens", &TopkPlan::num_tokens)
        .def_prop_ro("max_topk", &TopkPlan::max_topk)
        .def_prop_ro("bytes_read", &TopkPlan::bytes_read)
        .def(
            "run",
            [](TopkPlan& plan, uintptr_t q, int64_t q_stride, uintptr_t key, uintptr_t value, int64_t num_blocks,
               float scale, int64_t window, uintptr_t out, uintptr_t lse, const std::tuple<uintptr_t, uintptr_t, uintptr_t>& planes, uintptr_t report,
               uintptr_t position, uintptr_t dropped, const CompactArgs& compact) {
                const LayerArgs layer{at<const float>(q), q_stride, at<const void>(key), at<const void>(value),
                                      num_blocks, scale, window, at<float>(out), at<float>(lse), compact};
                const TopkPlanes all{at<uint8_t>(std::get<0>(planes)), at<uint16_t>(std::get<1>(planes)),
                                     at<uint8_t>(std::get<2>(planes))};
                const TopkLayerArgs args{layer, all, at<TopkReport>(report), at<int32_t>(position),
                                         at<float>(dropped)};
                nb::gil_scoped_release release;
                plan.run(args);
            },
            nb::kw_only(), "q"_a, "q_stride"_a, "key"_a, "value"_a, "num_blocks"_a, "scale"_a, "window"_a, "out"_a,
            "lse"_a, "planes"_a, "report"_a, "position"_a, "dropped"_a, "compact"_a);

    m.attr("POLICY_COLUMNS") = int(sizeof(TopkPolicy) / sizeof(int32_t));
    m.attr("RECORD_KEYS") = kRecordKeys;
    m.attr("REPORT_COLUMNS") = int(sizeof(TopkReport) / sizeof(double));
    m.def("bounds_bytes", [](int head_dim) { return bounds_bytes(head_dim); }, "head_dim"_a);
    m.def("record_bytes", [](int head_dim) { return record_layout(head_dim).bytes; }, "head_dim"_a);

    // For tests: rows [num_queries, head_dim] against keys [16 num_records, head_dim]; value, bound and score are
    // [num_queries, 16 num_records].
    m.def(
        "scan_bounds",
        [](uintptr_t q, int num_queries, uintptr_t key, bool half, int num_records, int head_dim, float scale,
           bool tail, const std::tuple<uintptr_t, uintptr_t, uintptr_t>& out, const std::string& isa) {
            const Reference reference = tail ? Reference::mean : Reference::middle;
            scan_bounds(at<const float>(q), num_queries, {at<const void>(key), half, num_records, head_dim, scale, reference},
                        at<float>(std::get<0>(out)), at<float>(std::get<1>(out)), at<float>(std::get<2>(out)),
                        choose_isa(isa));
        },
        nb::kw_only(), "q"_a, "num_queries"_a, "key"_a, "half"_a, "num_records"_a, "head_dim"_a, "scale"_a, "tail"_a,
        "out"_a, "isa"_a);
}

}  // namespace octavo
