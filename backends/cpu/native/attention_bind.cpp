// Python face of the thread pool, the instruction set choice and paged attention. Tensors come as addresses:
// hardpoint_cpu.attention checks shapes, dtypes and strides before it calls.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.hpp"
#include "bind.hpp"
#include "hardpoint/released_gil.hpp"
#include "isa.hpp"
#include "prepared_batch.hpp"
#include "thread_pool.hpp"

namespace py = pybind11;

namespace hp {
namespace {

using Int32s = py::array_t<int32_t, py::array::c_style>;

std::vector<BlockPool> block_pools(Address data, int64_t pools, int64_t num_blocks, int64_t block_bytes) {
  std::vector<BlockPool> result;
  for (int64_t i = 0; i < pools; ++i) result.push_back({at<char>(data) + i * num_blocks * block_bytes, num_blocks});
  return result;
}

void bind_threads(py::module_& m) {
  m.def("set_num_threads", [](int n) { ThreadPool::global().set_num_threads(n); }, py::arg("n"),
        py::call_guard<hardpoint::ReleasedGil>(),
        "Use n threads, the calling one included. Raises ValueError outside 1 to 4096.");
  m.def("num_threads", [] { return ThreadPool::global().num_threads(); },
        "Threads in use: HARDPOINT_CPU_THREADS, else the cores that this process may run on.");
  m.def(
      "count_items",
      [](int64_t n, int64_t grain, int64_t inner) {
        std::vector<std::atomic<int32_t>> counts(static_cast<size_t>(n));
        {
          const hardpoint::ReleasedGil unlocked;
          ThreadPool::global().parallel_for(n, grain, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
              if (inner == 0) counts[static_cast<size_t>(i)].fetch_add(1);
              else ThreadPool::global().parallel_for(inner, 1, [&](int64_t b, int64_t e, int) {
                counts[static_cast<size_t>(i)].fetch_add(static_cast<int32_t>(e - b));
              });
            }
          });
        }
        return std::vector<int32_t>(counts.begin(), counts.end());
      },
      py::arg("n"), py::arg("grain"), py::arg("inner") = 0,
      "Run a job of n items in chunks of `grain`, each a nested job of `inner` items (0: none), and return how often each item ran.");
  m.def(
      "job_seconds",
      [](int64_t jobs, int64_t chunks) {
        const auto begin = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < jobs; ++i) ThreadPool::global().parallel_for(chunks, 1, [](int64_t, int64_t, int) {});
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / static_cast<double>(jobs);
      },
      py::arg("jobs"), py::arg("chunks"), py::call_guard<hardpoint::ReleasedGil>(),
      "Seconds that one empty job of the given number of chunks takes, averaged over `jobs` in a row.");
}

void bind_isa(py::module_& m) {
  m.def("isa", [] { return std::string(isa_name(active_isa())); },
        "Instruction set in use: HARDPOINT_CPU_ISA, else the best one that is built and supported here.");
  m.def("set_isa", &set_isa, py::arg("name"), "Use this instruction set from now on. Raises ValueError when it is not available.");
  const auto names = [](const std::vector<Isa>& isas) {
    std::vector<std::string> names;
    for (Isa isa : isas) names.emplace_back(isa_name(isa));
    return names;
  };
  m.def("compiled_isas", [=] { return names(compiled_isas()); }, "Instruction sets that this build has kernels for, lowest first.");
  m.def("available_isas", [=] { return names(available_isas()); },
        "Instruction sets that are built and supported here, lowest first.");
}

}  // namespace

