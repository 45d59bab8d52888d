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
#define TR_UNROLL
#else
#define TR_FUNCTION inline __attribute__((always_inline))
#define TR_UNROLL _Pragma("GCC unroll 16")  // a loop within a loop keeps the outer one from being vectorized
#endif

namespace trustregion {
namespace {  // each translation unit has its own: they are compiled for different instruction sets

template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();
template <class T>
constexpr T largest_finite = std::numeric_limits<T>::max();
template <class T>
constexpr T smallest_normal = std::numeric_limits<T>::min();

// They hand a nan in x on.
template <class T>
TR_FUNCTION T at_most(T x, T limit) { return x > limit ? limit : x; }
template <class T>
TR_FUNCTION T at_least(T x, T limit) { return x < limit ? limit : x; }

template <class T>
struct Exp {
  T value;      // e^x
  T minus_one;  // e^x - 1
  T rest;       // e^x - 1 - x
};

template <class T>
struct Log {
  T value;
  T rest;  // x - ln(1 + x)
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
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float to_integer = 12582912.0f;  // adding it leaves the integer nearest to x in the lowest bits
  static constexpr float ln2_high = 6.9313812256e-01f, ln2_low = 9.0580006145e-06f;
  static constexpr float smallest_exp = -104.0f, largest_exp = 89.0f, subnormal_exp = -87.33654f;
  static constexpr Bits sqrt_half = 0x3f3504f3, one = 0x3f800000;
};

template <>
struct Format<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double to_integer = 6755399441055744.0;
  static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
  static constexpr double smallest_exp = -746.0, largest_exp = 710.0, subnormal_exp = -708.3964185322641;
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

// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2
TR_FUNCTION float exp_rest(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  return p * r + 5.0000001201e-1f;
}
TR_FUNCTION double exp_rest(double r) { return exp_series<2, 14>(r); }

// x = n ln 2 + r; the lowest bits of `shifted` are n's.
template <class T>
struct Reduced {
  T shifted, n, r;
};

template <class T>
TR_FUNCTION Reduced<T> reduce(T x) {
  using F = Format<T>;
  T shifted = x * T(1.4426950408889634) + F::to_integer, n = shifted - F::to_integer;
  return {shifted, n, (x - n * F::ln2_high) - n * F::ln2_low};
}

template <class T>
TR_FUNCTION Exp<T> exp_all(T x) {
#ifdef __CUDA_ARCH__
  T minus_one = expm1(x);
  return {exp(x), minus_one, fabs(x) < 1 ? x * x * exp_series<2, sizeof(T) == 8 ? 19 : 11>(x) : minus_one - x};
#else
  using F = Format<T>;
  using Bits = typename F::Bits;
  auto [shifted, n, r] = reduce(at_most(at_least(x, F::smallest_exp), F::largest_exp));
  Bits k = bits_as<Bits>(shifted) - bits_as<Bits>(F::to_integer);
  // 2^k may be out of range where e^x is not. AVX2 has no arithmetic shift of 64 bits: halve a positive number.
  Bits half = static_cast<Bits>(static_cast<std::make_unsigned_t<Bits>>(k + 4096) >> 1) - 2048;
  T first = power_of_two<T>(half), second = power_of_two<T>(k - half), scale = first * second, beyond = scale - 1;
  T rest_r = r * r * exp_rest(r), value = (1 + (r + rest_r)) * first * second;
  T minus_one = scale * (r + rest_r) + beyond;
  T rest = scale * rest_r + (beyond * r + ((beyond - n * F::ln2_high) - n * F::ln2_low));
  bool large = k > 64;
  return {value, large ? value : minus_one, large ? value : x < F::smallest_exp ? -1 - x : rest};
#endif
}

// f - ln(1 + f) - more for 1 + f in [sqrt 1/2, sqrt 2)
TR_FUNCTION float log_rest(float f, float more) {
  float s = f / (2 + f), z = s * s, w = z * z, half_square = 0.5f * f * f;
  float series = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
  return half_square - (s * (half_square + series) + more);
}
TR_FUNCTION double log_rest(double f, double more) {
  double s = f / (2 + f), z = s * s, w = z * z, half_square = 0.5 * f * f;
  double odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  double even = z * (6.666666666666735130e-01 +
                     w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return half_square - (s * (half_square + (even + odd)) + more);
}

// ln(1 + x) where plus_one, else ln x: for the price of one. x is a normal number, 0 or inf where it is not plus_one.
template <class T>
TR_FUNCTION Log<T> log_all(bool plus_one, T x) {
#ifdef __CUDA_ARCH__
  T value = plus_one ? log1p(x) : log(x), s = x / (2 + x), z = s * s, series = 0;
  for (int n = sizeof(T) == 8 ? 29 : 13; n >= 3; n -= 2) series = series * z + T(2) / n;
  return {value, fabs(s) < T(0.34) ? s * (x - z * series) : x - value};
#else
  using F = Format<T>;
  using Bits = typename F::Bits;
  T sum = 1 + x, rounded_x = sum - 1, lost = (1 - (sum - rounded_x)) + (x - rounded_x);
  T u = plus_one ? sum : x;
  Bits shifted = bits_as<Bits>(u) + (F::one - F::sqrt_half);
  Bits k = static_cast<Bits>(static_cast<std::make_unsigned_t<Bits>>(shifted) >> F::mantissa) - F::bias;
  Bits fraction = (shifted & ((Bits(1) << F::mantissa) - 1)) + F::sqrt_half;  // in [sqrt 1/2, sqrt 2)
  T n = bits_as<T>(k + bits_as<Bits>(F::to_integer)) - F::to_integer;
  T f = (bits_as<T>(fraction) - 1) + (plus_one ? lost : T(0)) * power_of_two<T>(-k);
  T rest = log_rest(f, n * F::ln2_low);
  T y = (f - rest) + n * F::ln2_high;
  y = u < smallest_normal<T> ? (u < 0 ? std::numeric_limits<T>::quiet_NaN() : -infinity<T>) : y;
  return {u <= largest_finite<T> ? y : u, rest + ((x - n * F::ln2_high) - f)};  // inf, nan
#endif
}

template <class T>
TR_FUNCTION T log_or_log1p(bool plus_one, T x) { return log_all(plus_one, x).value; }
template <class T>
TR_FUNCTION T log1p_of(T x) { return log_or_log1p(true, x); }
template <class T>
TR_FUNCTION T log_of(T x) { return log_or_log1p(false, x); }

// e^x up to where it overflows, 0 where it is subnormal.
template <class T>
TR_FUNCTION T exp_of(T x) {
#ifdef __CUDA_ARCH__
  return exp(x);
#else
  using F = Format<T>;
  using Bits = typename F::Bits;
  auto [shifted, n, r] = reduce(x);
  T value = exp_rest(r) * (r * r) + r + 1;  // in [1/2, 2]: its exponent is added to
  auto bits = bits_as<std::make_unsigned_t<Bits>>(value) + (bits_as<std::make_unsigned_t<Bits>>(shifted) << F::mantissa);
  return x < F::subnormal_exp ? T(0) : bits_as<T>(bits);
#endif
}

}  // namespace
}  // namespace trustregion
