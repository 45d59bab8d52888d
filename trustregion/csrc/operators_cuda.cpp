// Registers the CUDA kernels of cuda.h, on the current stream.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda.h"
#include "operators.h"

namespace trustregion {
namespace {

struct OnCuda {
  template <class T>
  static void band_bounds(Divergence f, const Column& log_prob_old, const Radii<T>& radii, T* lower, T* upper,
                          int64_t tokens, at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(launch_band_bounds(f, log_prob_old, radii, lower, upper, tokens, c10::cuda::getCurrentCUDAStream()));
  }

  template <class T>
  static void policy_loss(const TokenColumns& columns, const LossParameters<T>& loss, T* losses, T* factors,
                          bool* active, double* statistics, int64_t tokens, at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    int blocks = 0;
    C10_CUDA_CHECK(policy_loss_blocks<T>(loss.divergence, tokens, &blocks));
    // The caching allocator hands it on no earlier than the stream is done with it.
    at::Tensor partial = at::empty({blocks, STATISTICS}, at::device(device).dtype(at::kDouble));
    C10_CUDA_CHECK(launch_policy_loss(columns, loss, losses, factors, active, partial.mutable_data_ptr<double>(),
                                      statistics, tokens, blocks, c10::cuda::getCurrentCUDAStream()));
  }
};

}  // namespace
}  // namespace trustregion

TORCH_LIBRARY_FRAGMENT(trustregion, m) {
  m.def("build_info_cuda() -> str[]", [] { return trustregion::build_info("CUDA"); });
}

TORCH_LIBRARY_IMPL(trustregion, CUDA, m) {
  m.impl("band_bounds", trustregion::band_bounds<trustregion::OnCuda>);
  m.impl("policy_loss", trustregion::policy_loss<trustregion::OnCuda>);
}
