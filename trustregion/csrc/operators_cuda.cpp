// The CUDA implementations of the operators in operators.cpp.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "arguments.h"
#include "cuda.h"

namespace trustregion {
namespace {

std::tuple<at::Tensor, at::Tensor> band_bounds_cuda(const at::Tensor& log_prob_old, int64_t divergence, double delta_low,
                                                    double delta_high, double vanishes_at, double fills_at,
                                                    double log_cap) {
  const c10::cuda::CUDAGuard guard(log_prob_old.device());
  at::Tensor input = log_prob_old.contiguous();
  auto f = divergence_of(divergence);
  at::Tensor lower = at::empty(input.sizes(), input.options().dtype(computed_in(input.scalar_type())));
  at::Tensor upper = at::empty_like(lower);
  AT_DISPATCH_FLOATING_TYPES(lower.scalar_type(), "band_bounds", [&] {
    auto radii = make_radii<scalar_t>(f, delta_low, delta_high, vanishes_at, fills_at, log_cap);
    C10_CUDA_CHECK(launch_band_bounds(f, column_of(input, input.numel()), radii, lower.mutable_data_ptr<scalar_t>(),
                                      upper.mutable_data_ptr<scalar_t>(), input.numel(),
                                      c10::cuda::getCurrentCUDAStream()));
  });
  return {lower, upper};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> policy_loss_cuda(
    const at::Tensor& log_prob, const at::Tensor& log_prob_old, const at::Tensor& advantages, const at::Tensor& mask,
    const Maybe& weights, const Maybe& entropy, const Maybe& entropy_old, at::IntArrayRef choices,
    at::ArrayRef<double> numbers) {
  const c10::cuda::CUDAGuard guard(log_prob.device());
  TokenTensors tokens = check_tokens(log_prob, log_prob_old, advantages, mask, weights, entropy, entropy_old);
  int64_t count = log_prob.numel();
  auto options = log_prob.options().dtype(tokens.dtype);
  at::Tensor loss = at::empty(log_prob.sizes(), options), factor = at::empty_like(loss);
  at::Tensor active = at::empty(log_prob.sizes(), options.dtype(at::kBool));
  at::Tensor statistics = at::empty({STATISTICS}, options.dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES(tokens.dtype, "policy_loss", [&] {
    auto parameters = make_parameters<scalar_t>(choices, numbers);
    int blocks = 0;
    C10_CUDA_CHECK(policy_loss_blocks<scalar_t>(parameters.divergence, count, &blocks));
    at::Tensor partial = at::empty({blocks, STATISTICS}, statistics.options());
    C10_CUDA_CHECK(launch_policy_loss(columns_of(tokens), parameters, loss.mutable_data_ptr<scalar_t>(),
                                      factor.mutable_data_ptr<scalar_t>(), active.mutable_data_ptr<bool>(),
                                      partial.mutable_data_ptr<double>(), statistics.mutable_data_ptr<double>(), count,
                                      blocks, c10::cuda::getCurrentCUDAStream()));
  });
  return {loss, factor, active, statistics};
}

}  // namespace
}  // namespace trustregion

TORCH_LIBRARY_IMPL(trustregion, CUDA, m) {
  m.impl("band_bounds", trustregion::band_bounds_cuda);
  m.impl("policy_loss", trustregion::policy_loss_cuda);
}
