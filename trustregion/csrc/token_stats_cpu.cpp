// Token statistics on the CPU: rows in blocks that stay in the first cache, widened there to what is computed in.

#include <algorithm>
#include <vector>

#include "instructions.h"
#include "token_stats_math.h"

namespace trustregion {
namespace {

constexpr int kBlock = 512;
constexpr int kPiece = 32;  // of a block, in the search for the largest

template <class X>
void load(Compute<X>* block, const X* x, int64_t step, int n) {
  if (step == 1) {
    SIMD()
    for (int i = 0; i < n; ++i) block[i] = widen(x[i]);
  } else {
    for (int i = 0; i < n; ++i) block[i] = widen(x[i * step]);
  }
}

template <class X>
void store(X* x, int64_t step, const Compute<X>* block, int n) {
  if (step == 1) {
    SIMD()
    for (int i = 0; i < n; ++i) narrow(block[i], x + i);
  } else {
    for (int i = 0; i < n; ++i) narrow(block[i], x + i * step);
  }
}

template <class C>
struct Entry {
  C value;
  int64_t id;
};

// The ids of the K largest logits, in falling order. At least K logits are no smaller than the K-th largest of the blocks'
// largest ones: only in the blocks that reach it, K unless there are ties, can a larger logit be.
template <class X, class C>
void find_topk(const Forward<X>& args, int64_t row, const X* x, const std::vector<Sums<C>>& parts,
               std::vector<Entry<C>>& found) {
  const int64_t K = args.K, step = args.layout.step;
  C least = -infinity<C>;
  if (int64_t(parts.size()) > K) {
    found.clear();
    for (const Sums<C>& part : parts) found.push_back({part.largest, 0});
    const auto larger = [](const Entry<C>& a, const Entry<C>& b) { return a.value > b.value; };
    std::nth_element(found.begin(), found.begin() + K - 1, found.end(), larger);
    least = found[K - 1].value;
  }

  alignas(64) C block[kBlock];
  found.clear();
  for (size_t b = 0; b < parts.size(); ++b) {
    if (parts[b].largest < least) continue;
    const int64_t start = int64_t(b) * kBlock;
    const int n = int(std::min<int64_t>(kBlock, args.V - start));
    load(block, x + start * step, step, n);
    for (int first = 0; first < n; first += kPiece) {
      const int end = std::min(n, first + kPiece);
      if (largest_of(block + first, end - first) < least) continue;
      for (int i = first; i < end; ++i)  // nan is in no order
        if (!(block[i] < least)) found.push_back({block[i] == block[i] ? block[i] : infinity<C>, start + i});
    }
  }
  const auto before = [](const Entry<C>& a, const Entry<C>& b) { return better(a.value, a.id, b.value, b.id); };
  std::nth_element(found.begin(), found.begin() + K - 1, found.end(), before);
  std::sort(found.begin(), found.begin() + K, before);
  for (int64_t k = 0; k < K; ++k) args.cell_ids[row * K + k] = int32_t(found[k].id);
}

// The sums of the tokens that are neither named nor sampled: those of the blocks without such tokens are there already.
template <class X, class C>
Sums<double> sums_of_rest(const Forward<X>& args, int64_t row, const X* x, C temperature, const std::vector<Sums<C>>& parts,
                          std::vector<int64_t>& apart) {
  alignas(64) C block[kBlock];
  apart.assign(1, args.token_ids[row]);
  for (int64_t k = 0; k < args.K; ++k)
    apart.push_back(args.topk ? args.cell_ids[row * args.K + k] : args.given_ids[row * args.K + k]);
  std::sort(apart.begin(), apart.end());
  auto next = std::lower_bound(apart.begin(), apart.end(), 0);

  Sums<double> rest;
  for (size_t b = 0; b < parts.size(); ++b) {
    Sums<C> part = parts[b];
    const int64_t start = int64_t(b) * kBlock;
    const int n = int(std::min<int64_t>(kBlock, args.V - start));
    if (next != apart.end() && *next < start + n) {
      load(block, x + start * args.layout.step, args.layout.step, n);
      for (; next != apart.end() && *next < start + n; ++next) block[*next - start] = -infinity<C>;
      part = Sums<C>();
      add(part, block, n, temperature);
    }
    merge(rest, part, double(temperature));
  }
  return rest;
}

template <class X>
void run_rows(const Forward<X>& args, int64_t begin, int64_t end) {
  using C = Compute<X>;
  alignas(64) C block[kBlock];
  std::vector<Sums<C>> parts((args.V + kBlock - 1) / kBlock);
  std::vector<int64_t> apart;
  std::vector<Entry<C>> found;
  for (int64_t row = begin; row < end; ++row) {
    const X* x = args.logits + args.layout.offset(row);
    const C temperature = of_row(args.temperature, row, C(1));
    Sums<double> all, rest;
    for (size_t b = 0; b < parts.size(); ++b) {
      const int64_t start = int64_t(b) * kBlock;
      const int n = int(std::min<int64_t>(kBlock, args.V - start));
      load(block, x + start * args.layout.step, args.layout.step, n);
      parts[b] = Sums<C>();
      add(parts[b], block, n, temperature);
      merge(all, parts[b], double(temperature));
    }
    if (args.topk) find_topk(args, row, x, parts, found);
    if (args.cells) rest = sums_of_rest(args, row, x, temperature, parts, apart);
    finish_forward(args, row, all, rest);
  }
}

template <class C, bool divide>
void to_gradient(const Slope<C>& slope, C* block, int n) {
  SIMD()
  for (int i = 0; i < n; ++i) {
    const C d = block[i] - slope.largest;
    block[i] = gradient(slope, divide ? d / slope.temperature : d);
  }
}

template <class X>
void run_rows(const Backward<X>& args, int64_t begin, int64_t end) {
  using C = Compute<X>;
  alignas(64) C block[kBlock];
  std::vector<C> named(args.K + 1);
  for (int64_t row = begin; row < end; ++row) {
    const X* x = args.logits + args.layout.offset(row);
    X* grad = args.grad_logits + args.grad_layout.offset(row);
    const int64_t step = args.layout.step, grad_step = args.grad_layout.step;
    const Slope<C> slope = start_backward(args, row, named.data());
    for (int64_t start = 0; start < args.V; start += kBlock) {
      const int n = int(std::min<int64_t>(kBlock, args.V - start));
      if (!slope.live) {
        std::fill(block, block + n, C(0));
      } else {
        load(block, x + start * step, step, n);
        slope.temperature == 1 ? to_gradient<C, false>(slope, block, n) : to_gradient<C, true>(slope, block, n);
      }
      store(grad + start * grad_step, grad_step, block, n);
    }
    if (!slope.live) continue;
    auto put = [&](int64_t id, C value) {
      if (id >= 0 && id < args.V) narrow(value, grad + id * grad_step);
    };
    put(args.token_ids[row], named[args.K]);
    for (int64_t k = 0; args.grad_cells && k < args.K; ++k) put(args.cell_ids[row * args.K + k], named[k]);
  }
}

}  // namespace

template <class X>
void forward_cpu(const Forward<X>& args, int64_t begin, int64_t end) {
  run_vectorized([&] { run_rows(args, begin, end); });
}
template <class X>
void backward_cpu(const Backward<X>& args, int64_t begin, int64_t end) {
  run_vectorized([&] { run_rows(args, begin, end); });
}

#define INSTANTIATE(X)                                                 \
  template void forward_cpu<X>(const Forward<X>&, int64_t, int64_t);   \
  template void backward_cpu<X>(const Backward<X>&, int64_t, int64_t);
INSTANTIATE(BFloat16)
INSTANTIATE(Float16)
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace trustregion
