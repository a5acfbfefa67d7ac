// The memory engine for Python: see hardpoint.memory for the typed face.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "hardpoint/released_gil.hpp"
#include "memory_pool.hpp"
#include "memory_tensor.hpp"

namespace py = pybind11;

// A Policy of the contract, by its value.
template <>
struct pybind11::detail::type_caster<hardpoint::memory::Policy> {
  PYBIND11_TYPE_CASTER(hardpoint::memory::Policy, const_name("hardpoint.interfaces.Policy"));

  bool load(handle source, bool) {
    static constexpr const char* kNames[] = {"preserve", "discard", "zero", "rebuild", "resident"};  // in the order of the enumeration
    const object name = getattr(source, "_value_", none());
    if (!isinstance<str>(name)) return false;
    const auto text = name.cast<std::string_view>();
    for (size_t index = 0; index < std::size(kNames); ++index) {
      if (text != kNames[index]) continue;
      value = static_cast<hardpoint::memory::Policy>(index);
      return true;
    }
    return false;
  }
};

namespace hardpoint {
namespace {

using namespace memory;

constexpr const char* kTiers[] = {"host", "disk", "source"};  // in the order of the enumeration

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

// Whether the interpreter has closed the pools on its way out.
std::atomic<bool> interpreter_ends{false};
std::atomic<pthread_t> ending_thread;

void abandon_all() {
  ending_thread = pthread_self();
  interpreter_ends = true;
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

// Waits for the end of the process where the interpreter has closed the pool that a daemon thread used: nobody would see its error but a user
// on the standard error. Its frames of native code have been left by now, and with them every lock.
void wait_where_interpreter_ends(const MemoryFault& fault) {
  if (fault.kind() != Fault::kClosed || !interpreter_ends || pthread_equal(ending_thread, pthread_self())) return;
  const py::gil_scoped_release released;
  for (;;) pause();
}

void raise(const MemoryFault& fault) {
  wait_where_interpreter_ends(fault);
  const py::object type = py::module_::import("hardpoint.interfaces.errors").attr(error_name(fault.kind()));
  py::object error;
  if (fault.kind() == Fault::kDriverCall) {
    error = type(fault.call(), fault.code(), fault.found(), py::arg("hint") = optional_text(fault.hint()));
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

// Reports and books leave as plain values, and Python makes the contract's objects of them. Were its code called from here, a daemon thread in it
// while the interpreter ends would be unwound through these frames, whose destructors may not touch Python's objects then.
py::object to_tags(const std::vector<std::string>& tags) { return py::frozenset(py::cast(tags)); }

// The fields of a MemoryReport.
py::dict to_python(const Report& report) {
  py::dict seconds, tiers, fields;
  for (const auto& [phase, value] : report.seconds) seconds[py::str(phase)] = value;
  for (size_t index = 0; index < std::size(kTiers); ++index) {
    if (report.tiers[index] > 0) tiers[kTiers[index]] = report.tiers[index];
  }
  fields["preserved"] = report.preserved;
  fields["discarded"] = report.discarded;
  fields["skipped"] = report.skipped;
  fields["seconds"] = seconds;
  fields["free_before"] = report.free_before;
  fields["free_after"] = report.free_after;
  fields["tiers"] = tiers;
  fields["unmapped"] = report.unmapped;
  fields["retained"] = report.retained;
  fields["direct_io"] = report.disk_direct;
  fields["still_asleep"] = to_tags(report.still_asleep);
  return fields;
}

// (fields of a TagStats by tag, peak of allocated bytes, tags that are asleep)
py::tuple to_python(const Stats& stats) {
  py::dict tags;
  std::vector<std::string> asleep;
  for (const TagStats& tag : stats.tags) {
    tags[py::str(tag.tag)] = py::make_tuple(tag.allocated, tag.mapped, tag.backed_up, tag.allocations, tag.sourced);
    if (tag.asleep) asleep.push_back(tag.tag);
  }
  return py::make_tuple(tags, stats.peak_allocated, to_tags(asleep));
}

Stats stats_of(const Pool& pool) {
  const ReleasedGil released;
  return pool.stats();
}

// What is beside the tags.
py::dict to_books(const Stats& stats) {
  py::dict books;
  books["reserved"] = stats.reserved;
  books["host_held"] = stats.host_held;
  books["host_used"] = stats.host_used;
  books["disk_used"] = stats.disk_used;
  books["unreturned"] = stats.unreturned;
  return books;
}

template <class T>
T field(const py::handle& plan, const char* name) {
  py::detail::make_caster<T> caster;
  if (!caster.load(plan.attr(name), true)) throw py::type_error(std::string("a plan's ") + name + " is of another type");
  return py::detail::cast_op<T>(std::move(caster));
}

// Sorted, so that the same plan has the same effects in the same order.
std::vector<std::string> tags_of(const py::handle& tags) {
  std::vector<std::string> result;
  for (const py::handle tag : tags) result.push_back(py::cast<std::string>(tag));
  std::sort(result.begin(), result.end());
  return result;
}

// Reads a SleepPlan of the contract.
SleepPlan plan_of(const py::object& given) {
  SleepPlan plan;
  if (const py::object tags = given.attr("tags"); !tags.is_none()) plan.tags = tags_of(tags);
  for (const auto& [tag, policy] : py::dict(given.attr("policies"))) plan.policies[py::cast<std::string>(tag)] = py::cast<memory::Policy>(policy);
  plan.keep = tags_of(given.attr("keep"));
  const std::string tier = field<std::string>(given.attr("tier"), "value");
  for (size_t index = 0; index < std::size(kTiers); ++index) {
    if (tier == kTiers[index]) plan.tier = static_cast<Tier>(index);
  }
  plan.verify = field<bool>(given, "verify");
  plan.host_budget = field<std::optional<uint64_t>>(given, "host_budget");
  plan.disk_budget = field<std::optional<uint64_t>>(given, "disk_budget");
  plan.disk_directory = field<std::optional<std::string>>(given, "disk_directory").value_or("");
  for (const py::handle one : given.attr("live")) {
    std::vector<Range>& live = plan.live[field<uint64_t>(one, "address")];
    const auto ranges = field<std::vector<std::pair<uint64_t, uint64_t>>>(one, "ranges");
    live.reserve(live.size() + ranges.size());
    for (const auto& [start, size] : ranges) live.push_back({start, size});
  }
  return plan;
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

  py::class_<Operation>(m, "MemoryOperation")
      .def("hold", &Operation::hold, Released())
      .def("commit",
           [](Operation& operation) {
             Report report;
             {
               const ReleasedGil released;
               report = operation.commit();
             }
             return to_python(report);
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
           [](Pool& pool, uint64_t address, const py::buffer& target) {
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
      .def("prepare_host",
           [](Pool& pool, const py::object& given) {
             const SleepPlan plan = plan_of(given);
             const ReleasedGil released;
             pool.prepare_host(plan);
           })
      .def("begin_sleep",
           [](Pool& pool, const py::object& given) {
             const SleepPlan plan = plan_of(given);
             const Progress watch = progress_of(given.attr("progress"));
             const ReleasedGil released;
             return pool.begin_sleep(plan, watch);
           })
      .def("begin_wake",
           [](Pool& pool, const std::optional<std::vector<std::string>>& tags, const py::object& progress) {
             const Progress watch = progress_of(progress);
             const ReleasedGil released;
             return pool.begin_wake(tags, watch);
           },
           py::arg("tags") = py::none(), py::arg("progress") = py::none())
      .def("stats", [](const Pool& pool) { return to_python(stats_of(pool)); })
      .def("books", [](const Pool& pool) { return to_books(stats_of(pool)); })
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
      .def("resize", &Tensors::resize, py::arg("address"), py::arg("size"))
      .def("make_host", &Tensors::make_host, py::arg("size"));

  m.def("torch_functions", [] { return reinterpret_cast<uintptr_t>(torch_functions()); },
        "Address of the functions that a driver library's hp_torch_install is called with.");
  m.def("abandon_memory_pools", &abandon_all, Released(),
        "Remove every pool's backups on disk and end its use without a driver call; for the end of the process.");
  m.def("enter_torch_pool", &enter_torch_pool, py::arg("pool"), py::arg("device"), py::arg("tag"), py::arg("policy"));
  m.def("leave_torch_pool", &leave_torch_pool, py::arg("device"));
}

}  // namespace hardpoint
