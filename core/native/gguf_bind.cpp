// Python binding of the expansion of GGUF blocks.
#include <pybind11/numpy.h>

#include <optional>
#include <utility>

#include "bind.hpp"
#include "gguf_expand.hpp"
#include "hardpoint/released_gil.hpp"

namespace hardpoint {
namespace {

namespace py = pybind11;

std::optional<std::pair<int64_t, int64_t>> block_of(int type_id) {
  int64_t elements = 0, bytes = 0;
  if (!gguf_block(static_cast<gguf::Format>(type_id), &elements, &bytes)) return std::nullopt;
  return std::make_pair(elements, bytes);
}

void expand_into(int type_id, const py::array_t<uint8_t, py::array::c_style>& source, py::array_t<float, py::array::c_style>& out) {
  const auto block = block_of(type_id);
  if (!block) throw py::value_error("no format of blocks that is known here");
  const int64_t blocks = source.size() / block->second;
  if (blocks * block->second != source.size() || blocks * block->first != out.size())
    throw py::value_error("the output has not the size of whole blocks' values");
  const uint8_t* from = source.data();
  float* to = out.mutable_data();
  const ReleasedGil released;
  expand_gguf(static_cast<gguf::Format>(type_id), from, blocks, to);
}

}  // namespace

void bind_gguf(py::module_& m) {
  m.def("gguf_block", &block_of, py::arg("type_id"));
  m.def("expand_gguf", &expand_into, py::arg("type_id"), py::arg("source").noconvert(), py::arg("out").noconvert());
}

}  // namespace hardpoint
