// What the operators of any device do with their arguments before a kernel starts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

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
  TORCH_CHECK(choices.size() == 4 && numbers.size() == 18, "choices and numbers: must be 4 and 18 long");
  TORCH_CHECK(choices[0] >= 0 && choices[0] <= 3 && choices[2] >= 0 && choices[2] <= 3, "choices: no such region or surrogate");
  LossParameters<T> loss{};
  loss.region = static_cast<Region>(choices[0]);
  loss.divergence = divergence_of(choices[1]);
  loss.surrogate = static_cast<Surrogate>(choices[2]);
  loss.drop_invalid = choices[3] != 0;
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

}  // namespace
}  // namespace trustregion
