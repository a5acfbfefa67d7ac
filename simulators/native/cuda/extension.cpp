// How a library over the driver (the CUDA runtime) takes part in counting and fault injection.
#include <new>

#include "cuda/api.hpp"
#include "cuda/extension.h"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

// The functions of the other library live as long as the process, as those of this one do.
extern "C" __attribute__((visibility("default"))) void* hp_sim_cuda_add_call(const char* name) {
  return new (std::nothrow) CallSite(name);
}

extern "C" __attribute__((visibility("default"))) int hp_sim_cuda_begin_call(void* call) {
  if (!call) return Codes::of(Result::OutOfMemory);
  return serve<Codes>(*static_cast<CallSite*>(call), [](Simulator&) { return Result::Ok; });
}
