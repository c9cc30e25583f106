// SPDX-License-Identifier: BSD-3-Clause
// Checks of an op's arguments other than the gradients. All of them throw std::runtime_error.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace fastclip {

// Throws std::runtime_error with a message that, unlike that of STD_TORCH_CHECK, holds no build path.
[[noreturn]] void fail(const char* op, const std::string& message);

// The group of each gradient. An empty list means that all gradients form one group.
class Groups {
 public:
  Groups(const std::vector<int64_t>& groups, int64_t num_grads, const char* op);
  int64_t count() const { return count_; }
  int64_t of(int64_t grad) const { return groups_.empty() ? 0 : groups_[grad]; }
  bool sorted() const { return sorted_; }

 private:
  const std::vector<int64_t>& groups_;
  int64_t count_ = 1;
  bool sorted_ = true;
};

Norm parse_norm(double norm_type, const char* op);
NonFinite parse_nonfinite(const std::string& mode, const char* op);
void require_limit(double limit, const char* op);

// Requires a tensor argument to have 1 or `count` elements.
void require_count(int64_t numel, int64_t count, const char* op, const char* name);

}  // namespace fastclip
