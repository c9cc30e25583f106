// SPDX-License-Identifier: BSD-3-Clause
// The arguments of an op that are not tensors, checked.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace fastclip {

// Ends the call with a message that holds no build path, unlike that of STD_TORCH_CHECK.
[[noreturn]] void fail(const char* op, const std::string& message);

// Which group each gradient belongs to.
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

}  // namespace fastclip
