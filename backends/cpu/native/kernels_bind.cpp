// Python face of the linear layers and fused operators. Tensors come as addresses: hardpoint_cpu.kernels checks shapes, dtypes and
// lifetimes before it calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "decoder.hpp"
#include "gemm.hpp"
#include "hardpoint/released_gil.hpp"
#include "ops.hpp"
#include "prepared_batch.hpp"
#include "sampler.hpp"

namespace py = pybind11;

namespace hp {
namespace {

// (tiles, n, k, dtype, format of blocks: -1 for none)
using WeightTuple = std::tuple<Address, int64_t, int64_t, int, int>;
PackedWeight weight(const WeightTuple& w) {
  return {at<void>(std::get<0>(w)), std::get<1>(w), std::get<2>(w), static_cast<DType>(std::get<3>(w)), static_cast<BlockFormat>(std::get<4>(w))};
}

// A layer's tensors by their names in hardpoint_cpu.decoder.DecoderSpec; absent ones are null.
DecoderLayer decoder_layer(const AttentionLayer& attention, int kv_group, int64_t cache_layer, int rope_table, const std::map<std::string, WeightTuple>& weights,
                           const std::map<std::string, Address>& vectors) {
  const auto vector = [&](const char* name) {
    const auto found = vectors.find(name);
    return found == vectors.end() ? nullptr : at<const float>(found->second);
  };
  DecoderLayer layer;
  layer.attention = attention;
  layer.kv_group = kv_group;
  layer.cache_layer = cache_layer;
  layer.rope_table = rope_table;
  layer.qkv = weight(weights.at("qkv"));
  layer.o = weight(weights.at("o"));
  layer.gate_up = weight(weights.at("gate_up"));
  layer.down = weight(weights.at("down"));
  layer.input_norm = vector("input_norm");
  layer.qkv_bias = vector("qkv_bias");
  layer.q_norm = vector("q_norm");
  layer.k_norm = vector("k_norm");
  layer.o_bias = vector("o_bias");
  layer.attention_out_norm = vector("attention_out_norm");
  layer.mlp_norm = vector("mlp_norm");
  layer.mlp_out_norm = vector("mlp_out_norm");
  return layer;
}

void bind_operators(py::module_& m) {
  const py::call_guard<hardpoint::ReleasedGil> unlocked;
  m.def(
      "rms_norm",
      [](Address x, int64_t x_stride, int64_t rows, int64_t n, int dtype, Address weight, float eps, Address out, int64_t out_stride) {
        rms_norm(at<void>(x), x_stride, rows, n, static_cast<DType>(dtype), at<float>(weight), eps, at<void>(out), out_stride);
      },
      unlocked);
  m.def(
      "add_rms_norm",
      [](Address x, int64_t x_stride, Address residual, int64_t residual_stride, int64_t rows, int64_t n, int dtype, Address weight,
         float eps, Address out, int64_t out_stride) {
        add_rms_norm(at<void>(x), x_stride, at<void>(residual), residual_stride, rows, n, static_cast<DType>(dtype),
                     at<float>(weight), eps, at<void>(out), out_stride);
      },
      unlocked);
  m.def(
      "layer_norm",
      [](Address x, int64_t x_stride, Address branch, int64_t branch_stride, int64_t rows, int64_t n, int dtype, Address weight,
         Address bias, float eps, Address out, int64_t out_stride) {
        layer_norm(at<void>(x), x_stride, at<void>(branch), branch_stride, rows, n, static_cast<DType>(dtype), at<float>(weight),
                   at<float>(bias), eps, at<void>(out), out_stride);
      },
      unlocked);
  m.def(
      "rotary",
      [](Address q, int64_t q_stride, int64_t q_heads, Address q_norm, Address k, int64_t k_stride, int64_t k_heads, Address k_norm,
         int64_t tokens, int dtype, int head_dim, int rotary_dim, float norm_eps, Address positions, Address cos,
         Address sin) {
        rotary({at<void>(q), q_stride, q_heads, at<float>(q_norm)}, {at<void>(k), k_stride, k_heads, at<float>(k_norm)}, tokens,
               static_cast<DType>(dtype), {head_dim, rotary_dim, norm_eps},
               at<int64_t>(positions), at<float>(cos), at<float>(sin));
      },
      unlocked);
  m.def(
      "gated_activation",
      [](Address x, int64_t x_stride, int64_t rows, int64_t n, int dtype, int activation, Address out, int64_t out_stride) {
        gated_activation(at<void>(x), x_stride, rows, n, static_cast<DType>(dtype), static_cast<Epilogue>(activation), at<void>(out),
                         out_stride);
      },
      unlocked);
  m.def(
      "arg_max",
      [](Address x, int64_t x_stride, int64_t rows, int64_t n, Address out) {
        arg_max_rows(at<float>(x), x_stride, rows, n, at<int64_t>(out));
      },
      unlocked);
  m.def(
      "gather_rows",
      [](const WeightTuple& tiles, Address ids, int64_t count, float scale, Address out, int64_t out_stride) {
        gather_rows(weight(tiles), at<int64_t>(ids), count, scale, at<float>(out), out_stride);
      },
      unlocked);
}

void bind_decoder(py::module_& m) {
  const py::call_guard<hardpoint::ReleasedGil> unlocked;
  py::class_<DecoderLayer>(m, "DecoderLayer", "One layer's settings and the addresses of its weights.")
      .def(py::init(&decoder_layer), py::arg("attention"), py::arg("kv_group"), py::arg("cache_layer"), py::arg("rope_table"), py::arg("weights"), py::arg("vectors"));

  py::class_<Decoder>(m, "Decoder", "A whole decoder step in one call. Keeps addresses only: the tensors must outlive it.")
      .def(py::init([](int dtype, int kv_format, int64_t vocab, int64_t hidden, int64_t intermediate, int rotary_dim, float norm_eps, int activation,
                       float embed_scale, float logit_soft_cap, int64_t max_tokens, int64_t max_rows, bool adapted, const WeightTuple& embed,
                       const WeightTuple& head, Address final_norm, std::vector<DecoderLayer> layers) {
             DecoderConfig config;
             config.dtype = static_cast<DType>(dtype);
             config.kv_format = static_cast<KvFormat>(kv_format);
             config.vocab = vocab;
             config.hidden = hidden;
             config.intermediate = intermediate;
             config.rotary_dim = rotary_dim;
             config.norm_eps = norm_eps;
             config.activation = static_cast<Epilogue>(activation);
             config.embed_scale = embed_scale;
             config.logit_soft_cap = logit_soft_cap;
             config.max_tokens = max_tokens;
             config.max_rows = max_rows;
             config.adapted = adapted;
             config.embed = weight(embed);
             config.head = weight(head);
             config.final_norm = at<float>(final_norm);
             config.layers = std::move(layers);
             return std::make_unique<Decoder>(std::move(config));
           }),
           py::kw_only(), py::arg("dtype"), py::arg("kv_format"), py::arg("vocab"), py::arg("hidden"), py::arg("intermediate"), py::arg("rotary_dim"),
           py::arg("norm_eps"), py::arg("activation"), py::arg("embed_scale"), py::arg("logit_soft_cap"), py::arg("max_tokens"),
           py::arg("max_rows"), py::arg("adapted"), py::arg("embed"), py::arg("head"), py::arg("final_norm"), py::arg("layers"))
      .def("scratch_bytes", &Decoder::scratch_bytes)
      .def("set_scratch", [](Decoder& d, Address data, int64_t bytes) { d.set_scratch(at<void>(data), bytes); })
      .def("set_rope_tables",
           [](Decoder& d, const std::vector<std::tuple<Address, Address, int64_t>>& tables) {
             std::vector<RopeTable> converted;
             for (const auto& [cos, sin, positions] : tables) converted.push_back({at<float>(cos), at<float>(sin), positions});
             d.set_rope_tables(std::move(converted));
           })
      .def("set_adapters", [](Decoder& d, int64_t layer, int linear, const AdapterMatrices& matrices) {
        d.set_adapters(layer, static_cast<DecoderLinear>(linear), matrices);
      })
      .def(
          "run",
          [](Decoder& d, const std::vector<PreparedBatch*>& prepared, Address token_ids, Address positions, Address kv_cache, Address rows,
             int64_t num_rows, Address out, Address embedded_rows, int64_t num_embedded, Address embedded, Address adapted_tokens,
             Address adapter_slots, Address adapter_starts, int64_t num_adapters) {
            d.run({at<int64_t>(token_ids), at<int64_t>(positions), at<char>(kv_cache), at<int32_t>(rows), num_rows, at<void>(out),
                   at<int64_t>(embedded_rows), num_embedded, at<float>(embedded), at<int64_t>(adapted_tokens), at<int32_t>(adapter_slots),
                   at<int32_t>(adapter_starts), num_adapters},
                  prepared);
          },
          unlocked)
      .def(
          "head",
          [](const Decoder& d, Address hidden, int64_t rows, int output, Address out) {
            d.head(at<void>(hidden), rows, static_cast<DecoderOutput>(output), at<void>(out));
          },
          unlocked)
      .def(
          "logprobs",
          [](const Decoder& d, Address hidden, int64_t rows, Address tokens, bool with_best, Address summaries, Address ids, Address values,
             Address ranks) {
            LogprobsOutput out;
            out.tokens = at<int64_t>(tokens);
            out.with_best = with_best;
            out.summaries = at<void>(summaries);
            out.ids = at<int64_t>(ids);
            out.values = at<float>(values);
            out.ranks = at<int64_t>(ranks);
            d.logprobs(at<void>(hidden), rows, out);
          },
          unlocked)
      .def("summary_bytes", &Decoder::summary_bytes);
}

void bind_sampler(py::module_& m) {
  const py::call_guard<hardpoint::ReleasedGil> unlocked;
  py::class_<RowSampler>(m, "RowSampler", "Samples tokens from rows of logits; keeps working memory. One call at a time.")
      .def(py::init<>())
      .def(
          "sample",
          [](RowSampler& sampler, Address logits, int64_t stride, int64_t rows, int64_t n, Address step, Address table, Address masks,
             Address biases, Address history, Address last_tokens, Address tokens) {
            SampleCall call;
            call.logits = at<float>(logits);
            call.stride = stride;
            call.rows = rows;
            call.n = n;
            call.step = at<int64_t>(step);
            call.table = at<SamplingRow>(table);
            call.masks = at<uint32_t>(masks);
            call.biases = at<float>(biases);
            call.history = at<int32_t>(history);
            call.last_tokens = at<int64_t>(last_tokens);
            call.tokens = at<int64_t>(tokens);
            sampler.sample(call);
          },
          unlocked)
      .def(
          "logprobs",
          [](RowSampler& sampler, Address logits, int64_t stride, int64_t rows, int64_t n, Address tokens, int64_t count, Address ids,
             Address values, Address ranks) {
            LogprobsCall call;
            call.logits = at<float>(logits);
            call.stride = stride;
            call.rows = rows;
            call.n = n;
            call.tokens = at<int64_t>(tokens);
            call.count = count;
            call.ids = at<int64_t>(ids);
            call.values = at<float>(values);
            call.ranks = at<int64_t>(ranks);
            sampler.logprobs(call);
          },
          unlocked);
}

}  // namespace

void bind_kernels(py::module_& m) {
  const py::call_guard<hardpoint::ReleasedGil> unlocked;

  m.def("packed_bytes", [](int64_t n, int64_t k, int dtype) { return packed_bytes(n, k, static_cast<DType>(dtype)); });
  m.def("pack_weight",
        [](Address src, int64_t stride, int64_t rows, int64_t k, int dtype, int64_t first_row, int64_t first_tile, int64_t tile_step,
           Address tiles) {
          pack_weight(at<void>(src), stride, rows, k, static_cast<DType>(dtype), {first_row, first_tile, tile_step}, at<void>(tiles));
        },
        unlocked);
  m.def("unpack_weight",
        [](Address tiles, int64_t rows, int64_t k, int dtype, int64_t first_row, int64_t first_tile, int64_t tile_step, Address dst,
           int64_t stride) {
          unpack_weight(at<void>(tiles), rows, k, static_cast<DType>(dtype), {first_row, first_tile, tile_step}, at<void>(dst), stride);
        },
        unlocked);
  m.def("packed_block_bytes", [](int64_t n, int64_t k, int format) { return num_tiles(n) * block_tile_bytes(static_cast<BlockFormat>(format), k); });
  m.def("pack_blocks",
        [](Address src, int64_t rows, int64_t k, int format, int64_t first_row, int64_t first_tile, int64_t tile_step, Address tiles) {
          pack_blocks(at<void>(src), rows, k, static_cast<BlockFormat>(format), {first_row, first_tile, tile_step}, at<void>(tiles));
        },
        unlocked);
  m.def("unpack_blocks",
        [](Address tiles, int64_t rows, int64_t k, int format, int64_t first_row, int64_t first_tile, int64_t tile_step, Address dst) {
          unpack_blocks(at<void>(tiles), rows, k, static_cast<BlockFormat>(format), {first_row, first_tile, tile_step}, at<void>(dst));
        },
        unlocked);
  m.def("linear_workspace_bytes", [](int64_t rows, int64_t k, int dtype, bool in_blocks) {
    return linear_workspace_bytes(rows, k, static_cast<DType>(dtype), in_blocks);
  });
  m.def("linear",
        [](const WeightTuple& packed, Address x, int64_t x_stride, int64_t rows, Address bias, int epilogue,
           float soft_cap, Address out, int64_t out_stride, int out_dtype, int64_t out_columns, Address arg_max, Address workspace,
           int64_t workspace_size) {
          LinearCall call;
          call.weight = weight(packed);
          call.x = at<void>(x);
          call.x_stride = x_stride;
          call.m = rows;
          call.bias = at<float>(bias);
          call.epilogue = static_cast<Epilogue>(epilogue);
          call.soft_cap = soft_cap;
          call.out = at<void>(out);
          call.out_stride = out_stride;
          call.out_dtype = static_cast<DType>(out_dtype);
          call.out_columns = out_columns;
          call.arg_max = at<int64_t>(arg_max);
          call.workspace = {at<void>(workspace), workspace_size};
          linear(call);
        },
        unlocked);
  bind_operators(m);
  bind_sampler(m);
  bind_decoder(m);
}

}  // namespace hp
