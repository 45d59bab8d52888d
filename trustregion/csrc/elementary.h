// exp, expm1, log and log1p for host and device. On the host they are free of branches and calls, so that the compiler
// vectorizes loops over them for whatever instructions it may use; their error is about one unit in the last place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#define TR_FUNCTION __host__ __device__ __forceinline__
#else
#define TR_FUNCTION inline __attribute__((always_inline))
#endif

namespace trustregion {
namespace {  // each translation unit has its own: they are compiled for different instruction sets

template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

// They hand a nan in x on.
template <class T>
TR_FUNCTION T at_most(T x, T limit) { return x > limit ? limit : x; }
template <class T>
TR_FUNCTION T at_least(T x, T limit) { return x < limit ? limit : x; }

template <class T>
struct Exp {
  T value;      // e^x
  T minus_one;  // e^x - 1
};

template <class To, class From>
TR_FUNCTION To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &x, sizeof(To));
  return to;
}

template <class T>
struct Format;

template <>
struct Format<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23, bias = 127, taylor = 8;
  static constexpr float to_integer = 12582912.0f;  // adding it leaves the integer nearest to x in the lowest bits
  static constexpr float ln2_high = 6.9313812256e-01f, ln2_low = 9.0580006145e-06f;
  static constexpr float smallest_exp = -104.0f, largest_exp = 89.0f;
  static constexpr Bits sqrt_half = 0x3f3504f3, one = 0x3f800000;
};

template <>
struct Format<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52, bias = 1023, taylor = 14;
  static constexpr double to_integer = 6755399441055744.0;
  static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
  static constexpr double smallest_exp = -746.0, largest_exp = 710.0;
  static constexpr Bits sqrt_half = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000;
};

template <class T>
TR_FUNCTION T power_of_two(typename Format<T>::Bits k) {
  return bits_as<T>((k + Format<T>::bias) << Format<T>::mantissa);
}

template <int n>
inline constexpr double inverse_factorial = inverse_factorial<n - 1> / n;
template <>
inline constexpr double inverse_factorial<0> = 1;

// sum of x^n / n!, n from first to last, over x^first
template <int first, int last, class T>
TR_FUNCTION T exp_series(T x) {
  if constexpr (first == last) {
    return T(inverse_factorial<last>);
  } else {
    return exp_series<first + 1, last>(x) * x + T(inverse_factorial<first>);
  }
}

template <class T>
TR_FUNCTION Exp<T> exp_pair(T x) {
#ifdef __CUDA_ARCH__
  return {exp(x), expm1(x)};
#else
  using F = Format<T>;
  using Bits = typename F::Bits;
  x = at_most(at_least(x, F::smallest_exp), F::largest_exp);
  T shifted = x * T(1.4426950408889634) + F::to_integer;
  Bits k = bits_as<Bits>(shifted) - bits_as<Bits>(F::to_integer);
  T n = shifted - F::to_integer;
  T r = (x - n * F::ln2_high) - n * F::ln2_low;
  T expm1_r = r + r * r * exp_series<2, F::taylor>(r);
  // 2^k may be out of range where e^x is not. AVX2 has no arithmetic shift of 64 bits: halve a positive number.
  Bits half = static_cast<Bits>(static_cast<std::make_unsigned_t<Bits>>(k + 4096) >> 1) - 2048;
  T first = power_of_two<T>(half), second = power_of_two<T>(k - half);
  T value = (1 + expm1_r) * first * second, scale = first * second;
  return {value, k > 64 ? value : scale * expm1_r + (scale - 1)};
#endif
}

template <class T>
TR_FUNCTION T log_core(T f, T n, T correction);

template <>
TR_FUNCTION float log_core(float f, float n, float correction) {
  float s = f / (2 + f), z = s * s, w = z * z, half_square = 0.5f * f * f;
  float series = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
  return s * (half_square + series) + (n * Format<float>::ln2_low + correction) - half_square + f +
         n * Format<float>::ln2_high;
}

template <>
TR_FUNCTION double log_core(double f, double n, double correction) {
  double s = f / (2 + f), z = s * s, w = z * z, half_square = 0.5 * f * f;
  double odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  double even = z * (6.666666666666735130e-01 +
                     w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return s * (half_square + (even + odd)) + (n * Format<double>::ln2_low + correction) - half_square + f +
         n * Format<double>::ln2_high;
}

// ln(1 + x) where plus_one, else ln x: for the price of one. x is a normal number, 0 or inf where it is not plus_one.
template <class T>
TR_FUNCTION T log_or_log1p(bool plus_one, T x) {
#ifdef __CUDA_ARCH__
  return plus_one ? log1p(x) : log(x);
#else
  using F = Format<T>;
  using Bits = typename F::Bits;
  T sum = 1 + x, rounded_x = sum - 1, lost = (1 - (sum - rounded_x)) + (x - rounded_x);
  T u = plus_one ? sum : x;
  lost = plus_one ? lost : T(0);
  Bits shifted = bits_as<Bits>(u) + (F::one - F::sqrt_half);
  Bits k = static_cast<Bits>(static_cast<std::make_unsigned_t<Bits>>(shifted) >> F::mantissa) - F::bias;
  Bits fraction = (shifted & ((Bits(1) << F::mantissa) - 1)) + F::sqrt_half;  // in [sqrt 1/2, sqrt 2)
  T n = bits_as<T>(k + bits_as<Bits>(F::to_integer)) - F::to_integer;
  T f = bits_as<T>(fraction) - 1;
  T y = log_core<T>(k == 0 ? f + lost : f, n, k == 0 ? T(0) : lost / u);
  y = u < std::numeric_limits<T>::min() ? (u < 0 ? std::numeric_limits<T>::quiet_NaN() : -infinity<T>) : y;
  return u <= std::numeric_limits<T>::max() ? y : u;  // inf, nan
#endif
}

template <class T>
TR_FUNCTION T log1p_of(T x) { return log_or_log1p(true, x); }
template <class T>
TR_FUNCTION T log_of(T x) { return log_or_log1p(false, x); }
template <class T>
TR_FUNCTION T exp_of(T x) { return exp_pair(x).value; }

}  // namespace
}  // namespace trustregion
