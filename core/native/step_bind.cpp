// Python binding of the messages of steps.
#include <pybind11/numpy.h>

#include "bind.hpp"
#include "step_message.hpp"

namespace hardpoint {
namespace {

namespace py = pybind11;
using step::kNumLong;
using step::kNumShort;

template <class T>
step::Span<T> span_of(py::handle source) {
  // Neither converted nor copied: the contract says what they are.
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(source))
    throw py::type_error("an array is not a dense one of " + std::string(py::str(py::dtype::of<T>())));
  const auto array = py::reinterpret_borrow<py::array>(source);
  return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
}

step::Arrays arrays_of(int64_t num_decodes, py::handle table, const py::tuple& longs, const py::tuple& shorts) {
  step::Arrays arrays;
  arrays.num_decodes = num_decodes;
  arrays.table.data = span_of<int32_t>(table).data;
  const auto shaped = py::reinterpret_borrow<py::array>(table);
  if (shaped.ndim() != 2 || longs.size() != kNumLong || shorts.size() != kNumShort)
    throw py::type_error("a step has other arrays than the contract says");
  arrays.table.rows = shaped.shape(0);
  arrays.table.columns = shaped.shape(1);
  for (size_t i = 0; i < kNumLong; ++i) arrays.longs[i] = span_of<int64_t>(longs[i]);
  for (size_t i = 0; i < kNumShort; ++i) arrays.shorts[i] = span_of<int32_t>(shorts[i]);
  return arrays;
}

py::bytes pack(step::Packer& self, int64_t block_size, int64_t num_decodes, py::handle table, const py::tuple& longs,
               const py::tuple& shorts, const py::bytes& last) {
  const step::Arrays arrays = arrays_of(num_decodes, table, longs, shorts);
  const size_t last_bytes = PyBytes_GET_SIZE(last.ptr());
  const size_t bytes = self.measure(arrays, block_size, last_bytes);
  auto message = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(bytes)));
  if (!message) throw py::error_already_set();
  char* end = self.write(arrays, last_bytes, PyBytes_AS_STRING(message.ptr()));
  std::memcpy(end, PyBytes_AS_STRING(last.ptr()), last_bytes);
  return message;
}

// Reads messages; keeps the block table.
class Unpacker {
 public:
  // Returns (decodes, table, int64 arrays, int32 arrays, where what comes last begins); the arrays but the table are views of the message.
  py::tuple unpack(const py::object& message) {
    const py::memoryview owner(py::reinterpret_steal<py::object>(PyMemoryView_FromObject(message.ptr())));
    if (!owner) throw py::error_already_set();
    const Py_buffer* buffer = PyMemoryView_GET_BUFFER(owner.ptr());
    if (!PyBuffer_IsContiguous(buffer, 'C')) throw py::value_error("a message with gaps");
    const char* at = static_cast<const char*>(buffer->buf);
    const step::Header header = step::read_header(at, static_cast<size_t>(buffer->len));
    const char* from = at + step::kHeaderBytes;
    py::tuple longs(kNumLong), shorts(kNumShort);
    for (size_t i = 0; i < kNumLong; ++i) longs[i] = view<int64_t>(owner, from, header.size_of(i), false);
    for (size_t i = 0; i < kNumShort; ++i) shorts[i] = view<int32_t>(owner, from, header.size_of(kNumLong + i), i >= kNumShort - 3);
    make_table(header.rows(), header.columns());
    const int64_t changes = header.size_of(kNumLong + kNumShort);
    step::change(table_.mutable_data(), table_.size(), from, from + 4 * changes, changes);
    return py::make_tuple(header.num_decodes(), table_, longs, shorts, from + 8 * changes - at);
  }

 private:
  template <class T>
  static py::array_t<T> view(const py::object& owner, const char*& from, py::ssize_t size, bool pairs) {
    std::vector<py::ssize_t> shape{size};
    if (pairs) shape = {size / 2, 2};
    const auto* data = reinterpret_cast<const T*>(from);
    from += size * static_cast<py::ssize_t>(sizeof(T));
    return py::array_t<T>(std::move(shape), data, owner);
  }

  void make_table(py::ssize_t rows, py::ssize_t columns) {
    if (table_.ndim() == 2 && table_.shape(0) == rows && table_.shape(1) == columns) return;
    // Of zeros that the system gives only when they are used.
    table_ = py::module_::import("numpy").attr("zeros")(py::make_tuple(rows, columns), py::dtype::of<int32_t>());
  }

  py::array_t<int32_t> table_;
};

}  // namespace

void bind_step(py::module_& m) {
  py::class_<step::Packer>(m, "StepPacker")
      .def(py::init<>())
      .def("pack", &pack, py::arg("block_size"), py::arg("num_decodes"), py::arg("block_table"), py::arg("longs"),
           py::arg("shorts"), py::arg("last"))
      .def("commit", &step::Packer::commit);
  py::class_<Unpacker>(m, "StepUnpacker").def(py::init<>()).def("unpack", &Unpacker::unpack, py::arg("message"));
}

}  // namespace hardpoint
