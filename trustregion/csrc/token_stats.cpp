// Registers the operators of token statistics, and their CPU kernels. ../ops/token_stats.py says what they return.

#include <ATen/Parallel.h>

#include "token_stats_torch.h"

namespace trustregion {
namespace {

struct OnCpu {
  static constexpr int64_t kLargestTopk = int64_t(1) << 30;

  // Rows at once for a thread: fewer would be over before another thread has started.
  static int64_t grain(int64_t V) { return std::max<int64_t>(1, 16384 / V); }

  template <class X>
  static void forward(const Forward<X>& args, const at::Tensor&) {
    at::parallel_for(0, args.N, grain(args.V), [&](int64_t begin, int64_t end) { forward_cpu(args, begin, end); });
  }
  template <class X>
  static void backward(const Backward<X>& args, const at::Tensor&) {
    at::parallel_for(0, args.N, grain(args.V), [&](int64_t begin, int64_t end) { backward_cpu(args, begin, end); });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(trustregion, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "token_stats(Tensor logits, Tensor token_ids, Tensor? temperature, Tensor? cell_ids, int topk, "
      "bool inplace_backward) -> (Tensor log_prob, Tensor entropy, Tensor cell_ids, Tensor cell_log_prob, "
      "Tensor largest, Tensor log_norm)",
      tags);
  m.def(
      "token_stats_backward(Tensor logits, Tensor? grad_log_prob, Tensor? grad_entropy, Tensor? grad_cells, "
      "Tensor token_ids, Tensor? temperature, Tensor cell_ids, Tensor cell_log_prob, Tensor entropy, Tensor largest, "
      "Tensor log_norm) -> Tensor",
      tags);
  m.def(
      "token_stats_backward_(Tensor(a!) logits, Tensor? grad_log_prob, Tensor? grad_entropy, Tensor? grad_cells, "
      "Tensor token_ids, Tensor? temperature, Tensor cell_ids, Tensor cell_log_prob, Tensor entropy, Tensor largest, "
      "Tensor log_norm) -> ()",
      tags);
}

TORCH_LIBRARY_IMPL(trustregion, CPU, m) { implement<OnCpu>(m); }

}  // namespace trustregion
