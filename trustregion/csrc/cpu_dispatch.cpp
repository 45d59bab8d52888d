// Which of the CPU kernels this machine can run.
#include <cstring>

#include "cpu.h"

namespace trustregion {

const char* cpu_instructions() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "default";
}

template <class T>
CpuKernels<T> cpu_kernels() {
  static const CpuKernels<T> kernels = !std::strcmp(cpu_instructions(), "avx512") ? cpu_kernels_avx512<T>()
                                       : !std::strcmp(cpu_instructions(), "avx2") ? cpu_kernels_avx2<T>()
                                                                                  : cpu_kernels_default<T>();
  return kernels;
}

template CpuKernels<float> cpu_kernels();
template CpuKernels<double> cpu_kernels();

}  // namespace trustregion
