// Tensors as kernels read them: numbers of any type, converted one by one.
#pragma once

#include "float_formats.h"

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

// Calls with a function of an index, for the type of the numbers. Integers count as 0 or 1.
template <class T, class Function>
TR_FUNCTION void with_reader(const Column& column, Function function) {
  const void* data = column.data;
  switch (column.dtype) {
    case Dtype::float32: return function([=](int64_t i) { return T(static_cast<const float*>(data)[i]); });
    case Dtype::float64: return function([=](int64_t i) { return T(static_cast<const double*>(data)[i]); });
    case Dtype::bfloat16: return function([=](int64_t i) { return T(widen(static_cast<const BFloat16*>(data)[i])); });
    case Dtype::float16: return function([=](int64_t i) { return T(widen(static_cast<const Float16*>(data)[i])); });
    case Dtype::uint8: return function([=](int64_t i) { return T(static_cast<const uint8_t*>(data)[i] != 0); });
    case Dtype::int32: return function([=](int64_t i) { return T(static_cast<const int32_t*>(data)[i] != 0); });
    case Dtype::int64: return function([=](int64_t i) { return T(static_cast<const int64_t*>(data)[i] != 0); });
  }
}

}  // namespace
}  // namespace trustregion
