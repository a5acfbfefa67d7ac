// Python face of the adapters. Tensors come as addresses: hardpoint_cpu.adapters checks shapes, dtypes and lifetimes before it calls.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "adapters.hpp"
#include "bind.hpp"
#include "hardpoint/released_gil.hpp"

namespace py = pybind11;

namespace hp {

void bind_adapters(py::module_& m) {
  m.def(
      "add_adapters",
      [](int dtype, Address x, int64_t x_stride, int64_t columns, Address out, int64_t out_stride, Address down, int64_t down_stride,
         Address up, int64_t up_stride, int64_t rows, int64_t max_rank, Address ranks, Address scales, int64_t parts_stride,
         Address spans, int64_t parts, Address tokens, Address slots, Address starts, int64_t groups) {
        AdapterCall call;
        call.dtype = static_cast<DType>(dtype);
        call.x = at<void>(x);
        call.x_stride = x_stride;
        call.columns = columns;
        call.out = at<void>(out);
        call.out_stride = out_stride;
        call.down = at<void>(down);
        call.down_stride = down_stride;
        call.up = at<void>(up);
        call.up_stride = up_stride;
        call.rows = rows;
        call.max_rank = max_rank;
        call.ranks = at<int32_t>(ranks);
        call.scales = at<float>(scales);
        call.parts_stride = parts_stride;
        call.spans = at<int32_t>(spans);
        call.parts = parts;
        call.tokens = at<int64_t>(tokens);
        call.slots = at<int32_t>(slots);
        call.starts = at<int32_t>(starts);
        call.groups = groups;
        add_adapters(call);
      },
      py::call_guard<hardpoint::ReleasedGil>());
}

}  // namespace hp
