// SPDX-License-Identifier: BSD-3-Clause
// Which instruction set the loops run on.

#pragma once

#include "loops.h"

namespace fastclip {

// The widest the CPU has, or the one that FASTCLIP_CPU_CAPABILITY names (baseline, avx2, avx512). Throws
// std::runtime_error for a name that is unknown or that this CPU lacks.
const Loops& select_loops();

}  // namespace fastclip
