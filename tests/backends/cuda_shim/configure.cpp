// SPDX-License-Identifier: BSD-3-Clause
// Lets Python change the settings.

#include "scheduler.h"

extern "C" __attribute__((visibility("default"))) void fastclip_shim_configure(int blocks, unsigned seed) {
  fastclip_shim::settings() = {blocks, seed};
}
