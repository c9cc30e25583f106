// SPDX-License-Identifier: BSD-3-Clause
// The loops that write: scaling and limiting. Part of loops_body.h, inside its namespaces.

// Replaces the kLanes elements at q by change(x), register by register.
template <class Type, class Change>
inline void update_registers(typename Type::Element* q, Change change) {
#pragma GCC unroll 8
  for (int r = 0; r < kRegisters; r += 2) {
    typename Type::Element* low = q + r * Isa::kFloats;
    typename Type::Element* high = low + Isa::kFloats;
    const Floats changed_low = change(Type::load(low)), changed_high = change(Type::load(high));
    Type::store(low, changed_low, changed_high);
  }
}

template <class Type>
void scale(void* data, int64_t size, double factor, bool zero_nonfinite) {
  using Element = typename Type::Element;
  // A NaN factor becomes the default NaN: another payload could be rounded to -0 in bfloat16.
  const float quiet = factor == factor ? static_cast<float>(factor) : __builtin_nanf("");
  const Floats c = broadcast<Floats>(quiet);
  const auto multiply = [&](Floats x) { return x * c; };
  // A select, never a multiplication by 0: 0 * inf is NaN.
  const auto select = [&](Floats x) { return (Floats)((Ints)(x * c) & (((Ints)x & kAbs32) < kInf32)); };
  update_each_group(static_cast<Element*>(data), size, [&](Element* q) {
    zero_nonfinite ? update_registers<Type>(q, select) : update_registers<Type>(q, multiply);
  });
}

void scale_float64(void* data, int64_t size, double factor, bool zero_nonfinite) {
  const Doubles c = broadcast<Doubles>(factor);
  update_each_group(static_cast<double*>(data), size, [&](double* q) {
#pragma GCC unroll 16
    for (int r = 0; r < kDoubleRegisters; ++r) {
      const Doubles x = load_vector<Doubles>(q + r * kDoubles);
      const Longs keep = zero_nonfinite ? ((Longs)x & kAbs64) < kInf64 : broadcast<Longs>(int64_t{-1});
      store_vector(q + r * kDoubles, (Doubles)((Longs)(x * c) & keep));
    }
  });
}

constexpr int64_t kBlock = 1024;

// Writes only blocks with an element outside the limit, so that gradients within it cost a single read.
// NaN compares false both ways and stays.
template <class Type>
void clamp(void* data, int64_t size, double limit) {
  using Element = typename Type::Element;
  // torch compares with the limit rounded to the elements' dtype.
  Element rounded[kLanes];
  const Floats exact = broadcast<Floats>(static_cast<float>(limit));
  Type::store(rounded, exact, exact);
  const Floats high = Type::load(rounded), low = -high;
  for (int64_t start = 0; start < size; start += kBlock) {
    Element* block = static_cast<Element*>(data) + start;
    const int64_t length = size - start < kBlock ? size - start : kBlock;
    // The zeros that pad the last group are outside a negative limit; the block is then written needlessly.
    Ints outside = {};
    for_each_group(block, length, [&](const Element* q) {
#pragma GCC unroll 8
      for (int r = 0; r < kRegisters; ++r) {
        const Floats x = Type::load(q + r * Isa::kFloats);
        outside |= (x < low) | (x > high);
      }
    });
    if (sum_elements(outside) == 0) continue;
    update_each_group(block, length, [&](Element* q) {
      update_registers<Type>(q, [&](Floats x) {
        const Floats raised = x < low ? low : x;
        return raised > high ? high : raised;
      });
    });
  }
}

void clamp_float64(void* data, int64_t size, double limit) {
  const Doubles high = broadcast<Doubles>(limit), low = -high;
  update_each_group(static_cast<double*>(data), size, [&](double* q) {
    for (int r = 0; r < kDoubleRegisters; ++r) {
      const Doubles x = load_vector<Doubles>(q + r * kDoubles);
      const Doubles raised = x < low ? low : x;
      store_vector(q + r * kDoubles, raised > high ? high : raised);
    }
  });
}
