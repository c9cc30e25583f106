// SPDX-License-Identifier: BSD-3-Clause
// Lists of gradients in raw memory, and the naive arithmetic that gives their expected results.

#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/cuda/elements.cuh"
#include "../../../csrc/cuda/launch.h"

using namespace fastclip;
using namespace fastclip::cuda;

inline double decode(const char* p, DType dtype) {
  if (dtype == kFloat64) return *reinterpret_cast<const double*>(p);
  if (dtype == kFloat32) return *reinterpret_cast<const float*>(p);
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(p);
  return dtype == kBFloat16 ? BFloat16::from(bits) : Float16::from(bits);
}

inline void encode(char* p, DType dtype, double x) {
  if (dtype == kFloat64) {
    *reinterpret_cast<double*>(p) = x;
  } else if (dtype == kFloat32) {
    *reinterpret_cast<float*>(p) = static_cast<float>(x);
  } else {
    const float narrow = static_cast<float>(x);
    *reinterpret_cast<uint16_t*>(p) = dtype == kBFloat16 ? BFloat16::to(narrow) : Float16::to(narrow);
  }
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// A gradient that begins `offset` elements into aligned memory. Its allocation ends with its last element, so
// that AddressSanitizer reports reads beyond it; the margin before it must not change.
class Grad {
 public:
  Grad(DType dtype, size_t numel, size_t offset = 0)
      : dtype(dtype), numel(numel), offset_(offset), memory_((numel + offset) * item_size(dtype), 0x5a) {}

  DType dtype;
  size_t numel;
  uint32_t group = 0;

  char* data() { return memory_.data() + offset_ * item_size(dtype); }
  double get(size_t i) const { return decode(memory_.data() + (offset_ + i) * item_size(dtype), dtype); }
  void set(size_t i, double x) { encode(data() + i * item_size(dtype), dtype, x); }
  bool margin_is_intact() const {
    for (size_t i = 0; i < offset_ * item_size(dtype); ++i) {
      if (memory_[i] != 0x5a) return false;
    }
    return true;
  }
  // Compares values; any NaN equals any other, as its bits depend on the processor.
  bool equals(const Grad& other) const {
    for (size_t i = 0; i < numel; ++i) {
      const double x = get(i), y = other.get(i);
      if (!(x == y || (std::isnan(x) && std::isnan(y)))) return false;
    }
    return numel == other.numel;
  }
  bool operator==(const Grad& other) const { return memory_ == other.memory_; }

 private:
  size_t offset_;
  std::vector<char> memory_;
};

class List {
 public:
  static List normal(DType dtype, const std::vector<size_t>& sizes, size_t offset = 0) {
    List list;
    for (size_t size : sizes) list.add(dtype, size, offset);
    return list;
  }

  // Adds a gradient of normally distributed elements.
  Grad& add(DType dtype, size_t numel, size_t offset = 0) {
    static std::mt19937 random(7);
    std::normal_distribution<double> distribution;
    grads_.emplace_back(dtype, numel, offset);
    for (size_t i = 0; i < numel; ++i) grads_.back().set(i, distribution(random));
    return grads_.back();
  }
  Grad& fill(DType dtype, size_t numel, double value) {
    grads_.emplace_back(dtype, numel);
    for (size_t i = 0; i < numel; ++i) grads_.back().set(i, value);
    return grads_.back();
  }

  size_t size() const { return grads_.size(); }
  const Grad& operator[](size_t i) const { return grads_[i]; }
  Grad& operator[](size_t i) { return grads_[i]; }
  bool operator==(const List& other) const { return grads_ == other.grads_; }

  std::vector<Item> items() {
    std::vector<Item> items;
    for (Grad& grad : grads_) {
      items.push_back({grad.data(), static_cast<int64_t>(grad.numel), grad.dtype, grad.group, 0});
    }
    return items;
  }
  uint32_t num_groups() const {
    uint32_t most = 0;
    for (const Grad& grad : grads_) most = std::max(most, grad.group);
    return most + 1;
  }
  bool groups_sorted() const {
    for (size_t i = 1; i < grads_.size(); ++i) {
      if (grads_[i - 1].group > grads_[i].group) return false;
    }
    return true;
  }
  bool margins_are_intact() const {
    for (const Grad& grad : grads_) {
      if (!grad.margin_is_intact()) return false;
    }
    return true;
  }

 private:
  std::vector<Grad> grads_;
};

struct Naive {
  double value = 0;
  double nan_count = 0;
  double inf_count = 0;
};

inline Naive naive(const Grad& grad, Norm norm, bool finite_only) {
  Naive result;
  for (size_t i = 0; i < grad.numel; ++i) {
    const double x = std::fabs(grad.get(i));
    result.nan_count += std::isnan(x);
    result.inf_count += std::isinf(x);
    if (!std::isfinite(x)) continue;
    result.value =
        norm == kNormInf ? std::fmax(result.value, x) : result.value + (norm == kNorm2 ? x * x : x);
  }
  if (!finite_only && result.inf_count > 0) result.value = INFINITY;
  if (!finite_only && result.nan_count > 0) result.value = NAN;
  return result;
}

// float32 and narrower elements are multiplied in float32.
inline Grad scaled(Grad grad, double factor, bool zero_nonfinite) {
  for (size_t i = 0; i < grad.numel; ++i) {
    const double x = grad.get(i);
    const bool zero = zero_nonfinite && !std::isfinite(x);
    const float narrow = static_cast<float>(x) * static_cast<float>(factor);
    grad.set(i, zero ? 0 : grad.dtype == kFloat64 ? x * factor : narrow);
  }
  return grad;
}

inline Grad clamped_to(Grad grad, double limit) {
  for (size_t i = 0; i < grad.numel; ++i) {
    const double x = grad.get(i);
    if (std::fabs(x) > limit) grad.set(i, x > 0 ? limit : -limit);
  }
  return grad;
}

// Covers the edges of vectors, chunks, segments and launches in each dtype, all dtypes together, and special
// values. `quick` returns only the lists that the slowest builds can run.
std::vector<std::pair<std::string, List>> all_lists(bool quick);
