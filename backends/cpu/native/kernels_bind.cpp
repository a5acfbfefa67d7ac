// Python face of the linear layers and fused operators. Tensors come as addresses: hardpoint_cpu.kernels checks shapes, dtypes and
// lifetimes before it calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "gemm.hpp"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

}  // namespace

void bind_kernels(py::module_& m) {
  using namespace hp;
  const py::call_guard<py::gil_scoped_release> unlocked;

  m.def("packed_bytes", [](int64_t n, int64_t k, int dtype) { return packed_bytes(n, k, DType(dtype)); });
  m.def("pack_weight",
        [](Address src, int64_t stride, int64_t rows, int64_t k, int dtype, int64_t first_row, int64_t first_tile, int64_t tile_step,
           Address tiles) {
          pack_weight(at<void>(src), stride, rows, k, DType(dtype), {first_row, first_tile, tile_step}, at<void>(tiles));
        },
        unlocked);
  m.def("unpack_weight",
        [](Address tiles, int64_t rows, int64_t k, int dtype, int64_t first_row, int64_t first_tile, int64_t tile_step, Address dst,
           int64_t stride) {
          unpack_weight(at<void>(tiles), rows, k, DType(dtype), {first_row, first_tile, tile_step}, at<void>(dst), stride);
        },
        unlocked);
  m.def("linear_workspace_bytes", [](int64_t rows, int64_t k, int dtype) { return linear_workspace_bytes(rows, k, DType(dtype)); });
  m.def("linear",
        [](Address tiles, int64_t n, int64_t k, int dtype, Address x, int64_t x_stride, int64_t rows, Address bias, int epilogue,
           float soft_cap, Address out, int64_t out_stride, int out_dtype, int64_t out_columns, Address arg_max, Address workspace,
           int64_t workspace_bytes) {
          LinearCall call;
          call.weight = {at<void>(tiles), n, k, DType(dtype)};
          call.x = at<void>(x);
          call.x_stride = x_stride;
          call.m = rows;
          call.bias = at<float>(bias);
          call.epilogue = Epilogue(epilogue);
          call.soft_cap = soft_cap;
          call.out = at<void>(out);
          call.out_stride = out_stride;
          call.out_dtype = DType(out_dtype);
          call.out_columns = out_columns;
          call.arg_max = at<int64_t>(arg_max);
          call.workspace = {at<void>(workspace), workspace_bytes};
          linear(call);
        },
        unlocked);
}
