// SPDX-License-Identifier: BSD-3-Clause
// The choice of the instruction set that the loops run on.

#pragma once

#include "loops.h"

namespace fastclip {

// Returns the loops for the widest instruction set of the CPU, or for the one that FASTCLIP_CPU_CAPABILITY
// names (baseline, avx2, avx512). Throws std::runtime_error if that name is unknown or unsupported by this
// CPU.
const Loops& select_loops();

}  // namespace fastclip
