// Python face of the counters that ranks on one host wait for: hardpoint_cpu.host_group owns the memory.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bind.hpp"
#include "signals.hpp"
#include "hardpoint/released_gil.hpp"

namespace py = pybind11;

namespace hp {

void bind_signals(py::module_& m) {
  m.def("publish_and_wait",
        [](Address own, Address counters, int64_t count, int64_t stride, uint64_t value, double seconds) {
          publish(at<uint64_t>(own), value);
          return wait_for_all(at<const void>(counters), count, stride, value, seconds);
        },
        py::arg("own"), py::arg("counters"), py::arg("count"), py::arg("stride"), py::arg("value"), py::arg("seconds"),
        py::call_guard<hardpoint::ReleasedGil>(),
        "Set the counter at `own`, and wait until `count` counters, `stride` bytes apart, have reached `value`; False after `seconds`.");
}

}  // namespace hp
