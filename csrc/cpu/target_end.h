// SPDX-License-Identifier: BSD-3-Clause
// Ends what a target_begin header began. No include guard on purpose.

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
