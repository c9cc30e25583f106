// SPDX-License-Identifier: BSD-3-Clause
// The loops that read: sums of powers, maxima and counts. Part of loops_body.h, inside its namespaces.

// Writes the result of an exact pass: `finite_value`, or Inf or NaN if one was counted and finite_only is
// false.
inline void write_result(double finite_value, int64_t nans, int64_t infs, bool finite_only,
                         PartialStats* out) {
  double value = finite_value;
  if (!finite_only && infs > 0) value = double_from_bits(kInf64);
  if (!finite_only && nans > 0) value = double_from_bits(kInf64 | 1LL << 51);
  *out = {value, nans, infs};
}

template <Norm norm>
inline Doubles add_power(Doubles sum, Doubles x) {
  if (norm == kNorm2) return sum + x * x;
  const Doubles magnitude = (Doubles)((Longs)x & kAbs64);
  if (norm == kNorm1) return sum + magnitude;
  return magnitude > sum ? magnitude : sum;
}

// Reads a run again whose fast sum is not reliable: counts NaN and Inf, and sums in float64.
template <class Type, Norm norm>
void reduce_exact(const typename Type::Element* p, int64_t size, bool finite_only, PartialStats* out) {
  Lanes lanes;
  Ints nans = {}, infs = {};  // a run is far shorter than 2^31 elements
  for_each_group(p, size, [&](const typename Type::Element* q) {
#pragma GCC unroll 8
    for (int r = 0; r < kRegisters; ++r) {
      const Floats x = Type::load(q + r * Isa::kFloats);
      const Ints magnitude = (Ints)x & kAbs32;
      nans -= magnitude > kInf32;
      infs -= magnitude == kInf32;
      const Floats finite = magnitude < kInf32 ? x : Floats{};
      Doubles& low = lanes.lane[2 * r];
      Doubles& high = lanes.lane[2 * r + 1];
      low = add_power<norm>(low, Isa::widen_low(finite));
      high = add_power<norm>(high, Isa::widen_high(finite));
    }
  });
  const double value = norm == kNormInf ? lanes.max() : lanes.sum();
  write_result(value, sum_elements(nans), sum_elements(infs), finite_only, out);
}

// p = 1 and 2, for the dtypes computed in float32.
template <class Type, Norm norm>
void reduce_sum(const void* data, int64_t size, bool finite_only, PartialStats* out) {
  using Element = typename Type::Element;
  const Element* p = static_cast<const Element*>(data);
  Lanes lanes;
  Ints seen[kRegisters] = {};  // OR of all bits: distinguishes zeros from values whose squares underflowed
  for (int64_t start = 0; start < size; start += kFlush<norm>) {
    Floats sum[kRegisters] = {};
    const int64_t length = size - start < kFlush<norm> ? size - start : kFlush<norm>;
    for_each_group(p + start, length, [&](const Element* q) {
#pragma GCC unroll 8
      for (int r = 0; r < kRegisters; ++r) {
        const Floats x = Type::load(q + r * Isa::kFloats);
        sum[r] += norm == kNorm2 ? x * x : (Floats)((Ints)x & kAbs32);
        seen[r] |= (Ints)x;
      }
    });
#pragma GCC unroll 8
    for (int r = 0; r < kRegisters; ++r) lanes.add(r, sum[r]);
  }
  const double total = lanes.sum();
  Ints any = {};
  for (int r = 0; r < kRegisters; ++r) any |= seen[r] & kAbs32;
  const bool tiny = norm == kNorm2 && total < kTinySum && sum_elements(any) != 0;
  if (tiny || !(total < double_from_bits(kInf64))) {
    reduce_exact<Type, norm>(p, size, finite_only, out);
  } else {
    *out = {total, 0, 0};
  }
}

// p = inf: magnitudes are compared by their bits, which order NaN above Inf and Inf above every number.
template <class Type, class Bits, class Lane>
void reduce_max(const void* data, int64_t size, bool finite_only, PartialStats* out) {
  using Element = typename Type::Element;
  constexpr int kWidth = sizeof(Bits) / sizeof(Element);
  constexpr int kSteps = kLanes / kWidth;
  const Element* p = static_cast<const Element*>(data);
  const Bits abs_mask = broadcast<Bits>(static_cast<Lane>(kAbs32 >> 8 * (sizeof(float) - sizeof(Lane))));
  Bits largest = {};
  for_each_group(p, size, [&](const Element* q) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      const Bits magnitude = load_vector<Bits>(q + s * kWidth) & abs_mask;
      largest = magnitude > largest ? magnitude : largest;
    }
  });
  Element top[kLanes] = {};
  __builtin_memcpy(top, &largest, sizeof largest);
  // Over at most kLanes elements the exact pass costs nothing.
  reduce_exact<Type, kNormInf>(top, kWidth, finite_only, out);
  if (out->nan_count + out->inf_count > 0) reduce_exact<Type, kNormInf>(p, size, finite_only, out);
}

template <Norm norm>
void reduce_float64_exact(const double* p, int64_t size, bool finite_only, PartialStats* out) {
  Lanes lanes;
  Longs nans = {}, infs = {};
  for_each_group(p, size, [&](const double* q) {
    for (int r = 0; r < kDoubleRegisters; ++r) {
      const Doubles x = load_vector<Doubles>(q + r * kDoubles);
      const Longs magnitude = (Longs)x & kAbs64;
      nans -= magnitude > kInf64;
      infs -= magnitude == kInf64;
      lanes.lane[r] = add_power<norm>(lanes.lane[r], magnitude < kInf64 ? x : Doubles{});
    }
  });
  const double value = norm == kNormInf ? lanes.max() : lanes.sum();
  write_result(value, sum_elements(nans), sum_elements(infs), finite_only, out);
}

template <Norm norm>
void reduce_float64(const void* data, int64_t size, bool finite_only, PartialStats* out) {
  const double* p = static_cast<const double*>(data);
  Lanes lanes;
  Longs largest = {};
  for_each_group(p, size, [&](const double* q) {
#pragma GCC unroll 16
    for (int r = 0; r < kDoubleRegisters; ++r) {
      const Doubles x = load_vector<Doubles>(q + r * kDoubles);
      if (norm == kNormInf) {
        const Longs magnitude = (Longs)x & kAbs64;
        largest = magnitude > largest ? magnitude : largest;
      } else {
        lanes.lane[r] = add_power<norm>(lanes.lane[r], x);
      }
    }
  });
  if (norm == kNormInf) lanes.lane[0] = (Doubles)largest;
  bool finite = true;
  if (norm == kNormInf) {
    for (int i = 0; i < kDoubles; ++i) finite = finite && largest[i] < kInf64;
  } else {
    finite = lanes.sum() < double_from_bits(kInf64);
  }
  if (finite) {
    *out = {norm == kNormInf ? lanes.max() : lanes.sum(), 0, 0};
  } else {
    reduce_float64_exact<norm>(p, size, finite_only, out);
  }
}
