// For machines with AVX2.
// The standard library's headers come first: their functions are shared with sources for lesser machines.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#endif
#include "cpu_kernels.h"

namespace trustregion {

template <class T>
CpuKernels<T> cpu_kernels_avx2() { return {band_bounds<T>, policy_loss<T>}; }

template CpuKernels<float> cpu_kernels_avx2();
template CpuKernels<double> cpu_kernels_avx2();

}  // namespace trustregion
