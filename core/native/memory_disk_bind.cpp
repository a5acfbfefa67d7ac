// Python binding of the disk store and of the checksum, for their tests. The engine uses both without Python.
#include <pybind11/stl.h>

#include <fcntl.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "bind.hpp"
#include "checksum.hpp"
#include "hardpoint/released_gil.hpp"
#include "memory_disk.hpp"

namespace hardpoint {
namespace {

namespace py = pybind11;
using memory::DiskCalls;
using memory::DiskFile;
using memory::DiskPiece;
using memory::DiskStore;

// Real calls, of which one per name can be made to fail.
class FaultyCalls {
 public:
  // From the nth use on (1 = the next), `times` uses of the call end with `error`; with error 0, they transfer half of what was asked.
  void fail(const std::string& call, int64_t nth, int64_t times, int error) {
    const std::lock_guard<std::mutex> guard(mutex_);
    faults_[call] = {nth - 1, times, error};
  }

  DiskCalls table() {
    DiskCalls calls;
    calls.context = this;
    calls.open = [](void* self, const char* path, int flags, mode_t mode) {
      // "open_direct" makes a file system that refuses direct I/O.
      const bool fails = (flags & O_DIRECT) && error_of(self, "open_direct");
      return fails || error_of(self, "open") ? -1 : real().open(nullptr, path, flags, mode);
    };
    calls.pwrite = [](void* self, int file, const void* data, size_t size, off_t offset) -> ssize_t {
      return error_of(self, "pwrite", &size) ? -1 : real().pwrite(nullptr, file, data, size, offset);
    };
    calls.pread = [](void* self, int file, void* data, size_t size, off_t offset) -> ssize_t {
      return error_of(self, "pread", &size) ? -1 : real().pread(nullptr, file, data, size, offset);
    };
    calls.fallocate = [](void* self, int file, off_t size) {
      return error_of(self, "fallocate") ? -1 : real().fallocate(nullptr, file, size);
    };
    calls.fdatasync = [](void* self, int file) { return error_of(self, "fdatasync") ? -1 : real().fdatasync(nullptr, file); };
    calls.rename = [](void* self, const char* from, const char* to) {
      return error_of(self, "rename") ? -1 : real().rename(nullptr, from, to);
    };
    return calls;
  }

 private:
  struct Fault {
    int64_t skips;
    int64_t times;
    int error;
  };

  static DiskCalls real() { return DiskCalls::system(); }

  static bool error_of(void* self, const char* call, size_t* size = nullptr) {
    return static_cast<FaultyCalls*>(self)->counts(call, size);
  }

  bool counts(const char* call, size_t* size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = faults_.find(call);
    if (found == faults_.end() || found->second.times == 0) return false;
    Fault& fault = found->second;
    if (fault.skips > 0) {
      --fault.skips;
      return false;
    }
    --fault.times;
    if (fault.error == 0 && size) *size /= 2;
    errno = fault.error;
    return fault.error != 0;
  }

  std::mutex mutex_;  // faults_
  std::map<std::string, Fault> faults_;
};

struct TestedStore {
  TestedStore(const std::string& directory, uint64_t budget) : store(directory, budget, calls->table()) {}
  std::shared_ptr<FaultyCalls> calls = std::make_shared<FaultyCalls>();
  DiskStore store;
};

// The file of a TestedStore, and the calls that it goes through.
struct TestedFile {
  std::shared_ptr<FaultyCalls> calls;
  std::unique_ptr<DiskFile> file;
};

using Piece = std::tuple<uint64_t, uint64_t, uint64_t>;

void commit(TestedFile& self, const std::vector<Piece>& pieces) {
  std::vector<DiskPiece> list;
  for (const auto& [offset, size, checksum] : pieces) list.push_back({offset, size, checksum});
  const ReleasedGil release;
  self.file->commit(std::move(list));
}

std::vector<Piece> pieces_of(const TestedFile& self) {
  std::vector<Piece> list;
  for (const DiskPiece& piece : self.file->pieces()) list.emplace_back(piece.offset, piece.size, piece.checksum);
  return list;
}

void bind_checksum(py::module_& m) {
  m.def(
      "xxh64",
      [](const py::buffer& data, uint64_t seed) {
        const py::buffer_info bytes = data.request();
        const ReleasedGil release;
        return xxh64(bytes.ptr, static_cast<size_t>(bytes.size * bytes.itemsize), seed);
      },
      py::arg("data"), py::arg("seed") = 0);

  py::class_<Xxh64>(m, "Xxh64")
      .def(py::init<uint64_t>(), py::arg("seed") = 0)
      .def("update",
           [](Xxh64& self, const py::buffer& data) {
             const py::buffer_info bytes = data.request();
             self.update(bytes.ptr, static_cast<size_t>(bytes.size * bytes.itemsize));
           })
      .def("digest", &Xxh64::digest);
}

}  // namespace

void bind_disk(py::module_& m) {
  bind_checksum(m);

  const auto disk_error = py::register_exception<memory::DiskError>(m, "DiskError");
  py::register_exception<memory::DiskFull>(m, "DiskFull", disk_error);
  py::register_exception<memory::BudgetExceeded>(m, "BudgetExceeded");
  py::register_exception<memory::CorruptFile>(m, "CorruptFile");
  py::register_exception<memory::OwnedByParent>(m, "OwnedByParent");

  py::class_<TestedFile>(m, "DiskFile")
      .def("write",
           [](TestedFile& self, uint64_t offset, const py::buffer& data) {
             const py::buffer_info bytes = data.request();
             const ReleasedGil release;
             self.file->write(offset, bytes.ptr, static_cast<uint64_t>(bytes.size * bytes.itemsize));
           })
      .def("read",
           [](const TestedFile& self, uint64_t offset, const py::buffer& data) {
             const py::buffer_info bytes = data.request(true);
             const ReleasedGil release;
             self.file->read(offset, bytes.ptr, static_cast<uint64_t>(bytes.size * bytes.itemsize));
           })
      .def("commit", &commit)
      .def("verify_header", [](const TestedFile& self) { self.file->verify_header(); })
      .def("remove", [](TestedFile& self) { self.file.reset(); })
      .def_property_readonly("pieces", &pieces_of)
      .def_property_readonly("path", [](const TestedFile& self) { return self.file->path(); })
      .def_property_readonly("committed", [](const TestedFile& self) { return self.file->committed(); })
      .def_property_readonly("direct", [](const TestedFile& self) { return self.file->direct(); })
      .def_property_readonly("file_bytes", [](const TestedFile& self) { return self.file->file_bytes(); });

  py::class_<TestedStore>(m, "DiskStore")
      .def(py::init<const std::string&, uint64_t>(), py::arg("directory"), py::arg("budget"))
      .def("create",
           [](TestedStore& self, uint64_t payload_bytes, size_t max_pieces) {
             return TestedFile{self.calls, self.store.create(payload_bytes, max_pieces)};
           })
      .def("fail",
           [](TestedStore& self, const std::string& call, int error, int64_t nth, int64_t times) {
             self.calls->fail(call, nth, times, error);
           },
           py::arg("call"), py::arg("error"), py::arg("nth") = 1, py::arg("times") = 1)
      .def_property_readonly("path", [](const TestedStore& self) { return self.store.path(); })
      .def_property_readonly("bytes_used", [](const TestedStore& self) { return self.store.bytes_used(); })
      .def_property_readonly("budget", [](const TestedStore& self) { return self.store.budget(); });
}

}  // namespace hardpoint
