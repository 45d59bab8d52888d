// The library's operators, and the CPU implementations of those in cpu_kernels.h.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/macros/Macros.h>
#include <torch/library.h>
#include <torch/version.h>

#include <vector>

#include "arguments.h"
#include "cpu_kernels.h"
#include "instructions.h"

TORCH_LIBRARY(trustregion, m) {
  m.def("build_info() -> str[]");
  m.def(
      "band_bounds(Tensor log_prob_old, int divergence, float delta_low, float delta_high, float vanishes_at, "
      "float fills_at, float log_cap) -> (Tensor log_lower, Tensor log_upper)");
  m.def(
      "policy_loss(Tensor log_prob, Tensor log_prob_old, Tensor advantages, Tensor mask, Tensor? weights, "
      "Tensor? entropy, Tensor? entropy_old, int[] choices, float[] numbers) -> "
      "(Tensor token_loss, Tensor factor, Tensor active, Tensor statistics)");
}

namespace trustregion {
namespace {

constexpr int64_t GRAIN = 4096;
// Statistics are summed by chunk, then over chunks in order: the same whatever the number of threads.
constexpr int64_t CHUNK = 16384;

// torch it is compiled for, hash of the sources, instructions it uses here
std::vector<std::string> build_info() { return {TORCH_VERSION, C10_STRINGIZE(TRUSTREGION_SOURCES), cpu_instructions()}; }

std::tuple<at::Tensor, at::Tensor> band_bounds_cpu(const at::Tensor& log_prob_old, int64_t divergence, double delta_low,
                                                   double delta_high, double vanishes_at, double fills_at,
                                                   double log_cap) {
  at::Tensor input = log_prob_old.contiguous();
  auto f = divergence_of(divergence);
  at::Tensor lower = at::empty(input.sizes(), input.options().dtype(computed_in(input.scalar_type())));
  at::Tensor upper = at::empty_like(lower);
  AT_DISPATCH_FLOATING_TYPES(lower.scalar_type(), "band_bounds", [&] {
    auto radii = make_radii<scalar_t>(f, delta_low, delta_high, vanishes_at, fills_at, log_cap);
    Column column = column_of(input, input.numel());
    auto* low = lower.mutable_data_ptr<scalar_t>();
    auto* high = upper.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, input.numel(), GRAIN, [&](int64_t begin, int64_t end) {
      run_vectorized([&] { band_bounds(f, column, radii, low, high, begin, end); });
    });
  });
  return {lower, upper};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> policy_loss_cpu(
    const at::Tensor& log_prob, const at::Tensor& log_prob_old, const at::Tensor& advantages, const at::Tensor& mask,
    const Maybe& weights, const Maybe& entropy, const Maybe& entropy_old, at::IntArrayRef choices, at::ArrayRef<double> numbers) {
  TokenTensors tokens = check_tokens(log_prob, log_prob_old, advantages, mask, weights, entropy, entropy_old);
  int64_t count = log_prob.numel(), chunks = (count + CHUNK - 1) / CHUNK;
  auto options = log_prob.options().dtype(tokens.dtype);
  at::Tensor loss = at::empty(log_prob.sizes(), options), factor = at::empty_like(loss);
  at::Tensor active = at::empty(log_prob.sizes(), options.dtype(at::kBool));
  at::Tensor statistics = at::zeros({STATISTICS}, options.dtype(at::kDouble));
  TokenColumns columns = columns_of(tokens);
  std::vector<double> partial(chunks * STATISTICS);
  AT_DISPATCH_FLOATING_TYPES(tokens.dtype, "policy_loss", [&] {
    auto parameters = make_parameters<scalar_t>(choices, numbers);
    auto* losses = loss.mutable_data_ptr<scalar_t>();
    auto* factors = factor.mutable_data_ptr<scalar_t>();
    bool* actives = active.mutable_data_ptr<bool>();
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        double* sums = partial.data() + chunk * STATISTICS;
        int64_t first = chunk * CHUNK, last = std::min(count, first + CHUNK);
        run_vectorized([&] { policy_loss(columns, parameters, losses, factors, actives, sums, first, last); });
      }
    });
  });
  auto* totals = statistics.mutable_data_ptr<double>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int i = 0; i < STATISTICS; ++i) {
      double x = partial[chunk * STATISTICS + i];
      totals[i] = i >= LOG_RATIO_ABS_MAX ? std::max(totals[i], x) : totals[i] + x;
    }
  }
  return {loss, factor, active, statistics};
}

}  // namespace
}  // namespace trustregion

TORCH_LIBRARY_IMPL(trustregion, CompositeExplicitAutograd, m) { m.impl("build_info", trustregion::build_info); }

TORCH_LIBRARY_IMPL(trustregion, CPU, m) {
  m.impl("band_bounds", trustregion::band_bounds_cpu);
  m.impl("policy_loss", trustregion::policy_loss_cpu);
}
