// Choice of the instruction set that runs the kernels: made once from cpuid, or forced by HARDPOINT_CPU_ISA.
#pragma once
#include <string>
#include <vector>

namespace hp {

// Ordered: every level includes the ones before it.
enum class Isa : int { Baseline = 0, Avx2 = 1, Avx512 = 2, Avx512Vnni = 3, Avx512Bf16 = 4, Amx = 5 };

const char* isa_name(Isa isa);

// Levels compiled into this module, lowest first.
std::vector<Isa> compiled_isas();

// Levels that are both compiled into this module and supported by this processor, lowest first; never empty. AMX counts where the
// system lets this process use the tile registers, which the first call asks for.
std::vector<Isa> available_isas();

// The level in use: HARDPOINT_CPU_ISA (baseline, avx2, avx512, avx512vnni, avx512bf16, amx), else the fastest available one: the highest,
// but avx512vnni rather than avx512bf16 where the BF16 dot product is slow.
// Throws std::invalid_argument when the variable names a level that is unknown or not available here.
Isa active_isa();

// Whether this processor's BF16 dot product does fewer multiply-adds in a cycle than those in fp32 do: Intel's. There few rows take it at the
// level avx512vnni too, with the bits of the others (gemm.hpp).
bool has_slow_bf16_dot();

// Changes the level for the whole process; takes effect with the next kernel call. Throws as active_isa does.
void set_isa(const std::string& name);

// A kernel family is compiled once per level that it gains by (isa.cmake), and offers one function of each name in the namespace of the level.
// HP_DECLARE_PER_ISA(const Kernels&, kernels) declares them; those that are not compiled are null (weak symbols that nothing defines).
// HP_KERNELS(kernels) calls that of the active level or, without one, of the highest level below it. A level's own code (which has HP_ISA) asks
// no table: it names the level whose kernels it calls, and the module cannot be imported where nothing defines them.
#ifdef HP_ISA
#define HP_OPTIONAL
#else
#define HP_OPTIONAL [[gnu::weak]]
#endif
#define HP_DECLARE_PER_ISA(result, function) \
  namespace hp::baseline { result function(); } \
  namespace hp::avx2 { HP_OPTIONAL result function(); } \
  namespace hp::avx512 { HP_OPTIONAL result function(); } \
  namespace hp::avx512vnni { HP_OPTIONAL result function(); } \
  namespace hp::avx512bf16 { HP_OPTIONAL result function(); } \
  namespace hp::amx { HP_OPTIONAL result function(); }

#define HP_PER_ISA(function) \
  { &::hp::baseline::function, &::hp::avx2::function, &::hp::avx512::function, &::hp::avx512vnni::function, &::hp::avx512bf16::function, \
    &::hp::amx::function }

#define HP_KERNELS_AT(level, function)                  \
  ([](::hp::Isa isa) -> decltype(auto) {                \
    static constexpr decltype(&::hp::baseline::function) compiled[] = HP_PER_ISA(function); \
    int best = static_cast<int>(isa);                   \
    while (!compiled[best]) --best;                     \
    return compiled[best]();                            \
  }(level))
#define HP_KERNELS(function) HP_KERNELS_AT(::hp::active_isa(), function)

}  // namespace hp
