// For any machine.
#include "cpu_kernels.h"

namespace trustregion {

template <class T>
CpuKernels<T> cpu_kernels_default() { return {band_bounds<T>, policy_loss<T>}; }

template CpuKernels<float> cpu_kernels_default();
template CpuKernels<double> cpu_kernels_default();

}  // namespace trustregion
