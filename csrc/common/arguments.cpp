// SPDX-License-Identifier: BSD-3-Clause

#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace fastclip {

[[noreturn]] void fail(const char* op, const std::string& message) {
  throw std::runtime_error(std::string("fastclip::") + op + ": " + message);
}

Groups::Groups(const std::vector<int64_t>& groups, int64_t num_grads, const char* op) : groups_(groups) {
  if (groups.empty()) return;
  if (static_cast<int64_t>(groups.size()) != num_grads) {
    fail(op, "expected groups to have one entry per gradient (" + std::to_string(num_grads) + "), but got " +
                 std::to_string(groups.size()));
  }
  for (int64_t group : groups) {
    if (group < 0 || group >= num_grads) {
      fail(op, "expected groups to be numbers from 0 to " + std::to_string(num_grads - 1) + ", but got " +
                   std::to_string(group));
    }
    count_ = std::max(count_, group + 1);
  }
  sorted_ = std::is_sorted(groups.begin(), groups.end());
}

Norm parse_norm(double norm_type, const char* op) {
  if (norm_type == 2) return kNorm2;
  if (norm_type == 1) return kNorm1;
  if (norm_type == std::numeric_limits<double>::infinity()) return kNormInf;
  fail(op, "expected norm_type to be 1, 2 or inf, but got " + std::to_string(norm_type));
}

NonFinite parse_nonfinite(const std::string& mode, const char* op) {
  if (mode == "propagate") return NonFinite::kPropagate;
  if (mode == "zero") return NonFinite::kZero;
  if (mode == "skip") return NonFinite::kSkip;
  fail(op, "expected nonfinite to be 'propagate', 'zero' or 'skip', but got '" + mode + "'");
}

void require_limit(double limit, const char* op) {
  if (std::isnan(limit)) fail(op, "expected limit to be a number, but got NaN");
}

void require_count(int64_t numel, int64_t count, const char* op, const char* name) {
  if (numel == 1 || numel == count) return;
  const std::string expected = count == 1 ? "1 element" : "1 or " + std::to_string(count) + " elements";
  fail(op, std::string("expected ") + name + " to have " + expected + ", but got " + std::to_string(numel));
}

}  // namespace fastclip
