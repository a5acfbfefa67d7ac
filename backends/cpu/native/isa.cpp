#include "isa.hpp"

#include "block_gemm.hpp"
#include "gemm.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hp {
namespace {

constexpr Isa kAll[] = {Isa::Baseline, Isa::Avx2, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16, Isa::Amx};
constexpr int kUnset = -1;
std::atomic<int> g_active{kUnset};

// Linux gives the tile registers, 8 KiB more of state for each thread that uses them, to processes that ask (since 5.16). The answer
// is for all threads and the children to come.
bool amx_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = [] {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (~edx & (kAmxBf16 | kAmxTile | kAmxInt8))) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return permitted;
#else
  return false;
#endif
}

// Each level has products of its own, of plain weights or of weights in blocks.
bool compiled(Isa isa) {
  static constexpr decltype(&baseline::linear_kernels) plain[] = HP_PER_ISA(linear_kernels);
  static constexpr decltype(&baseline::block_kernels) in_blocks[] = HP_PER_ISA(block_kernels);
  return plain[static_cast<int>(isa)] || in_blocks[static_cast<int>(isa)];
}

bool supported(Isa isa) {
  if (!compiled(isa)) return false;
  if (isa == Isa::Baseline) return true;
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == Isa::Avx2) return avx2;
  if (isa == Isa::Avx512) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (isa == Isa::Avx512Vnni) return vnni;
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  return isa == Isa::Amx ? bf16 && amx_permitted() : bf16;
#else
  return false;
#endif
}

Isa fastest() {
  const Isa best = available_isas().back();
  return best == Isa::Avx512Bf16 && has_slow_bf16_dot() ? Isa::Avx512Vnni : best;
}

Isa parse(const std::string& name, const char* source) {
  std::string known, available;
  for (Isa isa : kAll) {
    known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
    if (supported(isa)) available += std::string(available.empty() ? "" : ", ") + isa_name(isa);
  }
  for (Isa isa : kAll) {
    if (name != isa_name(isa)) continue;
    if (supported(isa)) return isa;
    throw std::invalid_argument(std::string(source) + " asks for instruction set '" + name +
                                "', which this build or processor does not have; available: " + available);
  }
  throw std::invalid_argument(std::string(source) + " asks for unknown instruction set '" + name + "'; known: " + known +
                              "; available here: " + available);
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::Amx: return "amx";
    case Isa::Avx512Bf16: return "avx512bf16";
    case Isa::Avx512Vnni: return "avx512vnni";
    case Isa::Avx512: return "avx512";
    case Isa::Avx2: return "avx2";
    default: return "baseline";
  }
}

std::vector<Isa> compiled_isas() {
  std::vector<Isa> found;
  std::copy_if(std::begin(kAll), std::end(kAll), std::back_inserter(found), compiled);
  return found;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  std::copy_if(std::begin(kAll), std::end(kAll), std::back_inserter(found), supported);
  return found;
}

Isa active_isa() {
  int current = g_active.load(std::memory_order_relaxed);
  if (current == kUnset) {
    const char* forced = std::getenv("HARDPOINT_CPU_ISA");
    current = static_cast<int>(forced && *forced ? parse(forced, "HARDPOINT_CPU_ISA") : fastest());
    int expected = kUnset;
    if (!g_active.compare_exchange_strong(expected, current)) current = expected;
  }
  return static_cast<Isa>(current);
}

// A BF16 dot product of 512 bits takes Golden Cove, the core of Intel's processors that have it with VNNI, two cycles, in which it does
// twice as many multiply-adds in fp32 (measured: 1.5 and 6 instructions per nanosecond). AMD's cores do one or two per cycle.
bool has_slow_bf16_dot() {
#ifdef __x86_64__
  static const bool slow = supported(Isa::Avx512Bf16) && __builtin_cpu_is("intel");
  return slow;
#else
  return false;
#endif
}

void set_isa(const std::string& name) { g_active.store(static_cast<int>(parse(name, "set_isa"))); }

}  // namespace hp
