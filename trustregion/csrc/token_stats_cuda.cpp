// Registers the CUDA kernels of token statistics, on the current stream.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "token_stats_torch.h"

namespace trustregion {
namespace {

// The caching allocator hands a workspace on no earlier than the stream is done with it.
at::Tensor workspace(int64_t bytes, const at::Tensor& like) { return at::empty({bytes}, like.options().dtype(at::kByte)); }

int processors_of(const at::Tensor& x) {
  int count = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, x.device().index()));
  return count;
}

struct OnCuda {
  static constexpr int64_t kLargestTopk = trustregion::kLargestTopk;

  template <class X>
  static void forward(const Forward<X>& args, const at::Tensor& logits) {
    const c10::cuda::CUDAGuard guard(logits.device());
    const int processors = processors_of(logits);
    const at::Tensor space = workspace(forward_workspace(args, processors), logits);
    forward_cuda(args, processors, space.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  template <class X>
  static void backward(const Backward<X>& args, const at::Tensor& logits) {
    const c10::cuda::CUDAGuard guard(logits.device());
    const int processors = processors_of(logits);
    const at::Tensor space = workspace(backward_workspace(args), logits);
    backward_cuda(args, processors, space.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(trustregion, CUDA, m) { implement<OnCuda>(m); }

}  // namespace trustregion
