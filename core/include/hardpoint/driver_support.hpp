// What every memory driver written in C++ needs besides its vendor's calls: opening the vendor's library, resolving its symbols, reading
// options, turning exceptions into statuses at the C boundary, and building the table of driver.h from a class. Header only, so that a driver
// stays one plain library; drivers in other languages need nothing of it.
//
// A driver is a class, here called Device, whose methods are the entries of driver.h with their C arguments, less `context` and `error`. They return
// void, throw Failure, and set results last. `open_driver<Device>` makes the rest of it.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hardpoint/driver.h"

namespace hardpoint::driver {

// Why an entry fails, on its way to the C boundary.
struct Failure {
  hp_status status;
  int64_t code;      // the vendor's status; 0 where the driver itself refuses
  std::string call;  // the vendor's function, or the entry that refuses
  std::string text;
};

// Copies as much of a text as fits, cut between characters, and terminates it.
inline void write_text(char *target, size_t size, std::string_view text) noexcept {
  if (size == 0) return;
  size_t length = std::min(text.size(), size - 1);
  const auto inside_character = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; };
  while (length > 0 && length < text.size() && inside_character(length)) --length;
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

inline hp_status report(hp_error *error, hp_status status, int64_t code, std::string_view call, std::string_view text) noexcept {
  error->code = code;
  write_text(error->call, sizeof error->call, call);
  write_text(error->text, sizeof error->text, text);
  return status;
}

// Runs an entry's work; no exception leaves it.
template <class Work>
hp_status guarded(const char *entry, hp_error *error, Work &&work) noexcept {
  try {
    work();
    return HP_OK;
  } catch (const Failure &failure) {
    return report(error, failure.status, failure.code, failure.call, failure.text);
  } catch (const std::exception &exception) {
    return report(error, HP_FAILED, 0, entry, exception.what());
  } catch (...) {
    return report(error, HP_FAILED, 0, entry, "unknown exception");
  }
}

// The calling thread's calls of the vendor's library up to the one that a test wants to fail; 0 for none. What `hp_driver_fail_call` sets.
inline thread_local int64_t calls_to_failure = 0;

// Comes before a call of the vendor's library or of the operating system: throws in its place where a test wants it to fail.
inline void may_fail(const char *call) {
  if (calls_to_failure > 0 && --calls_to_failure == 0) throw Failure{HP_FAILED, -1, call, "not called: hp_driver_fail_call asked for a failure"};
}

// Undoes a step when a later one fails.
template <class Action>
class Undo {
 public:
  explicit Undo(Action action) : action_(std::move(action)) {}
  Undo(const Undo &) = delete;
  Undo &operator=(const Undo &) = delete;
  ~Undo() {
    if (armed_) action_();
  }
  void dismiss() { armed_ = false; }

 private:
  Action action_;
  bool armed_ = true;
};

// An opened library; never closed, because the vendors' libraries do not survive it.
class Library {
 public:
  // Opens `path`, else what the environment variable names, else the first of `sonames` that is installed.
  static Library open(const char *path, const char *variable, const std::vector<const char *> &sonames) {
    if (path != nullptr && *path != '\0') return at(path, "the library asked for");
    const char *named = std::getenv(variable);
    if (named != nullptr && *named != '\0') return at(named, variable);
    std::string tried;
    for (const char *soname : sonames) {
      if (void *handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) return {handle, soname};
      const std::string problem = last_problem();
      // The linker reports a library that is not installed under its own name; a missing dependency of an installed one is
      // reported under the dependency's name.
      if (problem.rfind(std::string(soname) + ": cannot open shared object file", 0) != 0)
        throw Failure{HP_NO_LIBRARY, 0, "dlopen", std::string(soname) + " cannot be loaded (" + problem + ")"};
      tried += (tried.empty() ? "" : " or ") + std::string(soname);
    }
    throw Failure{HP_NO_LIBRARY, 0, "dlopen", "no " + tried + " is installed"};
  }

  void *handle() const { return handle_; }
  const std::string &name() const { return name_; }
  void *find(const char *symbol) const { return dlsym(handle_, symbol); }
  bool simulated() const { return find("hardpoint_simulated_driver") != nullptr; }

