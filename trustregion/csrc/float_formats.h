// bfloat16 and float16 as their bits, so that loops over them are plain integer loops, which compilers vectorize.
#pragma once

#include "elementary.h"

namespace trustregion {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// What a format is computed in.
template <class X>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class X>
using Compute = typename ComputeOf<X>::type;

namespace {

TR_FUNCTION float widen(BFloat16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
TR_FUNCTION float widen(Float16 x) {
  // The exponent's bias differs by 112, for subnormals too; all ones stay all ones.
  const float magnitude = bits_as<float>((x.bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x1p16f ? 0x7f800000u : 0u;
  return bits_as<float>(bits_as<uint32_t>(magnitude) | special | (x.bits & 0x8000u) << 16);
}
TR_FUNCTION float widen(float x) { return x; }
TR_FUNCTION double widen(double x) { return x; }

// Round to nearest, ties to even.
TR_FUNCTION void narrow(float x, BFloat16* y) {
  const uint32_t bits = bits_as<uint32_t>(x);
  y->bits = x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
TR_FUNCTION void narrow(float x, Float16* y) {
  // A float so large that its last place is float16's makes the sum round; the first product overflows where float16 does.
  const uint32_t bits = bits_as<uint32_t>(x), exponent = bits & 0x7f800000u;
  const uint32_t at_least = exponent < 0x38800000u ? 0x38800000u : exponent;  // 2^-14: below it, float16 is subnormal
  const float scaled = bits_as<float>(bits & 0x7fffffffu) * 0x1p112f * 0x1p-110f;
  const uint32_t rounded = bits_as<uint32_t>(bits_as<float>(at_least + 0x07800000u) + scaled);
  const uint32_t magnitude = (rounded >> 13 & 0x7c00u) + (rounded & 0x0fffu);
  y->bits = (x != x ? 0x7e00u : magnitude) | (bits >> 16 & 0x8000u);
}
TR_FUNCTION void narrow(float x, float* y) { *y = x; }
TR_FUNCTION void narrow(double x, double* y) { *y = x; }

}  // namespace
}  // namespace trustregion
