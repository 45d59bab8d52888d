// Defines the operators, and registers the CPU kernels of cpu_kernels.h.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_kernels.h"
#include "instructions.h"
#include "operators.h"

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

struct OnCpu {
  template <class T>
  static void band_bounds(Divergence f, const Column& log_prob_old, const Radii<T>& radii, T* lower, T* upper,
                          int64_t tokens, at::Device) {
    at::parallel_for(0, tokens, GRAIN, [&](int64_t begin, int64_t end) {
      run_vectorized([&] { find_band_bounds(f, log_prob_old, radii, lower, upper, begin, end); });
    });
  }

  template <class T>
  static void policy_loss(const TokenColumns& columns, const LossParameters<T>& loss, T* losses, T* factors,
                          bool* active, double* statistics, int64_t tokens, at::Device) {
    int64_t chunks = (tokens + CHUNK - 1) / CHUNK;
    std::vector<double> partial(chunks * STATISTICS);
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        double* sums = partial.data() + chunk * STATISTICS;
        int64_t first = chunk * CHUNK, last = std::min(tokens, first + CHUNK);
        run_vectorized([&] { find_policy_loss(columns, loss, losses, factors, active, sums, first, last); });
      }
    });
    std::fill_n(statistics, int(STATISTICS), 0.0);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int i = 0; i < STATISTICS; ++i) {
        double x = partial[chunk * STATISTICS + i];
        statistics[i] = i >= LOG_RATIO_ABS_MAX ? std::max(statistics[i], x) : statistics[i] + x;
      }
    }
  }
};

}  // namespace
}  // namespace trustregion

TORCH_LIBRARY_IMPL(trustregion, CompositeExplicitAutograd, m) {
  m.impl("build_info", [] { return trustregion::build_info(trustregion::cpu_instructions()); });
}

TORCH_LIBRARY_IMPL(trustregion, CPU, m) {
  m.impl("band_bounds", trustregion::band_bounds<trustregion::OnCpu>);
  m.impl("policy_loss", trustregion::policy_loss<trustregion::OnCpu>);
}
