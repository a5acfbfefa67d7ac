// The memory engine for Python: see hardpoint.memory for the typed face.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "bind.hpp"
#include "released_gil.hpp"
#include "memory_pool.hpp"
#include "memory_tensor.hpp"

namespace py = pybind11;

namespace hardpoint {
namespace {

using namespace memory;
using Released = py::call_guard<ReleasedGil>;

// Pools that may still live when the interpreter ends, some of them only by tensors that torch never drops.
struct Living {
  std::mutex mutex;  // guards pools
  std::vector<std::weak_ptr<Pool>> pools;
};

Living& living() {
  static Living pools;
  return pools;
}

void remember(const std::shared_ptr<Pool>& pool) {
  std::lock_guard lock(living().mutex);
  auto& pools = living().pools;
  pools.erase(std::remove_if(pools.begin(), pools.end(), [](const auto& one) { return one.expired(); }), pools.end());
  pools.push_back(pool);
}

void abandon_all() {
  std::lock_guard lock(living().mutex);
  for (const auto& pool : living().pools) {
    if (const auto alive = pool.lock()) alive->abandon();
  }
}

const char* error_name(Fault kind) {
  switch (kind) {
    case Fault::kOutOfMemory: return "DeviceOutOfMemory";
    case Fault::kBudgetExceeded: return "HostBudgetExceeded";
    case Fault::kDriverCall: return "DriverError";
    case Fault::kUnknownTag: return "UnknownTag";
    case Fault::kAsleep: return "MemoryAsleep";
    case Fault::kBusy: return "MemoryBusy";
    case Fault::kEnded: return "InvalidTransaction";
    case Fault::kInvalid: return "InvalidAllocation";
    case Fault::kForeign: return "ForeignMemory";
    case Fault::kCorrupt: return "BackupCorrupt";
    case Fault::kStale: return "BackupStale";
    case Fault::kForked: return "ForkedProcess";
    case Fault::kRefused: return "CapabilityRefused";
    case Fault::kClosed: return "MemoryFault";
  }
  return "MemoryFault";
}

py::object optional_text(const std::string& text) { return text.empty() ? py::object(py::none()) : py::str(text); }

void raise(const MemoryFault& fault) {
  const py::object type = py::module_::import("hardpoint.interfaces.errors").attr(error_name(fault.kind()));
  py::object error;
  if (fault.kind() == Fault::kDriverCall) {
    error = type(fault.call(), fault.code(), fault.found());
  } else if (fault.kind() == Fault::kRefused) {
    error = type(fault.problem(), py::make_tuple(fault.found()), py::arg("hint") = optional_text(fault.hint()));
  } else {
    error = type(fault.problem(), py::arg("found") = optional_text(fault.found()), py::arg("hint") = optional_text(fault.hint()));
  }
  PyErr_SetObject(type.ptr(), error.ptr());
}

// A Python callback behind a function that is called without the GIL.
Progress progress_of(const py::object& callback) {
  if (callback.is_none()) return {};
  // Copied, called and dropped by the operation, which may end in a thread without the GIL.
  const std::shared_ptr<py::object> held(new py::object(callback), [](py::object* object) {
    const py::gil_scoped_acquire acquired;
    delete object;
  });
  return [held](uint64_t done, uint64_t all) {
    const py::gil_scoped_acquire acquired;
    (*held)(done, all);
  };
}

py::dict to_dict(const Report& report) {
  py::dict seconds;
  for (const auto& [phase, value] : report.seconds) seconds[py::str(phase)] = value;
  py::dict dict;
  dict["preserved"] = report.preserved;
  dict["discarded"] = report.discarded;
  dict["skipped"] = report.skipped;
  dict["unmapped"] = report.unmapped;
  dict["retained"] = report.retained;
  dict["tiers"] = py::make_tuple(report.tiers[0], report.tiers[1], report.tiers[2]);
  dict["free_before"] = report.free_before;
  dict["free_after"] = report.free_after;
  dict["allocations"] = report.allocations;
  dict["disk_direct"] = report.disk_direct;
  dict["seconds"] = seconds;
  dict["still_asleep"] = report.still_asleep;
  return dict;
}

py::dict to_dict(const Stats& stats) {
  py::dict tags;
  for (const TagStats& tag : stats.tags) {
    py::dict one;
    one["allocated"] = tag.allocated;
    one["mapped"] = tag.mapped;
    one["backed_up"] = tag.backed_up;
    one["allocations"] = tag.allocations;
    one["sourced"] = tag.sourced;
    one["asleep"] = tag.asleep;
    tags[py::str(tag.tag)] = one;
  }
  py::dict dict;
  dict["tags"] = tags;
  dict["allocated"] = stats.allocated;
  dict["peak_allocated"] = stats.peak_allocated;
  dict["reserved"] = stats.reserved;
  dict["host_held"] = stats.host_held;
  dict["host_used"] = stats.host_used;
  dict["disk_used"] = stats.disk_used;
  dict["unreturned"] = stats.unreturned;
  return dict;
}

std::vector<Source> sources_of(Pool& pool, const py::list& extents, uint64_t size, uint64_t rebuild) {
  std::vector<Source> sources;
  if (rebuild != 0) sources.push_back({{0, size}, nullptr, 0, rebuild});
  for (const py::handle extent : extents) {
    const auto [start, length, path, offset] = extent.cast<std::tuple<uint64_t, uint64_t, std::string, uint64_t>>();
    sources.push_back({{start, length}, pool.open_source(path), offset, 0});
  }
  return sources;
}

}  // namespace

void bind_memory(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const MemoryFault& fault) {
      raise(fault);
    }
  });

  py::enum_<memory::Policy>(m, "MemoryPolicy")
      .value("preserve", memory::Policy::kPreserve)
      .value("discard", memory::Policy::kDiscard)
      .value("zero", memory::Policy::kZero)
      .value("rebuild", memory::Policy::kRebuild)
      .value("resident", memory::Policy::kResident);
  py::enum_<Tier>(m, "MemoryTier").value("host", Tier::kHost).value("disk", Tier::kDisk).value("source", Tier::kSource);

  py::class_<SleepPlan>(m, "MemorySleepPlan")
      .def(py::init())
      .def_readwrite("tags", &SleepPlan::tags)
      .def_readwrite("policies", &SleepPlan::policies)
      .def_readwrite("keep", &SleepPlan::keep)
      .def_readwrite("tier", &SleepPlan::tier)
      .def_readwrite("verify", &SleepPlan::verify)
      .def_readwrite("host_budget", &SleepPlan::host_budget)
      .def_readwrite("disk_budget", &SleepPlan::disk_budget)
      .def_readwrite("disk_directory", &SleepPlan::disk_directory)
      .def("add_live", [](SleepPlan& plan, uint64_t address, const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
        std::vector<Range>& live = plan.live[address];
        live.reserve(live.size() + ranges.size());
        for (const auto& [start, size] : ranges) live.push_back({start, size});
      });

  py::class_<Operation>(m, "MemoryOperation")
      .def("hold", &Operation::hold, Released())
      .def("commit",
           [](Operation& operation) {
             Report report;
             {
               const ReleasedGil released;
               report = operation.commit();
             }
             return to_dict(report);
           })
      .def("rollback", &Operation::rollback, Released())
      .def("rebuilds", &Operation::rebuilds);

  py::class_<Pool, std::shared_ptr<Pool>>(m, "MemoryPool")
      .def(py::init([](const py::capsule& driver) {
        if (std::string(driver.name()) != HP_DRIVER_CAPSULE) throw py::type_error("not a capsule of a memory driver");
        const auto* table = driver.get_pointer<const hp_driver>();
        const ReleasedGil released;
        auto pool = std::make_shared<Pool>(table);
        remember(pool);
        return pool;
      }))
      .def("allocate", &Pool::allocate, py::arg("size"), py::arg("tag"), py::arg("policy"), py::arg("capacity") = 0, Released())
      .def("allocate_block", &Pool::allocate_block, py::arg("size"), py::arg("tag"), py::arg("policy"), Released())
      .def("free", &Pool::free, py::arg("address"), Released())
      .def("resize", &Pool::resize, py::arg("address"), py::arg("size"), Released())
      .def("is_asleep", &Pool::is_asleep)
      .def("know_tags", &Pool::know_tags)
      .def("read",
           [](const Pool& pool, uint64_t address, const py::buffer& target) {
             const py::buffer_info info = target.request(true);
             const ReleasedGil released;
             pool.read(address, info.ptr, static_cast<size_t>(info.size * info.itemsize));
           })
      .def("write",
           [](Pool& pool, uint64_t address, const py::buffer& source) {
             const py::buffer_info info = source.request();
             const ReleasedGil released;
             pool.write(address, info.ptr, static_cast<size_t>(info.size * info.itemsize));
           })
      .def("read_backup",
           [](const Pool& pool, uint64_t address, const py::buffer& target) {
             const py::buffer_info info = target.request(true);
             const ReleasedGil released;
             pool.read_backup(address, info.ptr, static_cast<size_t>(info.size * info.itemsize));
           })
      .def("declare_source",
           [](Pool& pool, uint64_t address, uint64_t size, const py::list& extents, uint64_t rebuild) {
             pool.declare_source(address, sources_of(pool, extents, size, rebuild));
           },
           py::arg("address"), py::arg("size"), py::arg("extents"), py::arg("rebuild") = 0)
      .def("callbacks", &Pool::callbacks)
      .def("mark_written", &Pool::mark_written, Released())
      .def("discard_backup", &Pool::discard_backup, Released())
      .def("prepare_host", &Pool::prepare_host, Released())
      .def("begin_sleep",
           [](Pool& pool, const SleepPlan& plan, const py::object& progress) {
             const Progress watch = progress_of(progress);
             const ReleasedGil released;
             return pool.begin_sleep(plan, watch);
           },
           py::arg("plan"), py::arg("progress") = py::none())
      .def("begin_wake",
           [](Pool& pool, const std::optional<std::vector<std::string>>& tags, const py::object& progress) {
             const Progress watch = progress_of(progress);
             const ReleasedGil released;
             return pool.begin_wake(tags, watch);
           },
           py::arg("tags") = py::none(), py::arg("progress") = py::none())
      .def("stats",
           [](const Pool& pool) {
             Stats stats;
             {
               const ReleasedGil released;
               stats = pool.stats();
             }
             return to_dict(stats);
           })
      .def("memory_info",
           [](const Pool& pool) {
             Driver::Info info{};
             {
               const ReleasedGil released;
               pool.check_usable("ask for memory information");
               info = pool.driver().memory_info();
             }
             return py::make_tuple(info.free, info.total);
           })
      .def_property_readonly("quirks", [](const Pool& pool) { return pool.driver().quirks(); })
      .def("trim", &Pool::trim, Released())
      .def("close", &Pool::close, Released());

  py::class_<Tensors>(m, "MemoryTensors")
      .def(py::init<std::shared_ptr<Pool>, int32_t>(), py::arg("pool"), py::arg("device"))
      .def("make", &Tensors::make, py::arg("size"), py::arg("tag"), py::arg("policy"), py::arg("capacity") = 0)
      .def("resize", &Tensors::resize, py::arg("address"), py::arg("size"));

  m.def("torch_functions", [] { return reinterpret_cast<uintptr_t>(torch_functions()); },
        "Address of the functions that a driver library's hp_torch_install is called with.");
  m.def("abandon_memory_pools", &abandon_all, Released(),
        "Remove every pool's backups on disk and end its use without a driver call; for the end of the process.");
  m.def("enter_torch_pool", &enter_torch_pool, py::arg("pool"), py::arg("device"), py::arg("tag"), py::arg("policy"));
  m.def("leave_torch_pool", &leave_torch_pool, py::arg("device"));
}

}  // namespace hardpoint
