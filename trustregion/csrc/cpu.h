// The CPU kernels, compiled once for each instruction set. Plain C++: none of torch's inline functions may be compiled
// for more than the machine has.
#pragma once

#include <cstdint>

#include "columns.h"
#include "policy_loss.h"

namespace trustregion {

// All take the tokens [begin, end).
template <class T>
struct CpuKernels {
  void (*band_bounds)(Divergence, Column log_prob_old, const Radii<T>&, T* lower, T* upper, int64_t begin, int64_t end);
  // Adds to `statistics`, an array of STATISTICS.
  void (*policy_loss)(const TokenColumns&, const LossParameters<T>&, T* loss, T* factor, bool* active,
                      double* statistics, int64_t begin, int64_t end);
};

template <class T>
CpuKernels<T> cpu_kernels_default();
template <class T>
CpuKernels<T> cpu_kernels_avx2();
template <class T>
CpuKernels<T> cpu_kernels_avx512();

// What the CPU kernels of this machine are compiled for: "avx512", "avx2" or "default".
const char* cpu_instructions();

template <class T>
CpuKernels<T> cpu_kernels();

}  // namespace trustregion
