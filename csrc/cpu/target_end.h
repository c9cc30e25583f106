// SPDX-License-Identifier: BSD-3-Clause
// Ends the region of a target_begin header. Has no include guard on purpose.

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
