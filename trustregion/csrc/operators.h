// The operators of operators.cpp, given kernels for a device.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/macros/Macros.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "columns.h"
#include "policy_loss.h"

namespace trustregion {
namespace {

inline Divergence divergence_of(int64_t i) {
  TORCH_CHECK(i >= 0 && i <= 3, "divergence ", i, ": must be 0 (kl), 1 (reverse_kl), 2 (tv) or 3 (chi2)");
  return static_cast<Divergence>(i);
}

inline at::ScalarType computed_in(at::ScalarType given) {
  TORCH_CHECK(at::isFloatingType(given), "log-probs of ", given, ": must be floats");
  return given == at::kDouble ? at::kDouble : at::kFloat;
}

inline Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kDouble: return Dtype::float64;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    case at::kBool: case at::kByte: return Dtype::uint8;
    case at::kInt: return Dtype::int32;
    case at::kLong: return Dtype::int64;
    default: TORCH_CHECK(false, "trustregion: cannot read ", x.scalar_type());
  }
}

inline Column column_of(const at::Tensor& x, int64_t tokens) {
  return {x.const_data_ptr(), dtype_of(x), x.numel() > 0 ? tokens / x.numel() : 1};
}

using Maybe = std::optional<at::Tensor>;

struct TokenTensors {
  at::ScalarType dtype;  // computed in
  at::Tensor log_prob, log_prob_old, advantages, mask;
  Maybe weights, entropy, entropy_old;
};

inline TokenColumns columns_of(const TokenTensors& x) {
  int64_t tokens = x.log_prob.numel();
  auto maybe = [&](const Maybe& y) { return y ? column_of(*y, tokens) : Column{}; };
  return {column_of(x.log_prob, tokens), column_of(x.log_prob_old, tokens), column_of(x.advantages, tokens),
          column_of(x.mask, tokens), maybe(x.weights), maybe(x.entropy), maybe(x.entropy_old)};
}

inline TokenTensors check_tokens(const at::Tensor& log_prob, const at::Tensor& log_prob_old,
                                 const at::Tensor& advantages, const at::Tensor& mask, const Maybe& weights,
                                 const Maybe& entropy, const Maybe& entropy_old) {
  auto same = [&](const at::Tensor& x, const char* name) {
    TORCH_CHECK(x.sizes() == log_prob.sizes(), name, " has shape ", x.sizes(), ": must be ", log_prob.sizes());
    TORCH_CHECK(x.device() == log_prob.device(), name, " is on ", x.device(), ", log_prob on ", log_prob.device());
    return x.contiguous();
  };
  auto maybe = [&](const Maybe& x, const char* name) {
    return x ? std::make_optional(same(*x, name)) : std::nullopt;
  };
  TORCH_CHECK(entropy.has_value() == entropy_old.has_value(), "entropy and entropy_old: give both or neither");
  bool by_row = weights && log_prob.dim() > 0 && weights->dim() == log_prob.dim() && weights->size(-1) == 1 &&
                weights->sizes().slice(0, log_prob.dim() - 1) == log_prob.sizes().slice(0, log_prob.dim() - 1) &&
                weights->device() == log_prob.device();
  Maybe weight = by_row ? std::make_optional(weights->contiguous()) : maybe(weights, "weights");
  bool wide = computed_in(log_prob.scalar_type()) == at::kDouble || computed_in(log_prob_old.scalar_type()) == at::kDouble;
  return {wide ? at::kDouble : at::kFloat, log_prob.contiguous(), same(log_prob_old, "log_prob_old"),
          same(advantages, "advantages"), same(mask, "mask"), weight, maybe(entropy, "entropy"),
          maybe(entropy_old, "entropy_old")};
}

// `choices` and `numbers` as ops/policy_loss.py lists them.
template <class T>
LossParameters<T> make_parameters(at::IntArrayRef choices, at::ArrayRef<double> numbers) {
  TORCH_CHECK(choices.size() == 3 && numbers.size() == 18, "choices and numbers: must be 3 and 18 long");
  TORCH_CHECK(choices[0] >= 0 && choices[0] <= 3 && choices[2] >= 0 && choices[2] <= 3, "choices: no such region or surrogate");
  LossParameters<T> loss{};
  loss.region = static_cast<Region>(choices[0]);
  loss.divergence = divergence_of(choices[1]);
  loss.surrogate = static_cast<Surrogate>(choices[2]);
  const double* next = numbers.data();
  double low = next[0], high = next[1], vanishes_at = next[2], fills_at = next[3], log_cap = next[4];
  loss.radii = make_radii<T>(loss.divergence, low, high, vanishes_at, fills_at, infinity<double>);
  loss.radii.log_cap = T(log_cap);
  T* fields[] = {&loss.log_lower, &loss.log_upper, &loss.log_eps_low, &loss.log_eps_high, &loss.low_saturates_at,
                 &loss.high_saturates_at, &loss.capped_at, &loss.entropy_lower, &loss.entropy_upper, &loss.dual_clip,
                 &loss.truncation, &loss.beta_1, &loss.beta_2};
  next += 5;
  for (T* field : fields) *field = T(*next++);
  return loss;
}

// torch it is compiled for, hash of the sources, what it runs on
inline std::vector<std::string> build_info(const char* target) {
  return {TORCH_VERSION, C10_STRINGIZE(TRUSTREGION_SOURCES), target};
}

template <class Kernels>
std::tuple<at::Tensor, at::Tensor> band_bounds(const at::Tensor& log_prob_old, int64_t divergence, double delta_low,
                                               double delta_high, double vanishes_at, double fills_at, double log_cap) {
  at::Tensor input = log_prob_old.contiguous();
  auto f = divergence_of(divergence);
  at::Tensor lower = at::empty(input.sizes(), input.options().dtype(computed_in(input.scalar_type())));
  at::Tensor upper = at::empty_like(lower);
  AT_DISPATCH_FLOATING_TYPES(lower.scalar_type(), "band_bounds", [&] {
    auto radii = make_radii<scalar_t>(f, delta_low, delta_high, vanishes_at, fills_at, log_cap);
    Kernels::band_bounds(f, column_of(input, input.numel()), radii, lower.mutable_data_ptr<scalar_t>(),
                         upper.mutable_data_ptr<scalar_t>(), input.numel(), input.device());
  });
  return {lower, upper};
}

template <class Kernels>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> policy_loss(
    const at::Tensor& log_prob, const at::Tensor& log_prob_old, const at::Tensor& advantages, const at::Tensor& mask,
    const Maybe& weights, const Maybe& entropy, const Maybe& entropy_old, at::IntArrayRef choices,
    at::ArrayRef<double> numbers) {
  TokenTensors tokens = check_tokens(log_prob, log_prob_old, advantages, mask, weights, entropy, entropy_old);
  auto options = log_prob.options().dtype(tokens.dtype);
  at::Tensor loss = at::empty(log_prob.sizes(), options), factor = at::empty_like(loss);
  at::Tensor active = at::empty(log_prob.sizes(), options.dtype(at::kBool));
  at::Tensor statistics = at::empty({STATISTICS}, options.dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES(tokens.dtype, "policy_loss", [&] {
    Kernels::policy_loss(columns_of(tokens), make_parameters<scalar_t>(choices, numbers),
                         loss.mutable_data_ptr<scalar_t>(), factor.mutable_data_ptr<scalar_t>(),
                         active.mutable_data_ptr<bool>(), statistics.mutable_data_ptr<double>(), log_prob.numel(),
                         log_prob.device());
  });
  return {loss, factor, active, statistics};
}

}  // namespace
}  // namespace trustregion
