// Token statistics as torch operators, given kernels for a device.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "token_stats.h"

namespace trustregion {

using OptionalTensor = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <class Run>
void for_format(at::ScalarType dtype, Run run) {
  switch (dtype) {
    case at::kBFloat16: return run.template operator()<BFloat16>();
    case at::kHalf: return run.template operator()<Float16>();
    case at::kFloat: return run.template operator()<float>();
    case at::kDouble: return run.template operator()<double>();
    default: TORCH_CHECK_VALUE(false, "logits of ", dtype, ": must be bfloat16, float16, float32 or float64");
  }
}

inline at::ScalarType compute_dtype(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Leading dimensions that are one in memory become one; nothing where more than a Layout holds are left.
inline std::optional<Layout> layout_of(const at::Tensor& x) {
  Layout layout{{1, 1, 1, 1}, {0, 0, 0, 0}, x.stride(-1)};
  int left = Layout::kDims;
  for (int64_t dim = x.dim() - 2; dim >= 0; --dim) {
    const int64_t size = x.size(dim), stride = x.stride(dim);
    if (size == 1) continue;
    if (left < Layout::kDims && stride == layout.sizes[left] * layout.strides[left]) {
      layout.sizes[left] *= size;
      continue;
    }
    if (left-- == 0) return std::nullopt;
    layout.sizes[left] = size;
    layout.strides[left] = stride;
  }
  return layout;
}

inline at::Tensor with_layout(const at::Tensor& x) { return layout_of(x) ? x : x.contiguous(); }

inline void check(const at::Tensor& logits, const at::Tensor& token_ids) {
  TORCH_CHECK_VALUE(logits.dim() > 0 && logits.size(-1) > 0, "logits have shape ", logits.sizes(), ": must be [..., V]");
  const int64_t V = logits.size(-1), N = logits.numel() / V;
  TORCH_CHECK_VALUE(V < (int64_t(1) << 30), "a vocabulary of ", V, ": must be below 2^30");
  TORCH_CHECK_VALUE(token_ids.numel() == N, "token_ids of ", token_ids.numel(), " tokens for ", N, " rows of logits");
}

template <class T>
const T* pointer(const at::Tensor& x) {
  return x.defined() && x.numel() > 0 ? x.const_data_ptr<T>() : nullptr;
}

inline at::Tensor as(const OptionalTensor& x, at::ScalarType dtype) {
  return x && x->defined() ? x->to(dtype).contiguous() : at::Tensor();
}

// Kernels: forward(args, like) and backward(args, like), with a tensor on their device; and kLargestTopk.
template <class Kernels>
Results token_stats(const at::Tensor& given_logits, const at::Tensor& token_ids, const OptionalTensor& temperature,
                    const OptionalTensor& given_ids, int64_t topk, bool /*inplace_backward*/) {
  check(given_logits, token_ids);
  const at::Tensor logits = with_layout(given_logits);
  const int64_t V = logits.size(-1), N = logits.numel() / V;
  TORCH_CHECK_VALUE(topk >= 0 && topk < V, "topk=", topk, ": must be in [0, ", V, "), the size of the vocabulary");
  OptionalTensor named = given_ids;
  if (topk > Kernels::kLargestTopk) {
    named = std::get<1>(logits.topk(topk)).reshape({N, topk});
    topk = 0;
  }
  const bool cells = topk > 0 || named;
  const int64_t K = topk > 0 ? topk : named ? named->size(-1) : 0;
  TORCH_CHECK_VALUE(!named || named->numel() == N * K, "cell_ids of shape ", named->sizes(), " for ", N, " tokens");

  const auto options = logits.options().dtype(compute_dtype(logits));
  const at::Tensor tokens = token_ids.to(at::kLong).contiguous(), divisor = as(temperature, compute_dtype(logits));
  const at::Tensor ids = as(named, at::kLong);
  at::Tensor rows[4];  // log_prob, entropy, largest, log_norm
  for (at::Tensor& row : rows) row = at::empty({N, 1}, options);
  at::Tensor cell_ids = at::empty({N, K}, options.dtype(at::kInt));
  at::Tensor cell_log_prob = at::empty({N, cells ? K + 2 : 0}, options);
  for_format(logits.scalar_type(), [&]<class X>() {
    using A = Compute<X>;
    auto out = [](at::Tensor& x) { return x.mutable_data_ptr<A>(); };
    const Forward<X> args{
        N, V, K, cells, topk > 0, *layout_of(logits), static_cast<const X*>(logits.const_data_ptr()),
        pointer<int64_t>(tokens), pointer<A>(divisor), pointer<int64_t>(ids),
        out(rows[0]), out(rows[1]), out(rows[2]), out(rows[3]),
        cell_ids.mutable_data_ptr<int32_t>(), out(cell_log_prob)};
    Kernels::forward(args, logits);
  });
  return {rows[0], rows[1], cell_ids, cell_log_prob, rows[2], rows[3]};
}

// Of rows as token_stats() returns them; gradients that are absent are 0.
template <class Kernels>
void write_gradient(const at::Tensor& grad_logits, const at::Tensor& logits, const OptionalTensor& grad_log_prob,
                    const OptionalTensor& grad_entropy, const OptionalTensor& grad_cells, const at::Tensor& token_ids,
                    const OptionalTensor& temperature, const at::Tensor& cell_ids, const at::Tensor& cell_log_prob,
                    const at::Tensor& entropy, const at::Tensor& largest, const at::Tensor& log_norm) {
  check(logits, token_ids);
  const auto dtype = compute_dtype(logits);
  const at::Tensor tokens = token_ids.to(at::kLong).contiguous(), divisor = as(temperature, dtype);
  const at::Tensor of_log_prob = as(grad_log_prob, dtype), of_entropy = as(grad_entropy, dtype);
  const at::Tensor ids = cell_ids.contiguous(), cells = cell_log_prob.contiguous();
  const at::Tensor of_cells = cells.numel() > 0 ? as(grad_cells, dtype) : at::Tensor();
  const at::Tensor rows[] = {entropy.contiguous(), largest.contiguous(), log_norm.contiguous()};
  for_format(logits.scalar_type(), [&]<class X>() {
    using A = Compute<X>;
    const int64_t V = logits.size(-1);
    const Backward<X> args{
        logits.numel() / V, V, ids.size(-1), *layout_of(logits), *layout_of(grad_logits),
        static_cast<const X*>(logits.const_data_ptr()), static_cast<X*>(grad_logits.mutable_data_ptr()),
        pointer<int64_t>(tokens), pointer<A>(divisor), pointer<A>(rows[0]), pointer<A>(rows[1]), pointer<A>(rows[2]),
        pointer<int32_t>(ids), pointer<A>(cells), pointer<A>(of_log_prob), pointer<A>(of_entropy), pointer<A>(of_cells)};
    Kernels::backward(args, logits);
  });
}

template <class Kernels>
at::Tensor token_stats_backward(
    const at::Tensor& logits, const OptionalTensor& grad_log_prob, const OptionalTensor& grad_entropy,
    const OptionalTensor& grad_cells, const at::Tensor& token_ids, const OptionalTensor& temperature,
    const at::Tensor& cell_ids, const at::Tensor& cell_log_prob, const at::Tensor& entropy, const at::Tensor& largest,
    const at::Tensor& log_norm) {
  const at::Tensor grad_logits = at::empty_like(logits, at::MemoryFormat::Contiguous);
  write_gradient<Kernels>(grad_logits, with_layout(logits), grad_log_prob, grad_entropy, grad_cells, token_ids,
                          temperature, cell_ids, cell_log_prob, entropy, largest, log_norm);
  return grad_logits;
}

// Over the logits.
template <class Kernels>
void token_stats_backward_(
    const at::Tensor& logits, const OptionalTensor& grad_log_prob, const OptionalTensor& grad_entropy,
    const OptionalTensor& grad_cells, const at::Tensor& token_ids, const OptionalTensor& temperature,
    const at::Tensor& cell_ids, const at::Tensor& cell_log_prob, const at::Tensor& entropy, const at::Tensor& largest,
    const at::Tensor& log_norm) {
  TORCH_CHECK_VALUE(logits.is_non_overlapping_and_dense(), "a gradient over logits of strides ", logits.strides(),
                    ": they must be dense");
  const at::Tensor written = with_layout(logits);
  write_gradient<Kernels>(written, written, grad_log_prob, grad_entropy, grad_cells, token_ids, temperature, cell_ids,
                          cell_log_prob, entropy, largest, log_norm);
  if (!written.is_same(logits)) logits.copy_(written);
}

template <class Kernels>
void implement(torch::Library& m) {
  m.impl("token_stats", token_stats<Kernels>);
  m.impl("token_stats_backward", token_stats_backward<Kernels>);
  m.impl("token_stats_backward_", token_stats_backward_<Kernels>);
}

}  // namespace trustregion
