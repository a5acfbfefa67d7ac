/* What the simulated driver offers to the simulated runtime over it, besides the driver's own functions. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* Make a function known to counting and fault injection. The name must stay valid; to be called while the library is loaded. */
void* hp_sim_cuda_add_call(const char* name);

/* Count a call of it: 0, or the code that it is to fail with. */
int hp_sim_cuda_begin_call(void* call);

#ifdef __cplusplus
}
#endif
