// Tensors as kernels read them: numbers of any type, converted one by one.
#pragma once

#include "elementary.h"

namespace trustregion {

enum class Dtype : int { float32, float64, bfloat16, float16, uint8, int32, int64 };

// Numbers in memory, or none. Each one stands for `repeat` tokens in a row.
struct Column {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t repeat = 1;
};

struct TokenColumns {
  Column log_prob, log_prob_old, advantages, mask, weights, entropy, entropy_old;
};

namespace {

TR_FUNCTION float bfloat16_to_float(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }

TR_FUNCTION float float16_to_float(uint16_t half) {
  // Shifted into place its exponent is too small by 112; a number below 2^-14 is normalized by a subtraction.
  uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  bool infinite_or_nan = (half & 0x7c00u) == 0x7c00u, subnormal = (half & 0x7c00u) == 0;
  float normal = bits_as<float>(magnitude + (infinite_or_nan ? 224u << 23 : 112u << 23));
  float small = bits_as<float>(magnitude + (113u << 23)) - bits_as<float>(113u << 23);
  return bits_as<float>(bits_as<uint32_t>(subnormal ? small : normal) | sign);
}

// Calls with a function of an index, for the type of the numbers. Integers count as 0 or 1.
template <class T, class Function>
TR_FUNCTION void with_reader(const Column& column, Function function) {
  const void* data = column.data;
  switch (column.dtype) {
    case Dtype::float32: return function([=](int64_t i) { return T(static_cast<const float*>(data)[i]); });
    case Dtype::float64: return function([=](int64_t i) { return T(static_cast<const double*>(data)[i]); });
    case Dtype::bfloat16:
      return function([=](int64_t i) { return T(bfloat16_to_float(static_cast<const uint16_t*>(data)[i])); });
    case Dtype::float16:
      return function([=](int64_t i) { return T(float16_to_float(static_cast<const uint16_t*>(data)[i])); });
    case Dtype::uint8: return function([=](int64_t i) { return T(static_cast<const uint8_t*>(data)[i] != 0); });
    case Dtype::int32: return function([=](int64_t i) { return T(static_cast<const int32_t*>(data)[i] != 0); });
    case Dtype::int64: return function([=](int64_t i) { return T(static_cast<const int64_t*>(data)[i] != 0); });
  }
}

}  // namespace
}  // namespace trustregion
