#include "memory_tensor.hpp"

#include <algorithm>
#include <vector>

#include "hardpoint/released_gil.hpp"

namespace py = pybind11;

namespace hardpoint::memory {
namespace {

// The part of DLPack's interface that has not changed since its version 0.2 (dlpack.h, unversioned exchange).
struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
constexpr uint8_t kUnsignedInteger = 1;
constexpr const char* kCapsuleName = "dltensor";  // torch renames it when it takes the tensor over
constexpr DLDevice kHost{1, 0};                   // kDLCPU

struct Managed {
  std::shared_ptr<void> owner;
  int64_t shape[1];
  DLManagedTensor tensor;
};

// A capsule over bytes that live as long as their owner.
py::capsule capsule_of(std::shared_ptr<void> owner, void* data, size_t size, DLDevice device) {
  auto* managed = new Managed{std::move(owner), {static_cast<int64_t>(size)}, {}};
  managed->tensor.tensor = {data, device, 1, {kUnsignedInteger, 8, 1}, managed->shape, nullptr, 0};
  managed->tensor.context = managed;
  managed->tensor.deleter = [](DLManagedTensor* tensor) { delete static_cast<Managed*>(tensor->context); };
  return py::capsule(&managed->tensor, kCapsuleName, [](PyObject* capsule) {
            if (!PyCapsule_IsValid(capsule, kCapsuleName)) return;
            auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
            tensor->deleter(tensor);
          });
}

}  // namespace

Tensors::Block::~Block() {
  try {
    pool->free(address);
  } catch (const MemoryFault&) {
    // Freed already, which is what was wanted.
  }
}

py::capsule Tensors::wrap(const std::shared_ptr<Block>& block, size_t size) const {
  return capsule_of(block, reinterpret_cast<void*>(block->address), size, {pool_->driver().geometry().dlpack_device, device_});
}

py::capsule Tensors::make(size_t size, const std::string& tag, Policy policy, size_t capacity) {
  uint64_t address;
  {
    const ReleasedGil released;
    address = capacity != 0 ? pool_->allocate(size, tag, policy, capacity) : pool_->allocate_block(size, tag, policy);
  }
  const auto block = std::make_shared<Block>(pool_, address);
  if (capacity != 0) {
    std::lock_guard lock(mutex_);
    elastic_[address] = block;
  }
  return wrap(block, size);
}

py::capsule Tensors::resize(uint64_t address, size_t size) {
  std::shared_ptr<Block> block;
  {
    std::lock_guard lock(mutex_);
    const auto entry = elastic_.find(address);
    if (entry != elastic_.end()) block = entry->second.lock();
  }
  if (!block) {
    throw MemoryFault(Fault::kInvalid, "cannot resize this tensor", "it is not an elastic one of this allocator",
                      "Give max_rows when it is allocated, and pass the tensor itself");
  }
  {
    const ReleasedGil released;
    pool_->resize(address, size);
  }
  return wrap(block, size);
}

py::object Tensors::make_host(size_t size) {
  std::shared_ptr<std::byte> memory;
  {
    const ReleasedGil released;
    memory = pool_->pinned_host(size);
  }
  if (memory == nullptr) return py::none();
  return capsule_of(memory, memory.get(), size, kHost);
}

namespace {

struct Scope {
  std::shared_ptr<Pool> pool;
  int32_t device;
  std::string tag;
  Policy policy;
};

// Torch's allocator functions have no user data, so what a call means is found by thread and by address.
struct TorchAllocations {
  std::mutex mutex;  // guards both
  std::unordered_map<uint64_t, std::shared_ptr<Pool>> pools;
  std::vector<Scope> scopes;  // of all threads, in the order of entering
};

TorchAllocations& torch_allocations() {
  static auto* allocations = new TorchAllocations;  // never destroyed: torch frees at the very end of the process
  return *allocations;
}

std::vector<Scope>& scopes_of_thread() {
  thread_local std::vector<Scope> scopes;
  return scopes;
}

const Scope* innermost(const std::vector<Scope>& scopes, int32_t device) {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    if (scope->device == device) return &*scope;
  }
  return nullptr;
}

uint64_t torch_allocate(int32_t device, size_t size) {
  try {
    TorchAllocations& all = torch_allocations();
    Scope scope;
    if (const Scope* own = innermost(scopes_of_thread(), device)) {
      scope = *own;
    } else {
      std::lock_guard lock(all.mutex);
      const Scope* other = innermost(all.scopes, device);
      if (other == nullptr) return 0;
      scope = *other;
    }
    const uint64_t address = scope.pool->allocate(size, scope.tag, scope.policy);
    std::lock_guard lock(all.mutex);
    all.pools.emplace(address, scope.pool);
    return address;
  } catch (...) {
    return 0;  // torch turns it into its own out-of-memory error, after a retry with its caches emptied
  }
}

void torch_free(uint64_t address) {
  try {
    TorchAllocations& all = torch_allocations();
    std::shared_ptr<Pool> pool;
    {
      std::lock_guard lock(all.mutex);
      const auto entry = all.pools.find(address);
      if (entry == all.pools.end()) return;
      pool = std::move(entry->second);
      all.pools.erase(entry);
    }
    pool->free(address);
  } catch (...) {
    // The books keep what could not be returned.
  }
}

}  // namespace

const hp_torch_functions* torch_functions() {
  static const hp_torch_functions functions{sizeof(hp_torch_functions), torch_allocate, torch_free};
  return &functions;
}

void enter_torch_pool(std::shared_ptr<Pool> pool, int32_t device, std::string tag, Policy policy) {
  Scope scope{std::move(pool), device, std::move(tag), policy};
  TorchAllocations& all = torch_allocations();
  std::lock_guard lock(all.mutex);
  scopes_of_thread().push_back(scope);
  all.scopes.push_back(std::move(scope));
}

void leave_torch_pool(int32_t device) {
  std::vector<Scope>& own = scopes_of_thread();
  TorchAllocations& all = torch_allocations();
  std::lock_guard lock(all.mutex);
  const auto innermost = std::find_if(own.rbegin(), own.rend(), [&](const Scope& scope) { return scope.device == device; });
  if (innermost == own.rend()) return;
  const Scope left = std::move(*innermost);
  own.erase(std::next(innermost).base());
  for (auto scope = all.scopes.rbegin(); scope != all.scopes.rend(); ++scope) {
    if (scope->pool != left.pool || scope->device != device || scope->tag != left.tag || scope->policy != left.policy) continue;
    all.scopes.erase(std::next(scope).base());
    return;
  }
}

}  // namespace hardpoint::memory
