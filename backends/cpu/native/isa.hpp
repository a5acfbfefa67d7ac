// Choice of the instruction set that runs the kernels: made once from cpuid, or forced by HARDPOINT_CPU_ISA.
#pragma once
#include <string>
#include <vector>

namespace hp {

// Ordered: every level includes the ones before it.
enum class Isa : int { Baseline = 0, Avx2 = 1, Avx512 = 2, Avx512Vnni = 3, Avx512Bf16 = 4, Amx = 5 };

const char* isa_name(Isa isa);

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

// A kernel family is compiled once per level (isa.cmake) and offers one function per level, in the namespace of the level:
// HP_DECLARE_PER_ISA(const Kernels& kernels()) declares them, HP_DISPATCH(kernels) calls the active one.
// AMX has kernels of its own for the families that gain by it (HP_AMX_FAMILIES in isa.cmake) and runs those of avx512bf16 for the
// others. A family of the first kind uses the two macros whose names end in _AND_AMX. Weights in blocks gain by AVX512-VNNI and not by
// AVX512-BF16, which runs their kernels for avx512vnni: they use the two macros that end in _WITH_VNNI. All others run those of avx512 at
// the level avx512vnni.
#ifdef HP_HAVE_X86_ISAS
#define HP_DISPATCH_LEVELS(function, vnni_level, bf16_level, amx_level) \
  ([]() -> decltype(auto) {                                             \
    switch (::hp::active_isa()) {                                       \
      case ::hp::Isa::Amx: return ::hp::amx_level::function();          \
      case ::hp::Isa::Avx512Bf16: return ::hp::bf16_level::function();  \
      case ::hp::Isa::Avx512Vnni: return ::hp::vnni_level::function();  \
      case ::hp::Isa::Avx512: return ::hp::avx512::function();          \
      case ::hp::Isa::Avx2: return ::hp::avx2::function();              \
      default: return ::hp::baseline::function();                       \
    }                                                                   \
  }())
#define HP_DISPATCH(function) HP_DISPATCH_LEVELS(function, avx512, avx512bf16, avx512bf16)
#define HP_DECLARE_UP_TO_AVX512(declaration) \
  namespace hp::baseline { declaration; } \
  namespace hp::avx2 { declaration; } \
  namespace hp::avx512 { declaration; }
#define HP_DECLARE_PER_ISA(declaration) \
  HP_DECLARE_UP_TO_AVX512(declaration) \
  namespace hp::avx512bf16 { declaration; }
#else
#define HP_DISPATCH(function) (::hp::baseline::function())
#define HP_DECLARE_PER_ISA(declaration) \
  namespace hp::baseline { declaration; }
#endif

#ifdef HP_HAVE_AMX
#define HP_DISPATCH_AND_AMX(function) HP_DISPATCH_LEVELS(function, avx512, avx512bf16, amx)
#define HP_DECLARE_PER_ISA_AND_AMX(declaration) \
  HP_DECLARE_PER_ISA(declaration) \
  namespace hp::amx { declaration; }
#else
#define HP_DISPATCH_AND_AMX(function) HP_DISPATCH(function)
#define HP_DECLARE_PER_ISA_AND_AMX(declaration) HP_DECLARE_PER_ISA(declaration)
#endif

#if defined(HP_HAVE_AMX)
#define HP_DISPATCH_WITH_VNNI(function) HP_DISPATCH_LEVELS(function, avx512vnni, avx512vnni, amx)
#define HP_DECLARE_PER_ISA_WITH_VNNI(declaration) \
  HP_DECLARE_UP_TO_AVX512(declaration) \
  namespace hp::avx512vnni { declaration; } \
  namespace hp::amx { declaration; }
#elif defined(HP_HAVE_X86_ISAS)
#define HP_DISPATCH_WITH_VNNI(function) HP_DISPATCH_LEVELS(function, avx512vnni, avx512vnni, avx512vnni)
#define HP_DECLARE_PER_ISA_WITH_VNNI(declaration) \
  HP_DECLARE_UP_TO_AVX512(declaration) \
  namespace hp::avx512vnni { declaration; }
#else
#define HP_DISPATCH_WITH_VNNI(function) HP_DISPATCH(function)
#define HP_DECLARE_PER_ISA_WITH_VNNI(declaration) HP_DECLARE_PER_ISA(declaration)
#endif

}  // namespace hp
