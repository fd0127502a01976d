// The Python face of layer.h. Addresses come as integers; octavo.kernels.layer checks what lies behind them.
#include "layer_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>

#include "layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
T& member(LayerWeights& weights, const std::map<std::string, T LayerWeights::*>& members, const std::string& name) {
    const auto found = members.find(name);
    if (found == members.end()) throw std::invalid_argument("a layer has no part called '" + name + "'");
    return weights.*(found->second);
}

const std::map<std::string, Norm LayerWeights::*> kNorms = {
    {"input_norm", &LayerWeights::input_norm},
    {"q_norm", &LayerWeights::q_norm},
    {"k_norm", &LayerWeights::k_norm},
    {"attention_post_norm", &LayerWeights::attention_post_norm},
    {"mlp_norm", &LayerWeights::mlp_norm},
    {"mlp_post_norm", &LayerWeights::mlp_post_norm},
};

const std::map<std::string, Projection LayerWeights::*> kProjections = {
    {"qkv", &LayerWeights::qkv},
    {"o", &LayerWeights::o},
    {"gate_up", &LayerWeights::gate_up},
    {"down", &LayerWeights::down},
};

}  // namespace

void bind_layer(nb::module_& m) {
    nb::class_<Workspace>(m, "Workspace").def(nb::init<>()).def_prop_ro("bytes", &Workspace::bytes);

    nb::class_<Norm>(m, "Norm").def(
        "__init__",
        [](Norm* self, uintptr_t weight, uintptr_t bias, float eps, bool center) {
            new (self) Norm{at<const float>(weight), at<const float>(bias), eps, center};
        },
        nb::kw_only(), "weight"_a, "bias"_a, "eps"_a, "center"_a);

    nb::class_<Step>(m, "Step").def(
        "__init__",
        [](Step* self, int64_t rows, uintptr_t x, uintptr_t qkv, uintptr_t positions, int64_t num_positions,
           uintptr_t slots, int64_t num_blocks, const Shape& shape) {
            const Step step{rows, at<float>(x), at<float>(qkv), at<const int64_t>(positions), num_positions,
                            at<const int64_t>(slots), num_blocks, shape};
            check_step(step);
            new (self) Step(step);
        },
        nb::kw_only(), "rows"_a, "x"_a, "qkv"_a, "positions"_a, "num_positions"_a,
        "slots"_a, "num_blocks"_a, "shape"_a);

    nb::class_<Layer>(m, "Layer")
        .def(
            "__init__",
            [](Layer* self, int64_t hidden, int64_t intermediate, int num_heads, int num_kv_heads, int head_dim,
               bool gated, const std::string& act, bool int8, const std::string& isa) {
                new (self) Layer(
                    {hidden, intermediate, num_heads, num_kv_heads, head_dim, gated, activation(act), int8},
                    choose_isa(isa));
            },
            nb::kw_only(), "hidden"_a, "intermediate"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "gated"_a,
            "activation"_a, "int8"_a, "isa"_a)
        .def(
            "set_norm",
            [](Layer& layer, const std::string& name, const Norm& norm) {
                member(layer.weights, kNorms, name) = norm;
            },
            "name"_a, "norm"_a)
        .def(
            "set_projection",
            [](Layer& layer, const std::string& name, const std::vector<const PackedWeight*>& weights,
               uintptr_t bias) { member(layer.weights, kProjections, name) = {weights, at<const float>(bias)}; },
            "name"_a, "weights"_a, "bias"_a)
        .def(
            "before_attention",
            [](const Layer& layer, const Step& step, uintptr_t rope, uintptr_t key, uintptr_t value,
               ThreadPool& pool) {
                nb::gil_scoped_release release;
                layer.before_attention(step, at<const float>(rope), at<void>(key), at<void>(value), pool);
            },
            "step"_a, "rope"_a, "key"_a, "value"_a, "pool"_a)
        .def(
            "after_attention",
            [](const Layer& layer, uintptr_t x, int64_t rows, uintptr_t attention, Workspace& workspace,
               ThreadPool& pool) {
                nb::gil_scoped_release release;
                layer.after_attention(at<float>(x), rows, at<const float>(attention), workspace, pool);
            },
            "x"_a, "rows"_a, "attention"_a, "workspace"_a, "pool"_a);

    nb::class_<LayerCache>(m, "LayerCache")
        .def(
            "__init__",
            [](LayerCache* self, uintptr_t key, uintptr_t value, float scale, int64_t window,
               const CompactArgs& compact) {
                new (self) LayerCache{at<void>(key), at<void>(value), scale, window, compact};
            },
            nb::kw_only(), "key"_a, "value"_a, "scale"_a, "window"_a, "compact"_a);

    m.def(
        "run_layers",
        [](const std::vector<const Layer*>& layers, const std::vector<const LayerCache*>& caches,
           const std::vector<uintptr_t>& ropes, const Step& step, AttentionPlan& plan, uintptr_t attention,
           Workspace& workspace, ThreadPool& pool) {
            if (caches.size() < layers.size() || ropes.size() < layers.size())
                throw std::invalid_argument("every layer needs a cache and a rope table");
            std::vector<LayerCall> calls;
            for (size_t i = 0; i < layers.size(); ++i)
                calls.push_back({layers[i], caches[i], at<const float>(ropes[i])});
            nb::gil_scoped_release release;
            run_layers(calls, step, plan, at<float>(attention), workspace, pool);
        },
        nb::kw_only(), "layers"_a, "caches"_a, "ropes"_a, "step"_a, "plan"_a, "attention"_a, "workspace"_a,
        "pool"_a);

    m.def(
        "embed",
        [](const PackedWeight& tokens, uintptr_t ids, float scale, const PackedWeight* places, uintptr_t positions,
           int64_t rows, uintptr_t x, Workspace& workspace, ThreadPool& pool, const std::string& isa) {
            const EmbedArgs args{&tokens, at<const int64_t>(ids), scale, places, at<const int64_t>(positions),
                                 rows, at<float>(x)};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            embed(args, workspace, pool, kernels);
        },
        nb::kw_only(), "tokens"_a, "ids"_a, "scale"_a, "places"_a.none(), "positions"_a, "rows"_a, "x"_a,
        "workspace"_a, "pool"_a, "isa"_a);

    m.def(
        "logits",
        [](const Norm& norm, const PackedWeight& head, uintptr_t x, int64_t x_stride, int64_t x_rows,
           uintptr_t take, int64_t rows, uintptr_t out, bool int8, Workspace& workspace, ThreadPool& pool,
           const std::string& isa) {
            const LogitsArgs args{norm, &head, at<const float>(x), x_stride, x_rows, at<const int64_t>(take), rows,
                                  at<float>(out), int8};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            logits(args, workspace, pool, kernels);
        },
        nb::kw_only(), "norm"_a, "head"_a, "x"_a, "x_stride"_a, "x_rows"_a, "take"_a, "rows"_a, "out"_a,
        "int8"_a, "workspace"_a, "pool"_a, "isa"_a);

    // For the tests of the row kernels.
    m.def(
        "activate",
        [](const std::string& act, uintptr_t gate, uintptr_t up, int64_t n, uintptr_t out, const std::string& isa) {
            choose_isa(isa).rows->activate(activation(act), at<const float>(gate), at<const float>(up), n,
                                           at<float>(out));
        },
        nb::kw_only(), "activation"_a, "gate"_a, "up"_a, "n"_a, "out"_a, "isa"_a);
    m.def(
        "norm",
        [](const Norm& norm, uintptr_t x, int64_t n, uintptr_t out, const std::string& isa) {
            choose_isa(isa).rows->norm(norm, at<const float>(x), n, at<float>(out));
        },
        nb::kw_only(), "norm"_a, "x"_a, "n"_a, "out"_a, "isa"_a);
}

}  // namespace octavo