 private:
  Library(void *handle, std::string name) : handle_(handle), name_(std::move(name)) {}

  static Library at(const char *path, const char *origin) {
    if (void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return {handle, path};
    throw Failure{HP_NO_LIBRARY, 0, "dlopen", std::string(origin) + " cannot be loaded (" + last_problem() + ")"};
  }

  static std::string last_problem() {
    const char *problem = dlerror();
    return problem != nullptr ? problem : "unknown problem";
  }

  void *handle_;
  std::string name_;
};

// Fills function pointers from a library; symbols of which an older library may lack are optional and stay null.
class SymbolLoader {
 public:
  enum Need { required, optional };

  explicit SymbolLoader(const Library &library) : library_(library) {}

  template <class Function>
  void load(const char *symbol, Need need, Function *&function) {
    function = reinterpret_cast<Function *>(library_.find(symbol));
    if (function == nullptr && need == required) missing_.push_back(symbol);
  }

  void finish() const {
    if (missing_.empty()) return;
    std::string text = library_.name() + " lacks " + missing_.front();
    if (missing_.size() > 1) text += " and " + std::to_string(missing_.size() - 1) + " more required functions";
    throw Failure{HP_NO_LIBRARY, 0, "dlsym", text};
  }

 private:
  const Library &library_;
  std::vector<const char *> missing_;
};

// Defines a struct of function pointers, `name`, from a list of X(function, exported symbol, required or optional, result, arguments).
#define HP_DEFINE_API(name, functions)                            \
  struct name {                                                   \
    explicit name(const ::hardpoint::driver::Library &library) {  \
      ::hardpoint::driver::SymbolLoader loader(library);          \
      functions(HP_LOAD_FUNCTION) loader.finish();                \
    }                                                             \
    functions(HP_DECLARE_FUNCTION)                                \
  }
#define HP_LOAD_FUNCTION(name, symbol, need, result, ...) loader.load(symbol, ::hardpoint::driver::SymbolLoader::need, name);
#define HP_DECLARE_FUNCTION(name, symbol, need, result, ...) result (*name)(__VA_ARGS__) = nullptr;

// Defines constants from a list of X(name, value, the vendor's name for it).
#define HP_DECLARE_VALUE(name, value, vendor_name) constexpr int name = value;

[[noreturn]] inline void refuse(const char *entry, std::string text) { throw Failure{HP_INVALID, 0, entry, std::move(text)}; }

// "key=value;key=value". Each known key is taken; what is left over is refused.
class Options {
 public:
  explicit Options(const char *text) {
    std::string_view rest = text != nullptr ? text : "";
    while (!rest.empty()) {
      const std::string_view item = rest.substr(0, rest.find(';'));
      rest.remove_prefix(std::min(rest.size(), item.size() + 1));
      const size_t equals = item.find('=');
      if (equals == std::string_view::npos || equals == 0)
        refuse("hp_driver_open", "option '" + std::string(item) + "' is not of the form key=value");
      const std::string key(item.substr(0, equals));
      if (!values_.emplace(key, item.substr(equals + 1)).second) refuse("hp_driver_open", "option '" + key + "' is given twice");
    }
  }

  // Returns whether the option is given, and its value.
  bool take(const char *key, std::string *value) {
    const auto found = values_.find(key);
    if (found == values_.end()) return false;
    *value = std::move(found->second);
    values_.erase(found);
    return true;
  }

  void finish() const {
    if (!values_.empty()) refuse("hp_driver_open", "unknown option '" + values_.begin()->first + "'");
  }

