#include "kv_token_input.hpp"

#include <limits>

namespace hardpoint {
namespace {

namespace py = pybind11;

// The value of a small int without a call, or false. Reads what CPython's own headers declare for this purpose.
inline bool small_value(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  auto* number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(number)) return false;
  value = PyUnstable_Long_CompactValue(number);
  return true;
#else
  const Py_ssize_t size = Py_SIZE(number);
  if (size < 0 || size > 1) return false;
  value = size == 0 ? 0 : number->ob_digit[0];
  return true;
#endif
}

int64_t general_value(PyObject* object) {
  const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!index) throw py::error_already_set();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return overflow > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::vector<int32_t> from_items(PyObject** items, Py_ssize_t size, int64_t limit, int64_t spare) {
  std::vector<int32_t> ids;
  ids.reserve(size + spare);
  ids.resize(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    int64_t value;
    if (!small_value(items[i], value)) value = general_value(items[i]);
    if (static_cast<uint64_t>(value) >= static_cast<uint64_t>(limit)) throw TokenRangeError{value, i};
    ids[i] = static_cast<int32_t>(value);
  }
  return ids;
}

template <class T>
std::vector<int32_t> from_array(const py::array_t<T, py::array::c_style>& array, int64_t limit, int64_t spare) {
  std::vector<int32_t> ids;
  ids.reserve(array.size() + spare);
  ids.resize(array.size());
  const T* values = array.data();
  for (py::ssize_t i = 0; i < array.size(); ++i) {
    if (static_cast<uint64_t>(static_cast<int64_t>(values[i])) >= static_cast<uint64_t>(limit))
      throw TokenRangeError{values[i], i};
    ids[i] = static_cast<int32_t>(values[i]);
  }
  return ids;
}

}  // namespace

std::vector<int32_t> token_ids_from(py::handle source, int64_t limit, int64_t spare) {
  if (py::isinstance<py::array>(source)) {
    const auto array = py::reinterpret_borrow<py::array>(source);
    if (array.ndim() != 1) throw py::type_error("token ids must be one-dimensional");
    if (py::isinstance<py::array_t<int32_t>>(array)) return from_array<int32_t>(array, limit, spare);
    if (array.dtype().kind() != 'i' && array.dtype().kind() != 'u') throw py::type_error("token ids must be integers");
    return from_array<int64_t>(array, limit, spare);
  }
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(source.ptr(), "token ids must be a sequence of integers"));
  if (!items) throw py::error_already_set();
  return from_items(PySequence_Fast_ITEMS(items.ptr()), PySequence_Fast_GET_SIZE(items.ptr()), limit, spare);
}

}  // namespace hardpoint
