// The Python face of top-k attention; octavo.kernels.topk_native checks the tensors behind the addresses.
#include "topk_bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "plan.h"
#include "pool.h"
#include "topk.h"

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
}

}  // namespace octavo
