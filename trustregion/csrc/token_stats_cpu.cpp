// Token statistics on the CPU: rows in blocks that stay in the first cache, widened there to what is computed in.

#include <algorithm>
#include <vector>

#include "token_stats_math.h"

namespace trustregion {
namespace {

constexpr int kBlock = 2048;

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

// The K largest logits offered, on a heap whose top is the worst of them.
template <class C>
class Topk {
 public:
  struct Entry {
    C value;
    int64_t id;
  };

  void start(int64_t K) {
    K_ = K;
    heap_.clear();
  }

  // Takes those of a block's logits that belong here, and leaves what they displace in their place, -inf for nothing.
  void take(C* block, int n, int64_t first_id, int64_t not_this) {
    int i = 0;
    for (; i < n && int64_t(heap_.size()) < K_; ++i) {
      if (first_id + i == not_this) continue;
      heap_.push_back({block[i] == block[i] ? block[i] : kInfinity<C>, first_id + i});  // nan has no order
      std::push_heap(heap_.begin(), heap_.end(), before);
      block[i] = -kInfinity<C>;
    }
    if (i == n) return;
    C largest = -kInfinity<C>;
    SIMD(reduction(max : largest))
    for (int j = 0; j < n; ++j) largest = block[j] > largest ? block[j] : largest;
    if (largest < heap_.front().value) return;
    for (; i < n; ++i)
      if (block[i] >= heap_.front().value) block[i] = exchange(block[i], first_id + i);
  }

  // The value that does not belong here after all: the one offered, or what it displaces.
  C exchange(C value, int64_t id) {
    if (!better(value, id, heap_.front().value, heap_.front().id)) return value;
    const C displaced = heap_.front().value;
    std::pop_heap(heap_.begin(), heap_.end(), before);
    heap_.back() = {value, id};
    std::push_heap(heap_.begin(), heap_.end(), before);
    return displaced;
  }

  bool has(int64_t id) const {
    return std::any_of(heap_.begin(), heap_.end(), [&](const Entry& entry) { return entry.id == id; });
  }

  // In falling order; ends the heap.
  void write(int32_t* ids) {
    std::sort_heap(heap_.begin(), heap_.end(), before);
    for (const Entry& entry : heap_) *ids++ = int32_t(entry.id);
  }

 private:
  static bool before(const Entry& a, const Entry& b) { return better(a.value, a.id, b.value, b.id); }
  int64_t K_ = 0;
  std::vector<Entry> heap_;
};

template <class X>
void run_rows(const Forward<X>& args, int64_t begin, int64_t end) {
  using C = Compute<X>;
  alignas(64) C block[kBlock];
  std::vector<int64_t> apart;  // the ids that are no part of the rest, in order
  Topk<C> topk;
  for (int64_t row = begin; row < end; ++row) {
    const X* x = args.logits + args.layout.offset(row);
    const C temperature = of_row(args.temperature, row, C(1));
    const int64_t token = args.token_ids[row], step = args.layout.step;
    apart.clear();
    if (args.given_ids) apart.assign(args.given_ids + row * args.K, args.given_ids + (row + 1) * args.K);
    apart.push_back(token);
    std::sort(apart.begin(), apart.end());
    topk.start(args.topk ? args.K : 0);

    Sums<double> rest;
    auto next = std::lower_bound(apart.begin(), apart.end(), 0);
    for (int64_t start = 0; start < args.V; start += kBlock) {
      const int n = int(std::min<int64_t>(kBlock, args.V - start));
      load(block, x + start * step, step, n);
      for (; next != apart.end() && *next < start + n; ++next) block[*next - start] = -kInfinity<C>;
      if (args.topk) topk.take(block, n, start, token);
      add(rest, block, n, temperature);
    }
    if (args.topk) {
      const C sampled = token < 0 ? -kInfinity<C> : logit(x, args.layout, args.V, token);
      const C displaced = token < 0 ? sampled : topk.exchange(sampled, token);
      if (topk.has(token)) add(rest, &displaced, 1, temperature);
      topk.write(args.cell_ids + row * args.K);
    }
    finish_forward(args, row, rest);
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

// The same loops for several instruction sets: everything they call is inlined, and so compiled for each.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
template <class Args>
__attribute__((flatten, target("avx2,fma"))) void run_avx2(const Args& args, int64_t begin, int64_t end) {
  run_rows(args, begin, end);
}
template <class Args>
__attribute__((flatten, target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void run_avx512(
    const Args& args, int64_t begin, int64_t end) {
  run_rows(args, begin, end);
}
template <class Args>
void run(const Args& args, int64_t begin, int64_t end) {
  if (__builtin_cpu_supports("x86-64-v4")) return run_avx512(args, begin, end);
  if (__builtin_cpu_supports("x86-64-v3")) return run_avx2(args, begin, end);
  run_rows(args, begin, end);
}
#else
template <class Args>
void run(const Args& args, int64_t begin, int64_t end) {
  run_rows(args, begin, end);
}
#endif

}  // namespace

template <class X>
void forward_cpu(const Forward<X>& args, int64_t begin, int64_t end) {
  run(args, begin, end);
}
template <class X>
void backward_cpu(const Backward<X>& args, int64_t begin, int64_t end) {
  run(args, begin, end);
}

#define INSTANTIATE(X)                                                 \
  template void forward_cpu<X>(const Forward<X>&, int64_t, int64_t);   \
  template void backward_cpu<X>(const Backward<X>&, int64_t, int64_t);
INSTANTIATE(BFloat16)
INSTANTIATE(Float16)
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace trustregion
