// SPDX-License-Identifier: BSD-3-Clause

#include "capability.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastclip {
namespace {

#if defined(__x86_64__)
// Some compilers' __builtin_cpu_supports does not know this feature.
bool has_f16c() {
  unsigned int eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

// Ordered from the narrowest to the widest.
std::vector<const Loops*> usable_loops() {
  std::vector<const Loops*> usable{&kBaselineLoops};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (avx2) usable.push_back(&kAvx2Loops);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    usable.push_back(&kAvx512Loops);
  }
#endif
  return usable;
}

}  // namespace

const Loops& select_loops() {
  static const std::vector<const Loops*> usable = usable_loops();
  const char* named = std::getenv("FASTCLIP_CPU_CAPABILITY");
  if (!named || !*named) return *usable.back();
  std::string names;
  for (const Loops* loops : usable) {
    if (named == std::string(loops->name)) return *loops;
    names += (names.empty() ? "" : ", ") + std::string(loops->name);
  }
  throw std::runtime_error(
      "FASTCLIP_CPU_CAPABILITY: expected one of the instruction sets of this CPU and build (" + names +
      "), but got '" + named + "'");
}

}  // namespace fastclip

namespace {
std::string cpu_capability() { return fastclip::select_loops().name; }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastclip, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
}