 private:
  std::map<std::string, std::string> values_;
};

// A whole number within [low, high] in decimal digits; `name` says where it comes from.
inline uint64_t parse_number(const std::string &name, const std::string &text, uint64_t low, uint64_t high) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  errno = 0;
  const uint64_t number = digits ? std::strtoull(text.c_str(), nullptr, 10) : 0;
  if (!digits || errno != 0 || number < low || number > high)
    refuse("hp_driver_open", name + " is '" + text + "', not a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return number;
}

// Refuses sizes and addresses that the core promises not to pass, before a vendor's library sees them: some check nothing.
inline void check_multiple(const char *entry, const char *what, uint64_t number, size_t granularity) {
  if (number == 0 || number % granularity != 0)
    refuse(entry, std::string(what) + " " + std::to_string(number) + " is not a positive multiple of the granularity, " + std::to_string(granularity));
}

inline void check_size(const char *entry, size_t size, size_t granularity, size_t limit) {
  check_multiple(entry, "size", size, granularity);
  if (limit != 0 && size > limit)
    refuse(entry, "size " + std::to_string(size) + " is larger than the limit, " + std::to_string(limit));
}

inline void check_range(const char *entry, uint64_t address, size_t size, const hp_geometry &geometry) {
  check_multiple(entry, "address", address, geometry.granularity);
  check_size(entry, size, geometry.granularity, geometry.max_chunk);
}

inline void check_device_index(int32_t index, int64_t count, const std::string &library) {
  if (index >= 0 && index < count) return;
  throw Failure{HP_NO_DEVICE, 0, "hp_driver_open",
                "device " + std::to_string(index) + " was asked for, and " + library + " has " + std::to_string(count)};
}

inline size_t round_up(size_t number, size_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// A geometry with the granularities that a vendor's library reports by `call`, checked, because everything else is computed from them.
inline hp_geometry geometry_of(const char *call, size_t minimum, size_t recommended) {
  if (minimum == 0 || (minimum & (minimum - 1)) != 0)
    throw Failure{HP_FAILED, 0, call, "granularity " + std::to_string(minimum) + " is not a power of two"};
  hp_geometry geometry{};
  geometry.granularity = minimum;
  geometry.recommended = round_up(std::max(recommended, minimum), minimum);
  return geometry;
}

// The text of a vendor's error: its name, and what the library says of it; either may be null.
inline std::string error_text(const char *name, const char *message) {
  return std::string(name != nullptr ? name : "unknown error") + (message != nullptr ? std::string(": ") + message : "");
}

// An address or handle of driver.h as the vendors' libraries take it.
inline void *pointer(uint64_t number) { return reinterpret_cast<void *>(static_cast<uintptr_t>(number)); }

// Counts `open` and `close`; what the device needs is taken by the first and given back by the last.
class OpenCount {
 public:
  template <class Take>
  void open(Take &&take) {
    const std::lock_guard lock(mutex_);
    if (count_ == 0) take();
    ++count_;
  }

  template <class Give>
  void close(Give &&give) {
    const std::lock_guard lock(mutex_);
    if (count_ == 0) refuse("close", "the driver is not open");
    if (count_ == 1) give();
    --count_;
  }

  void require(const char *entry) const {
    if (count_.load(std::memory_order_acquire) == 0) refuse(entry, "the driver is not open");
  }

 private:
  std::mutex mutex_;  // guards: what is taken is held exactly while count_ > 0
  std::atomic<int64_t> count_{0};
};

// Mappings that `map` could neither finish nor undo: they are undone before their handle is mapped again or released, which fails where that does.
class HalfMapped {
 public:
  void add(uint64_t handle, uint64_t address, size_t size) noexcept try {
    const std::lock_guard lock(mutex_);
    mappings_[handle] = {address, size};
  } catch (const std::bad_alloc &) {
  }

  // Calls unmap(address, size), which may throw, where the handle has such a mapping.
  template <class Unmap>
  void undo(uint64_t handle, Unmap &&unmap) {
    const std::lock_guard lock(mutex_);
    const auto mapping = mappings_.find(handle);
    if (mapping == mappings_.end()) return;
    unmap(mapping->second.first, mapping->second.second);
    mappings_.erase(mapping);
  }

 private:
  std::mutex mutex_;  // guards mappings_
  std::map<uint64_t, std::pair<uint64_t, size_t>> mappings_;  // address and size, by handle
};

// The C function of one entry: calls a method and turns what it throws into a status.
template <auto method>
struct Entry;

template <class Device, class... Arguments, void (Device::*method)(Arguments...)>
struct Entry<method> {
  static hp_status call(void *context, Arguments... arguments, hp_error *error) {
    return guarded("driver", error, [&] { (static_cast<Device *>(context)->*method)(arguments...); });
  }
};

// Whether a class has the method that pins host memory, which is optional.
template <class Device, class = void>
struct RegistersHost : std::false_type {};

template <class Device>
struct RegistersHost<Device, std::void_t<decltype(&Device::host_register)>> : std::true_type {};

template <class Device>
hp_driver make_table(Device &device, uint32_t flags) {
  hp_driver table{};
  table.struct_size = sizeof table;
  table.abi = HP_DRIVER_ABI;
  table.flags = flags;
  table.context = &device;
  table.open = Entry<&Device::open>::call;
  table.close = Entry<&Device::close>::call;
  table.geometry = Entry<&Device::geometry>::call;
  table.memory_info = Entry<&Device::memory_info>::call;
  table.device_count = Entry<&Device::device_count>::call;
  table.device_name = Entry<&Device::device_name>::call;
  table.driver_version = Entry<&Device::driver_version>::call;
  table.quirks = Entry<&Device::quirks>::call;
  table.reserve = Entry<&Device::reserve>::call;
  table.release_address = Entry<&Device::release_address>::call;
  table.create = Entry<&Device::create>::call;
  table.release = Entry<&Device::release>::call;
  table.map = Entry<&Device::map>::call;
  table.unmap = Entry<&Device::unmap>::call;
  table.stream_create = Entry<&Device::stream_create>::call;
  table.stream_destroy = Entry<&Device::stream_destroy>::call;
  table.copy_to_host = Entry<&Device::copy_to_host>::call;
  table.copy_to_device = Entry<&Device::copy_to_device>::call;
  table.fill = Entry<&Device::fill>::call;
  table.stream_synchronize = Entry<&Device::stream_synchronize>::call;
  table.device_synchronize = Entry<&Device::device_synchronize>::call;
  if constexpr (RegistersHost<Device>::value) {
    if (device.can_register_host()) {
      table.host_register = Entry<&Device::host_register>::call;
      table.host_unregister = Entry<&Device::host_unregister>::call;
    }
  }
  return table;
}

// The devices of one vendor that were asked for, each with its table, until the process ends.
template <class Device>
class Registry {
 public:
  // Returns the table for a request; equal requests share one.
  const hp_driver *find_or_add(const hp_open_request &request) {
    if (request.struct_size < sizeof request) refuse("hp_driver_open", "the request is of an older contract than this driver");
    Options options(request.options);
    const typename Device::Settings settings = Device::Settings::from(options);
    options.finish();
    const Library library = Library::open(request.library, Device::library_variable, Device::sonames());
    const std::lock_guard lock(mutex_);
    const typename Device::Api &api = api_of(library);
    for (const Opened &opened : opened_)
      if (opened.api == &api && opened.index == request.device && opened.settings == settings) return &opened.table;
    opened_.emplace_back(library, api, request.device, settings);
    return &opened_.back().table;
  }

 private:
  struct Opened {
    Opened(const Library &library, const typename Device::Api &functions, int32_t device_index, const typename Device::Settings &chosen)
        : api(&functions),
          index(device_index),
          settings(chosen),
          device(functions, library.name(), device_index, chosen),
          table(make_table(device, Device::flags | (library.simulated() ? HP_SIMULATED : 0u))) {}

    const typename Device::Api *api;
    int32_t index;
    typename Device::Settings settings;
    Device device;
    hp_driver table;
  };

  const typename Device::Api &api_of(const Library &library) {
    std::unique_ptr<typename Device::Api> &api = apis_[library.handle()];
    if (api == nullptr) api = std::make_unique<typename Device::Api>(library);
    return *api;
  }

  std::mutex mutex_;  // guards both containers, and that a device is set up once: its table's address never changes
  std::map<void *, std::unique_ptr<typename Device::Api>> apis_;
  std::list<Opened> opened_;
};

// The body of hp_driver_open.
template <class Device>
hp_status open_driver(const hp_open_request *request, const hp_driver **driver, hp_error *error) noexcept {
  return guarded("hp_driver_open", error, [&] {
    // driver.h promises that tables are valid to the end of the process, hence one registry per library, never destroyed: threads may
    // still use the device while the process exits.
    static auto *const registry = new Registry<Device>;
    *driver = registry->find_or_add(*request);
  });
}

}  // namespace hardpoint::driver
