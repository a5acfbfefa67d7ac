// Python binding of the block manager.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "kv_sequences.hpp"
#include "kv_token_input.hpp"

namespace hardpoint {
namespace {

namespace py = pybind11;
using kv::AllocStatus;
using kv::BlockManagerConfig;
using kv::BlockStats;
using kv::SequenceBlocks;

constexpr int64_t kMaxToken = int64_t{1} << 31;

}  // namespace

void bind_kv(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TokenRangeError& e) {
      PyErr_SetObject(PyExc_IndexError, py::make_tuple(e.token, e.position).ptr());
    }
  });

  py::register_exception<kv::NotEnoughBlocks>(m, "NotEnoughBlocks");

  py::native_enum<AllocStatus>(m, "AllocStatus", "enum.Enum", "Whether an operation can have its blocks.")
      .value("OK", AllocStatus::ok)
      .value("LATER", AllocStatus::later)
      .value("NEVER", AllocStatus::never)
      .finalize();

  py::class_<BlockStats>(m, "BlockStats")
      .def_readonly("device_free", &BlockStats::device_free)
      .def_readonly("device_used", &BlockStats::device_used)
      .def_readonly("host_free", &BlockStats::host_free)
      .def_readonly("host_used", &BlockStats::host_used)
      .def_readonly("cached", &BlockStats::cached)
      .def_readonly("queried_tokens", &BlockStats::queried_tokens)
      .def_readonly("hit_tokens", &BlockStats::hit_tokens)
      .def_readonly("evictions", &BlockStats::evictions);

  py::class_<SequenceBlocks>(m, "SequenceBlocks")
      .def(py::init([](int32_t block_size, int32_t num_device_blocks, int32_t num_host_blocks, double watermark,
                       bool enable_prefix_caching, int hash_bits) {
             BlockManagerConfig config;
             config.block_size = block_size;
             config.num_device_blocks = num_device_blocks;
             config.num_host_blocks = num_host_blocks;
             config.watermark = watermark;
             config.enable_prefix_caching = enable_prefix_caching;
             config.hash_bits = hash_bits;
             return std::make_unique<SequenceBlocks>(config);
           }),
           py::kw_only(), py::arg("block_size"), py::arg("num_device_blocks"), py::arg("num_host_blocks"),
           py::arg("watermark"), py::arg("enable_prefix_caching"), py::arg("hash_bits"))
      .def("can_allocate",
           [](SequenceBlocks& self, py::object tokens, const std::string& salt, bool use_cache, int32_t lookahead) {
             return self.can_allocate(token_ids_from(tokens, kMaxToken), salt, use_cache, lookahead);
           })
      .def("allocate",
           [](SequenceBlocks& self, int64_t id, py::object tokens, const std::string& salt, bool use_cache,
              int32_t lookahead) {
             return self.allocate(id, token_ids_from(tokens, kMaxToken), salt, use_cache, lookahead);
           })
      .def("num_new_blocks", &SequenceBlocks::num_new_blocks)
      .def("can_append", &SequenceBlocks::can_append)
      .def("append_slots",
           [](SequenceBlocks& self, int64_t id, py::object tokens, int32_t lookahead) {
             return self.append_slots(id, token_ids_from(tokens, kMaxToken), lookahead);
           })
      .def("mark_computed", &SequenceBlocks::mark_computed)
      .def("fork", &SequenceBlocks::fork)
      .def("free", &SequenceBlocks::free)
      .def("can_swap_out", &SequenceBlocks::can_swap_out)
      .def("swap_out", &SequenceBlocks::swap_out)
      .def("can_swap_in", &SequenceBlocks::can_swap_in)
      .def("swap_in", &SequenceBlocks::swap_in)
      .def("__contains__", &SequenceBlocks::contains)
      .def("is_swapped", &SequenceBlocks::is_swapped)
      .def("block_table", &SequenceBlocks::block_table)
      .def("num_tokens", &SequenceBlocks::num_tokens)
      .def("ref_count", &SequenceBlocks::ref_count)
      .def("stats", &SequenceBlocks::stats)
      .def("watermark_blocks", &SequenceBlocks::watermark_blocks)
      .def("reset_prefix_cache", &SequenceBlocks::reset_prefix_cache)
      .def("check", &SequenceBlocks::check);
}

}  // namespace hardpoint
