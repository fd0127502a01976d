// The Python face. Addresses come as integers; octavo.kernels.fused checks the tensors behind them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "compact.h"
#include "compact_rows.h"
#include "layer_module.h"
#include "linear.h"
#include "plan.h"
#include "sample.h"
#include "topk_bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Shape make_shape(int num_heads, int num_kv_heads, int head_dim, int block_size, bool half) {
    if (num_kv_heads < 1 || num_heads < num_kv_heads || num_heads % num_kv_heads != 0)
        throw std::invalid_argument("num_heads must be a positive multiple of num_kv_heads, got " +
                                    std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
    if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0)
        throw std::invalid_argument("head_dim must be a multiple of 8 up to 256, got " + std::to_string(head_dim));
    if (block_size < 1 || block_size > kSpan || (block_size & (block_size - 1)) != 0)
        throw std::invalid_argument("block_size must be a power of two from 1 to 256, got " +
                                    std::to_string(block_size));
    return {num_heads, num_kv_heads, head_dim, block_size, half};
}

int check_threads(int num_threads) {
    if (num_threads < 1 || num_threads > 1024)
        throw std::invalid_argument("num_threads must be between 1 and 1024, got " + std::to_string(num_threads));
    return num_threads;
}

Rows make_rows(const std::vector<uintptr_t>& addresses, int64_t width) {
    if (width < 1 || width >= (int64_t(1) << 31))
        throw std::invalid_argument("rows of logits need 1 to 2^31 - 1 values, got " + std::to_string(width));
    Rows rows{{}, width};
    for (const uintptr_t address : addresses) rows.rows.push_back(at<const float>(address));
    return rows;
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;

    m.attr("SPAN") = kSpan;
    m.def("isa", [] { return std::string(choose_isa("auto").name); });
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const char* name : {"avx512", "avx2", "portable"}) {
            try {
                names.push_back(choose_isa(name).name);
            } catch (const std::invalid_argument&) {
                continue;
            }
        }
        return names;
    });

    nb::class_<Shape>(m, "Shape").def(
        "__init__",
        [](Shape* self, int num_heads, int num_kv_heads, int head_dim, int block_size, bool half) {
            new (self) Shape(make_shape(num_heads, num_kv_heads, head_dim, block_size, half));
        },
        nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "half"_a);

    nb::class_<ThreadPool>(m, "ThreadPool", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](ThreadPool* self, int num_threads) { new (self) ThreadPool(check_threads(num_threads)); },
            "num_threads"_a)
        .def_prop_ro("num_threads", &ThreadPool::num_threads);

    nb::class_<History>(m, "History")
        .def(
            "__init__",
            [](History* self, uintptr_t table, int64_t max_blocks, int64_t window, uintptr_t summaries,
               int64_t max_summaries, int64_t budget) {
                new (self) History{at<const int32_t>(table), max_blocks, window, at<const int32_t>(summaries),
                                   max_summaries, budget};
            },
            nb::kw_only(), "table"_a, "max_blocks"_a, "window"_a, "summaries"_a, "max_summaries"_a, "budget"_a);

    nb::class_<PagedBatch>(m, "PagedBatch")
        .def(
            "__init__",
            [](PagedBatch* self, uintptr_t block_table, uintptr_t seq_lens, uintptr_t cu_seqlens_q, int64_t num_seqs,
               int64_t max_blocks, const Shape& shape, const History& history) {
                new (self) PagedBatch(at<const int32_t>(block_table), at<const int32_t>(seq_lens),
                                      at<const int32_t>(cu_seqlens_q), num_seqs, max_blocks, shape.block_size, history);
            },
            nb::kw_only(), "block_table"_a, "seq_lens"_a, "cu_seqlens_q"_a, "num_seqs"_a, "max_blocks"_a, "shape"_a,
            "history"_a)
        .def_prop_ro("num_tokens", [](const PagedBatch& batch) { return batch.num_tokens; });

    nb::class_<CompactArgs>(m, "CompactLayer")
        .def(
            "__init__",
            [](CompactArgs* self, const std::vector<uintptr_t>& planes, int64_t num_blocks, int value_bits) {
                new (self) CompactArgs{at<const uint8_t>(planes[0]),  at<const uint8_t>(planes[1]), num_blocks, value_bits,
                                       at<const uint16_t>(planes[2]), at<const uint8_t>(planes[3])};
            },
            nb::kw_only(), "planes"_a, "num_blocks"_a, "value_bits"_a);
    m.def("value_record_bytes", [](int head_dim, int value_bits) { return value_layout(head_dim, value_bits).bytes; },
          "head_dim"_a, "value_bits"_a);

    m.def(
        "seal_compact",
        [](uintptr_t key, uintptr_t value, int64_t num_blocks, const std::vector<uintptr_t>& compact,
           int64_t num_compact, int value_bits, uintptr_t pairs, int64_t count, const Shape& shape, ThreadPool& pool,
           const std::string& isa) {
            const SealArgs args{at<const void>(key),      at<const void>(value),        num_blocks,
                                at<uint8_t>(compact[0]),  at<uint8_t>(compact[1]),      at<uint16_t>(compact[2]),
                                at<uint8_t>(compact[3]), num_compact, value_bits, at<const int32_t>(pairs), count};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            seal_compact(args, shape, pool, kernels);
        },
        nb::kw_only(), "key"_a, "value"_a, "num_blocks"_a, "compact"_a, "num_compact"_a, "value_bits"_a, "pairs"_a,
        "count"_a, "shape"_a, "pool"_a, "isa"_a);

    m.attr("OPERATION_INTS") = kOperationInts;
    m.def(
        "summarise_compact",
        [](const std::vector<uintptr_t>& compact, int64_t num_compact, int value_bits, uintptr_t operations, int64_t count,
           const std::tuple<uintptr_t, int64_t>& turns, const Shape& shape, ThreadPool& pool, const std::string& isa) {
            const SummariseArgs args{at<uint8_t>(compact[0]), at<uint8_t>(compact[1]), num_compact, value_bits,
                                     at<const int32_t>(operations), count, at<const float>(std::get<0>(turns)),
                                     std::get<1>(turns)};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            summarise_compact(args, shape, pool, kernels);
        },
        nb::kw_only(), "compact"_a, "num_compact"_a, "value_bits"_a, "operations"_a, "count"_a, "turns"_a, "shape"_a,
        "pool"_a, "isa"_a);

    nb::class_<RecallArgs>(m, "Recall")
        .def(
            "__init__",
            [](RecallArgs* self, double share, uintptr_t table, uintptr_t strides, int64_t max_blocks, int64_t layer,
               uintptr_t report) {
                new (self) RecallArgs{share, at<const int64_t>(table), at<const int64_t>(strides), max_blocks, layer,
                                      at<double>(report)};
            },
            nb::kw_only(), "share"_a, "table"_a, "strides"_a, "max_blocks"_a, "layer"_a, "report"_a);

    nb::class_<AttentionPlan>(m, "AttentionPlan")
        .def(
            "__init__",
            [](AttentionPlan* self, const PagedBatch& batch, uintptr_t topk, const Shape& shape, bool share,
               ThreadPool& pool, const std::string& isa) {
                new (self) AttentionPlan(batch, at<const int32_t>(topk), shape, share, pool, choose_isa(isa));
            },
            nb::kw_only(), "batch"_a, "topk"_a, "shape"_a, "share"_a, "pool"_a, "isa"_a, nb::keep_alive<1, 6>())
        .def_prop_ro("num_tokens", &AttentionPlan::num_tokens)
        .def_prop_ro("num_seqs", &AttentionPlan::num_seqs)
        .def_prop_ro("scratch_bytes", &AttentionPlan::scratch_bytes)
        .def_prop_ro("keys_read", &AttentionPlan::keys_read)
        .def_prop_ro("isa", [](const AttentionPlan& plan) { return std::string(plan.isa().name); })
        .def(
            "run",
            [](AttentionPlan& plan, uintptr_t q, int64_t q_stride, uintptr_t key, uintptr_t value, int64_t num_blocks,
               float scale, int64_t window, uintptr_t out, uintptr_t lse, const CompactArgs& compact, uintptr_t mass,
               const RecallArgs* recall) {
                const LayerArgs layer{at<const float>(q), q_stride, at<const void>(key), at<const void>(value), num_blocks,
                                      scale, window, at<float>(out), at<float>(lse), compact, at<float>(mass), recall};
                nb::gil_scoped_release release;
                plan.run(layer);
            },
            "q"_a, "q_stride"_a, "key"_a, "value"_a, "num_blocks"_a, "scale"_a, "window"_a, "out"_a, "lse"_a,
            "compact"_a, "mass"_a, "recall"_a.none());

    m.def("weight_formats", [] {
        std::vector<std::tuple<std::string, int, int, bool>> formats;
        for (int type = 0; type < kNumWeightTypes; ++type) {
            const WeightFormat& format = weight_format(WeightType(type));
            formats.emplace_back(format.name, format.block, format.block_bytes, has_int8_kernel(WeightType(type)));
        }
        return formats;
    });

    nb::class_<WeightMemory>(m, "WeightMemory").def(nb::init<>());

    nb::class_<PackedWeight>(m, "PackedWeight")
        .def(
            "__init__",
            [](PackedWeight* self, const std::string& type, int64_t outputs, int64_t inputs, WeightMemory& memory) {
                new (self) PackedWeight(weight_type(type), outputs, inputs, memory);
            },
            "type"_a, "outputs"_a, "inputs"_a, "memory"_a)
        .def_prop_ro("outputs", &PackedWeight::outputs)
        .def_prop_ro("inputs", &PackedWeight::inputs)
        .def_prop_ro("bytes", &PackedWeight::bytes)
        .def_prop_ro("type", [](const PackedWeight& weight) { return std::string(weight_format(weight.type()).name); })
        .def(
            "pack_rows",
            [](PackedWeight& weight, uintptr_t data, int64_t first, int64_t rows, ThreadPool& pool) {
                nb::gil_scoped_release release;
                weight.pack_rows(at<const void>(data), first, rows, pool);
            },
            "data"_a, "first"_a, "rows"_a, "pool"_a)
        .def(
            "pack_expanded",
            [](PackedWeight& weight, const std::string& stored, uintptr_t data, ThreadPool& pool) {
                const WeightType type = weight_type(stored);
                nb::gil_scoped_release release;
                weight.pack_expanded(type, at<const void>(data), pool);
            },
            "stored"_a, "data"_a, "pool"_a)
        .def(
            "expand_row",
            [](const PackedWeight& weight, int64_t row, uintptr_t out) { weight.expand_row(row, at<float>(out)); },
            "row"_a, "out"_a);

    m.def(
        "linear",
        [](const std::vector<const PackedWeight*>& weights, uintptr_t x, int64_t rows, int64_t x_stride,
           uintptr_t bias, uintptr_t residual, uintptr_t out, int64_t out_stride, bool int8, ThreadPool& pool,
           const std::string& isa) {
            LinearArgs args{at<const float>(x), rows, x_stride, at<const float>(bias),
                            at<const float>(residual), at<float>(out), out_stride};
            args.int8 = int8;
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            linear(weights, args, pool, kernels);
        },
        nb::kw_only(), "weights"_a, "x"_a, "rows"_a, "x_stride"_a, "bias"_a, "residual"_a, "out"_a, "out_stride"_a,
        "int8"_a, "pool"_a, "isa"_a);

    m.def(
        "write_kv",
        [](uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t slots, int64_t num_tokens,
           uintptr_t key, uintptr_t value, int64_t num_blocks, const Shape& shape, const std::string& isa) {
            const WriteArgs args{at<const float>(k), at<const float>(v), k_stride, v_stride, at<const int64_t>(slots),
                                 num_tokens, at<void>(key), at<void>(value), num_blocks};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            write_kv(args, shape, kernels);
        },
        nb::kw_only(), "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "slots"_a, "num_tokens"_a, "key"_a, "value"_a,
        "num_blocks"_a, "shape"_a, "isa"_a);

    m.def(
        "exp",
        [](uintptr_t x, int64_t n, uintptr_t out, const std::string& isa) {
            choose_isa(isa).exp(at<const float>(x), n, at<float>(out));
        },
        "x"_a, "n"_a, "out"_a, "isa"_a);

    m.def(
        "read_memory",
        [](uintptr_t data, int64_t bytes, ThreadPool& pool) {
            const Isa& kernels = choose_isa("auto");
            nb::gil_scoped_release release;
            return read_memory(at<const void>(data), bytes, pool, kernels);
        },
        "data"_a, "bytes"_a, "pool"_a);

    nb::class_<DrawParams>(m, "DrawParams")
        .def(
            "__init__",
            [](DrawParams* self, float temperature, int64_t top_k, double top_p, float min_p,
               const std::tuple<uint32_t, uint32_t>& key) {
                if (!(temperature > 0.0f)) throw std::invalid_argument("a draw needs a temperature above 0");
                new (self) DrawParams{temperature, top_k, top_p, min_p, {std::get<0>(key), std::get<1>(key)}};
            },
            nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "key"_a);

    m.def(
        "best",
        [](const std::vector<uintptr_t>& rows, int64_t width, uintptr_t value, uintptr_t id, ThreadPool& pool) {
            const Rows logits = make_rows(rows, width);
            nb::gil_scoped_release release;
            best(logits, at<float>(value), at<int64_t>(id), pool);
        },
        nb::kw_only(), "rows"_a, "width"_a, "value"_a, "id"_a, "pool"_a);

    m.def(
        "draw",
        [](const std::vector<uintptr_t>& rows, int64_t width, const std::vector<const DrawParams*>& params,
           uintptr_t id, ThreadPool& pool, const std::string& isa) {
            const Rows logits = make_rows(rows, width);
            if (params.size() != rows.size()) throw std::invalid_argument("a draw needs parameters for every row");
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            draw(logits, params, at<int64_t>(id), pool, kernels);
        },
        nb::kw_only(), "rows"_a, "width"_a, "params"_a, "id"_a, "pool"_a, "isa"_a);

    m.def(
        "gumbel",
        [](const std::tuple<uint32_t, uint32_t>& key, uintptr_t ids, int64_t n, uintptr_t out) {
            const uint32_t words[2] = {std::get<0>(key), std::get<1>(key)};
            gumbel(words, at<const int64_t>(ids), n, at<float>(out));
        },
        nb::kw_only(), "key"_a, "ids"_a, "n"_a, "out"_a);

    m.def(
        "score",
        [](const std::vector<uintptr_t>& rows, int64_t width, uintptr_t targets, uintptr_t num_best,
           int64_t max_best, const std::tuple<uintptr_t, uintptr_t, uintptr_t>& out, ThreadPool& pool,
           const std::string& isa) {
            const Rows logits = make_rows(rows, width);
            const ScoreArgs args{at<const int64_t>(targets),     at<const int64_t>(num_best),
                                 max_best,                       at<int64_t>(std::get<0>(out)),
                                 at<int64_t>(std::get<1>(out)), at<double>(std::get<2>(out))};
            const Isa& kernels = choose_isa(isa);
            nb::gil_scoped_release release;
            score(logits, args, pool, kernels);
        },
        nb::kw_only(), "rows"_a, "width"_a, "targets"_a, "num_best"_a, "max_best"_a, "out"_a, "pool"_a, "isa"_a);

    bind_layer(m);
    bind_topk(m);
}