void bind_attention(py::module_& m) {
  bind_threads(m);
  bind_isa(m);

  py::class_<AttentionLayer>(m, "AttentionLayer", "Fixed numbers of one layer's attention.")
      .def(py::init([](int num_heads, int num_kv_heads, int head_dim, float scale, int window, float soft_cap, int block_size,
                       float k_scale, float v_scale) {
             AttentionLayer layer{num_heads, num_kv_heads, head_dim, scale, window, soft_cap, nullptr, nullptr, k_scale, v_scale};
             check_layer(layer, block_size);
             return layer;
           }),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("scale"), py::arg("window"),
           py::arg("soft_cap"), py::arg("block_size"), py::arg("k_scale"), py::arg("v_scale"));

  py::class_<PreparedBatch>(m, "PreparedBatch", "One step's batch and its split into work. The arrays must outlive it.")
      .def(py::init([](int num_tokens, int block_size, int64_t num_blocks, const Int32s& query_start, const Int32s& context_lens,
                       const Int32s& block_table, const Int32s& rows, const Int32s& slot_mapping, bool bidirectional) {
             AttentionBatch batch;
             batch.num_seqs = static_cast<int>(rows.shape(0));
             batch.num_tokens = num_tokens;
             batch.block_size = block_size;
             batch.num_blocks = num_blocks;
             batch.table_rows = block_table.shape(0);
             batch.query_start = query_start.data();
             batch.context_lens = context_lens.data();
             batch.block_table = block_table.data();
             batch.table_stride = block_table.shape(1);
             batch.rows = rows.data();
             batch.slot_mapping = slot_mapping.data();
             batch.bidirectional = bidirectional;
             return PreparedBatch(batch);
           }),
           // A copy would not outlive the call.
           py::arg("num_tokens"), py::arg("block_size"), py::arg("num_blocks"), py::arg("query_start").noconvert(),
           py::arg("context_lens").noconvert(), py::arg("block_table").noconvert(), py::arg("rows").noconvert(),
           py::arg("slot_mapping").noconvert(), py::arg("bidirectional"));

  m.def(
      "write_kv",
      [](const PreparedBatch& prepared, const AttentionLayer& layer, Address k, int64_t k_stride, Address v, int64_t v_stride,
         int dtype, int format, Address k_cache, Address v_cache) {
        const KvLayer kv{at<void>(k_cache), at<void>(v_cache), static_cast<DType>(dtype), 0, 0, static_cast<KvFormat>(format)};
        const hardpoint::ReleasedGil unlocked;
        write_kv(prepared.batch(), layer, at<const void>(k), k_stride, at<const void>(v), v_stride, kv);
      },
      "Write the step's keys and values to their slots.");
  m.def(
      "attention",
      [](PreparedBatch& prepared, const AttentionLayer& layer, Address q, int64_t q_stride, int dtype, int format, Address k_cache,
         Address v_cache, Address out, int64_t out_stride, Address sinks, Address alibi, int64_t k_stride, int64_t v_stride) {
        AttentionLayer with_tensors = layer;
        with_tensors.sinks = at<const float>(sinks);
        with_tensors.alibi = at<const float>(alibi);
        const KvLayer kv{at<void>(k_cache), at<void>(v_cache), static_cast<DType>(dtype), k_stride, v_stride, static_cast<KvFormat>(format)};
        const AttentionPlan& plan = prepared.plan_for(layer);
        const hardpoint::ReleasedGil unlocked;
        attention(plan, prepared.batch(), with_tensors, at<const void>(q), q_stride, kv, at<void>(out), out_stride);
      },
      "Attention of the step's queries over their contexts; a bidirectional batch gives the step's keys and values for the cache's.");
  m.def(
      "copy_blocks",
      [](Address from, int64_t from_blocks, Address to, int64_t to_blocks, int64_t pools, int64_t block_bytes, Address pairs,
         int64_t num_pairs) {
        const hardpoint::ReleasedGil unlocked;
        const int32_t* narrow = at<const int32_t>(pairs);
        const std::vector<int64_t> wide(narrow, narrow + 2 * num_pairs);
        copy_blocks(block_pools(from, pools, from_blocks, block_bytes), block_pools(to, pools, to_blocks, block_bytes), block_bytes,
                    wide.data(), num_pairs);
      },
      "Copy blocks between two caches, each `pools` consecutive pools; pairs are int32[num_pairs, 2] (source, destination).");
  m.def("read_bandwidth", [](Address p, int64_t bytes) { return read_bandwidth(at<const void>(p), bytes); },
        py::call_guard<hardpoint::ReleasedGil>(), "Read bytes from p with this thread alone; returns a checksum.");
}

}  // namespace hp
