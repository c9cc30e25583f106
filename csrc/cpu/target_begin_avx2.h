// SPDX-License-Identifier: BSD-3-Clause
// Compiles the functions that follow for avx2, until target_end.h. Has no include guard on purpose.

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
