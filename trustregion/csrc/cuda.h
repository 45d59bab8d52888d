// The CUDA kernels' launchers: plain pointers, sizes and a stream, so that nvcc alone compiles and tests them.
#pragma once

#include <cuda_runtime_api.h>

#include "columns.h"
#include "policy_loss.h"

namespace trustregion {

// All return the error of the launch.
template <class T>
cudaError_t launch_band_bounds(Divergence f, const Column& log_prob_old, const Radii<T>& radii, T* lower, T* upper,
                               int64_t tokens, cudaStream_t stream);

// How many blocks a device wants for that many tokens; `partial` below has STATISTICS doubles for each.
template <class T>
cudaError_t policy_loss_blocks(Divergence f, int64_t tokens, int* blocks);

// Writes `statistics` too, an array of STATISTICS: sums over a block's threads, then over blocks, in a fixed order.
template <class T>
cudaError_t launch_policy_loss(const TokenColumns& columns, const LossParameters<T>& loss, T* losses, T* factors,
                               bool* active, double* partial, double* statistics, int64_t tokens, int blocks,
                               cudaStream_t stream);

}  // namespace trustregion
