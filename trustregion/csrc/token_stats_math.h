// The mathematics of token statistics, one for the CPU's and the GPU's kernels (../token_stats.py has the formulas).
//
// A row is read once, in blocks. What has been read of it is a `Sums`; sums of parts of a row can be merged. Those of the
// cell of the rest have a largest logit of their own: from the overall one, all of the rest can underflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "token_stats.h"

#ifdef __CUDA_ARCH__
#define SIMD(clauses)
#else
#define PRAGMA(text) _Pragma(#text)
#define SIMD(clauses) PRAGMA(omp simd clauses)
#endif

namespace trustregion {
namespace {

// A log-mass whose mass is 0 in double precision too; unlike -inf it can be multiplied by 0.
constexpr float kNever = -1e4f;
template <class A>
constexpr A kNan = std::numeric_limits<A>::quiet_NaN();

// Of d_i = (x_i - largest) / temperature <= 0 over what has been read.
template <class A>
struct Sums {
  A largest = -infinity<A>;
  A ties = 0;      // how many x_i are the largest
  A below = 0;     // sum of e^(d_i) over the others
  A weighted = 0;  // sum of e^(d_i) (-d_i)
};

// The same sums, measured from a larger logit.
template <class A>
TR_FUNCTION void raise(Sums<A>& sums, A largest, A temperature) {
  if (sums.largest == largest) return;
  if (sums.largest > -infinity<A>) {
    const A d = at_least((sums.largest - largest) / temperature, A(kNever)), scale = exp_of(d), mass = sums.ties + sums.below;
    sums.weighted = (sums.weighted - mass * d) * scale;
    sums.below = mass * scale;
    sums.ties = 0;
  }
  sums.largest = largest;
}

template <class C>
TR_FUNCTION C largest_of(const C* x, int n) {
  C largest = -infinity<C>;
  SIMD(reduction(max : largest))
  for (int i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

template <class A>
TR_FUNCTION Sums<A> merged(Sums<A> a, Sums<A> b, A temperature) {
  const A largest = a.largest < b.largest ? b.largest : a.largest;
  raise(a, largest, temperature);
  raise(b, largest, temperature);
  return {largest, a.ties + b.ties, a.below + b.below, a.weighted + b.weighted};
}

template <class A, class C>
TR_FUNCTION void merge(Sums<A>& all, const Sums<C>& part, A temperature) {
  all = merged(all, Sums<A>{part.largest, part.ties, part.below, part.weighted}, temperature);
}

template <class A, class C, bool divide, bool ties>
TR_FUNCTION void add_measured(Sums<A>& sums, const C* x, int n, C temperature) {
  const C largest = C(sums.largest);
  C tied = 0, below = 0, weighted = 0;
  SIMD(reduction(+ : tied, below, weighted))
  for (int i = 0; i < n; ++i) {
    C d = x[i] - largest;
    if (divide) d /= temperature;
    d = at_least(d, C(kNever));
    const bool tie = ties && x[i] == largest;
    const C mass = tie ? C(0) : exp_of(d);
    if (ties) tied += tie ? C(1) : C(0);
    below += mass;
    weighted -= mass * d;
  }
  sums.ties += tied;
  sums.below += below;
  sums.weighted += weighted;
}

// Adds n logits. C, the type of the logits and of sums over one block, may be narrower than A. -inf adds nothing; nan,
// or inf, makes all that comes of the sums nan.
template <class A, class C>
TR_FUNCTION void add(Sums<A>& sums, const C* x, int n, C temperature) {
  const C largest = largest_of(x, n);
  if (largest == -infinity<C>) {
    for (int i = 0; i < n; ++i)
      if (x[i] != x[i]) sums.below = x[i];
    return;
  }
  if (largest > sums.largest) raise(sums, A(largest), A(temperature));
  const bool ties = largest == sums.largest, divide = temperature != 1;
  if (ties && divide) add_measured<A, C, true, true>(sums, x, n, temperature);
  if (ties && !divide) add_measured<A, C, false, true>(sums, x, n, temperature);
  if (!ties && divide) add_measured<A, C, true, false>(sums, x, n, temperature);
  if (!ties && !divide) add_measured<A, C, false, false>(sums, x, n, temperature);
}

// Order of the top-K: of equal logits the one with the lower id comes first. nan is in no order.
template <class A, class Id>
TR_FUNCTION bool better(A x, Id id, A y, Id other_id) {
  return x > y || (x == y && id < other_id);
}

// One logit of a row; nan for an id outside the vocabulary (token_stats() in Python refuses such ids, where it may sync).
template <class X>
TR_FUNCTION Compute<X> logit(const X* row, const Layout& layout, int64_t V, int64_t id) {
  return id >= 0 && id < V ? widen(row[id * layout.step]) : kNan<Compute<X>>;
}

template <class A>
TR_FUNCTION A of_row(const A* values, int64_t row, A otherwise) {
  return values ? values[row] : otherwise;
}

// All results of a row from the sums over its tokens and, with cells, over those neither named nor sampled. With topk,
// cell_ids hold the named tokens already.
template <class X, class A>
TR_FUNCTION void finish_forward(const Forward<X>& args, int64_t row, const Sums<A>& all, const Sums<A>& rest) {
  using C = Compute<X>;
  const int64_t V = args.V, K = args.K, token = args.token_ids[row];
  const X* x = args.logits + args.layout.offset(row);
  const C temperature = of_row(args.temperature, row, C(1));
  const bool finite = all.largest - all.largest == 0;
  const A largest = finite ? all.largest : kNan<A>;
  const A t = (all.ties - 1) + all.below;
  const A log_norm = finite ? std::log1p(t) : largest;
  const A log_prob = (A(logit(x, args.layout, V, token < 0 ? 0 : token)) - largest) / temperature - log_norm;
  args.largest[row] = C(largest);
  args.log_norm[row] = C(log_norm);
  args.entropy[row] = C(log_norm + all.weighted / (1 + t));
  args.log_prob[row] = token < 0 ? C(0) : C(log_prob);
  if (!args.cells) return;

  int32_t* ids = args.cell_ids + row * K;
  C* cells = args.cell_log_prob + row * (K + 2);
  A named_mass = 0;
  bool has_cell = token >= 0;
  for (int64_t k = 0; k < K; ++k) {
    if (!args.topk) ids[k] = int32_t(args.given_ids[row * K + k]);
    if (args.topk && log_norm != log_norm) ids[k] = int32_t(k);  // nan has no largest: any will do, if in range
    const A log_mass = (A(logit(x, args.layout, V, ids[k])) - largest) / temperature - log_norm;
    named_mass += exp_of(log_mass);
    cells[k] = C(log_mass);
    has_cell = has_cell && ids[k] != token;
  }
  if (has_cell) named_mass += exp_of(log_prob);
  cells[K] = has_cell ? C(log_prob) : -infinity<C>;
  // Close to 1, the rest's mass is known best by what it lacks.
  const A log_rest = std::log(rest.ties + rest.below) + (rest.largest - largest) / temperature - log_norm;
  cells[K + 1] = C(named_mass < A(0.5) ? std::log1p(-named_mass) : log_rest);
}

// The gradient of a row's unnamed logits, e^z (constant + linear z) with z = (x - largest) / temperature - shift: from
// their masses within the cell of the rest, e^z, as if all tokens were in it.
template <class C>
struct Slope {
  C temperature, largest, shift, constant, linear;
  bool live;  // else the whole row's gradient is 0, whatever its logits
};

template <class C>
TR_FUNCTION C gradient(const Slope<C>& slope, C d) {
  const C z = at_least(d - slope.shift, C(kNever));
  return exp_of(z) * (slope.constant + slope.linear * z);
}

// Slope of a row, and the gradients of the logits of its named tokens and its sampled one, in `named`, [K+1].
template <class X, class C = Compute<X>>
TR_FUNCTION Slope<C> start_backward(const Backward<X>& args, int64_t row, C* named) {
  const int64_t V = args.V, K = args.K, token = args.token_ids[row];
  const X* x = args.logits + args.layout.offset(row);
  const int32_t* ids = args.cell_ids + row * K;
  const C* cells = args.cell_log_prob + row * (K + 2);
  const C* upstream = args.grad_cells ? args.grad_cells + row * (K + 2) : nullptr;
  auto of_cell = [&](int64_t k) { return upstream && cells[k] != -infinity<C> ? upstream[k] : C(0); };

  const C of_log_prob = token < 0 ? C(0) : of_row(args.grad_log_prob, row, C(0));
  const C of_entropy = of_row(args.grad_entropy, row, C(0));
  C total = of_log_prob;
  bool live = of_log_prob != 0 || of_entropy != 0;
  for (int64_t k = 0; upstream && k < K + 2; ++k) {
    total += of_cell(k);
    live = live || of_cell(k) != 0;
  }
  Slope<C> slope{of_row(args.temperature, row, C(1)), args.largest[row], 0, 0, 0, live};
  if (!live) return slope;

  const C temperature = slope.temperature, entropy = args.entropy[row], log_norm = args.log_norm[row];
  const C of_rest = upstream ? of_cell(K + 1) : C(0);
  const C log_rest = upstream && cells[K + 1] != -infinity<C> ? cells[K + 1] : C(0), rest = exp_of(log_rest);
  slope.shift = log_norm + log_rest;
  slope.constant = -of_rest * std::expm1(log_rest) - rest * (total - of_rest) - rest * of_entropy * (log_rest + entropy);
  slope.constant /= temperature;
  slope.linear = -rest * of_entropy / temperature;

  // 1 - p without cancellation.
  auto of_named = [&](int64_t id, C own) {
    const C log_p = (logit(x, args.layout, V, id) - slope.largest) / temperature - log_norm, p = exp_of(log_p);
    const C of_p = of_entropy * (at_least(log_p, C(kNever)) + entropy);
    return (-own * std::expm1(log_p) - (total - own) * p - p * of_p) / temperature;
  };
  if (token >= 0) named[K] = of_named(token, of_log_prob + (upstream ? of_cell(K) : C(0)));
  for (int64_t k = 0; upstream && k < K; ++k) {
    named[k] = of_named(ids[k], of_cell(k) + (ids[k] == token ? of_log_prob : C(0)));
    if (ids[k] == token) named[K] = named[k];
  }
  return slope;
}

}  // namespace
}  // namespace trustregion
