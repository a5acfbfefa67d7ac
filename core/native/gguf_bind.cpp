// Python binding of the expansion of GGUF blocks, and of rounding to them.
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

bool round_into(int type_id, const py::array_t<float, py::array::c_style>& source, py::array_t<uint8_t, py::array::c_style>& out) {
  const auto block = block_of(type_id);
  if (!block) throw py::value_error("no format of blocks that is known here");
  const int64_t blocks = source.size() / block->first;
  if (blocks * block->first != source.size() || blocks * block->second != out.size())
    throw py::value_error("the output has not the size of the values' blocks");
  const float* from = source.data();
  uint8_t* to = out.mutable_data();
  const ReleasedGil released;
  return round_to_gguf(static_cast<gguf::Format>(type_id), from, blocks, to);
}

int read_into(int file, int64_t offset, int64_t row_bytes, int type_id, const std::optional<py::array_t<int64_t, py::array::c_style>>& places, int64_t first,
              py::array& out) {
  const auto block = block_of(type_id);
  if (!block || row_bytes <= 0 || row_bytes % block->second != 0) throw py::value_error("rows are of whole blocks of a format that is known here");
  const bool fits = out.ndim() == 2 && out.shape(1) == row_bytes / block->second * block->first && (out.flags() & py::array::c_style) && out.writeable();
  if (!fits || (out.itemsize() != 2 && out.itemsize() != 4)) throw py::value_error("the output has not the rows' values, contiguous, in two or four bytes each");
  const int64_t count = out.shape(0);
  if (first < 0 || (places && first + count > places->size())) throw py::value_error("rows beyond the given places");
  const GgufRows rows{file, offset, row_bytes, static_cast<gguf::Format>(type_id)};
  const int64_t* from = places ? places->data() : nullptr;
  void* to = out.mutable_data();
  const bool half = out.itemsize() == 2;
  const ReleasedGil released;
  return half ? read_gguf(rows, from, first, count, static_cast<uint16_t*>(to)) : read_gguf(rows, from, first, count, static_cast<float*>(to));
}

bool is_finite(int type_id, const py::array_t<uint8_t, py::array::c_style>& source) {
  const auto block = block_of(type_id);
  if (!block) throw py::value_error("no format of blocks that is known here");
  const int64_t blocks = source.size() / block->second;
  const uint8_t* from = source.data();
  const ReleasedGil released;
  return gguf_is_finite(static_cast<gguf::Format>(type_id), from, blocks);
}

}  // namespace

void bind_gguf(py::module_& m) {
  m.def("gguf_block", &block_of, py::arg("type_id"));
  m.def("expand_gguf", &expand_into, py::arg("type_id"), py::arg("source").noconvert(), py::arg("out").noconvert());
  m.def("round_to_gguf", &round_into, py::arg("type_id"), py::arg("source").noconvert(), py::arg("out").noconvert());
  m.def("read_gguf", &read_into, py::arg("file"), py::arg("offset"), py::arg("row_bytes"), py::arg("type_id"), py::arg("places").noconvert(), py::arg("first"),
        py::arg("out").noconvert());
  m.def("gguf_is_finite", &is_finite, py::arg("type_id"), py::arg("source").noconvert());
}

}  // namespace hardpoint
