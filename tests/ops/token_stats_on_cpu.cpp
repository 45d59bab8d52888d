// The CUDA kernels of token statistics and the CPU's, called alike from the test by ctypes.
#include "cuda_on_cpu.h"
//
#include "../../trustregion/csrc/token_stats_kernels.cu"

namespace {

using namespace trustregion;

template <class X>
void forward(bool gpu, const void* args) {
  const auto& forward = *static_cast<const Forward<X>*>(args);
  if (!gpu) return forward_cpu(forward, 0, forward.N);
  std::vector<double> space(forward_workspace(forward, 2) / 8 + 1);
  forward_cuda(forward, 2, space.data(), nullptr);
}

template <class X>
void backward(bool gpu, const void* args) {
  const auto& backward = *static_cast<const Backward<X>*>(args);
  if (!gpu) return backward_cpu(backward, 0, backward.N);
  std::vector<double> space(backward_workspace(backward) / 8 + 1);
  backward_cuda(backward, 2, space.data(), nullptr);
}

}  // namespace

// Formats: 0 bfloat16, 1 float16, 2 float32, 3 float64. `args`: a Forward<X>, or Backward<X>.
extern "C" void run(bool backward_too, int format, bool gpu, const void* args) {
  decltype(&forward<float>) all[][4] = {
      {forward<BFloat16>, forward<Float16>, forward<float>, forward<double>},
      {backward<BFloat16>, backward<Float16>, backward<float>, backward<double>}};
  all[backward_too][format](gpu, args);
}
