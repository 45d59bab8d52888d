// The loops over tokens on the CPU, over [begin, end). Tokens go through in blocks, as arrays of a fixed length: loops have
// no tails, and a token's result does not depend on where it stands.
#pragma once

#include <algorithm>

#include "columns.h"
#include "policy_loss.h"

namespace trustregion {
namespace {

constexpr int BLOCK = 256;
constexpr double LOG10_E = 0.43429448190325182765;

template <class T>
void load(const Column& column, int64_t begin, int count, T* out) {
  with_reader<T>(column, [&](auto at) {
    if (column.repeat == 1) {
      for (int i = 0; i < count; ++i) out[i] = at(begin + i);
    } else {
      for (int i = 0; i < count; ++i) out[i] = at((begin + i) / column.repeat);
    }
  });
}

template <class Function>
void with_divergence(Divergence f, Function function) {
  switch (f) {
    case Divergence::kl: return function(std::integral_constant<Divergence, Divergence::kl>());
    case Divergence::reverse_kl: return function(std::integral_constant<Divergence, Divergence::reverse_kl>());
    case Divergence::tv: return function(std::integral_constant<Divergence, Divergence::tv>());
    case Divergence::chi2: return function(std::integral_constant<Divergence, Divergence::chi2>());
  }
}

// `count`: a multiple of 16, so that no tail is left.
template <Divergence f, class T>
void solve(const T* __restrict log_p, const Radii<T>& given, int count, T* __restrict lower, T* __restrict upper) {
  const Radii<T> radii = given;  // a copy no store can alias: its members are constants of the loop
  for (int i = 0; i < count; ++i) {
    Interval<T> bounds = interval<f>(log_p[i], radii);
    lower[i] = bounds.lower, upper[i] = bounds.upper;
  }
}

template <class T>
void find_band_bounds(Divergence f, Column log_prob_old, const Radii<T>& radii, T* lower, T* upper, int64_t begin,
                 int64_t end) {
  with_divergence(f, [&](auto f_constant) {
    T log_p[BLOCK], low[BLOCK], high[BLOCK];
    std::fill_n(log_p, BLOCK, T(-1));
    for (int64_t at = begin; at < end; at += BLOCK) {
      int count = static_cast<int>(std::min<int64_t>(BLOCK, end - at));
      load(log_prob_old, at, count, log_p);
      solve<f_constant.value>(log_p, radii, BLOCK, low, high);
      std::copy_n(low, count, lower + at), std::copy_n(high, count, upper + at);
    }
  });
}

template <class T>
struct Block {
  T live[BLOCK], log_prob[BLOCK], log_prob_old[BLOCK], advantage[BLOCK], weight[BLOCK], entropy_ratio[BLOCK];
  T prob_old[BLOCK], log_ratio[BLOCK], distance[BLOCK], lower[BLOCK], upper[BLOCK];
  T loss[BLOCK], factor[BLOCK], ratio[BLOCK];
  int bits[BLOCK];
};

// One column of a block. Live values that no loss can be computed from are counted, and marked in `invalid`.
template <class T, class IsValid>
void load_checked(const Column& column, int64_t begin, int count, T* out, T* invalid, const T* live, double* counter,
                  IsValid is_valid) {
  load(column, begin, count, out);
  int found = 0;
  for (int i = 0; i < BLOCK; ++i) {
    bool bad = live[i] != 0 && !is_valid(out[i]);
    invalid[i] = bad ? T(1) : invalid[i];
    found += bad;
  }
  *counter += found;
}

// `batch.prepare` for a block: what is not live, or invalid, is made an ordinary token without advantage.
template <class T>
void prepare(const TokenColumns& columns, Block<T>& b, double* statistics, int64_t begin, int count) {
  T invalid[BLOCK] = {}, entropy[BLOCK], entropy_old[BLOCK];
  std::fill(b.live + count, b.live + BLOCK, T(0));
  load(columns.mask, begin, count, b.live);
  auto log_prob_is_valid = [](T x) { return is_finite(x) && x <= T(TOLERANCE); };
  auto entropy_is_valid = [](T x) { return is_finite(x) && x >= T(-TOLERANCE); };
  auto any_finite = [](T x) { return is_finite(x); };
  double* found = statistics + INVALID;
  load_checked(columns.log_prob, begin, count, b.log_prob, invalid, b.live, found, log_prob_is_valid);
  load_checked(columns.log_prob_old, begin, count, b.log_prob_old, invalid, b.live, found + 1, log_prob_is_valid);
  load_checked(columns.advantages, begin, count, b.advantage, invalid, b.live, found + 2, any_finite);
  if (columns.weights.data) {
    load_checked(columns.weights, begin, count, b.weight, invalid, b.live, found + 3, any_finite);
  }
  if (columns.entropy.data) {
    load_checked(columns.entropy, begin, count, entropy, invalid, b.live, found + 4, entropy_is_valid);
    load_checked(columns.entropy_old, begin, count, entropy_old, invalid, b.live, found + 5, entropy_is_valid);
  }
  int dropped = 0;
  for (int i = 0; i < BLOCK; ++i) dropped += invalid[i] != 0, b.live[i] = invalid[i] != 0 ? T(0) : b.live[i];
  statistics[DROPPED_TOKENS] += dropped;
  for (int i = 0; i < BLOCK; ++i) {
    bool live = b.live[i] != 0;
    b.log_prob[i] = live ? at_most(b.log_prob[i], T(0)) : T(-1);
    b.log_prob_old[i] = live ? at_most(b.log_prob_old[i], T(0)) : T(-1);
    b.advantage[i] = live ? b.advantage[i] : T(0);
    b.log_ratio[i] = b.log_prob[i] - b.log_prob_old[i];
  }
  for (int i = 0; i < BLOCK; ++i) b.weight[i] = columns.weights.data && b.live[i] != 0 ? b.weight[i] : T(1);
  if (columns.entropy.data) {
    for (int i = 0; i < BLOCK; ++i) {
      T now = at_least(entropy[i], T(0)), old = at_least(entropy_old[i], T(0));
      b.entropy_ratio[i] = b.live[i] == 0 || (now == 0 && old == 0) ? T(1) : now / old;
    }
  } else {
    std::fill_n(b.entropy_ratio, BLOCK, T(1));
  }
}

template <class T>
void measure(const LossParameters<T>& loss, Block<T>& b) {
  with_divergence(loss.divergence, [&](auto f_constant) {
    for (int i = 0; i < BLOCK; ++i) {
      Exp<T> prob_old = exp_all(b.log_prob_old[i]);
      b.prob_old[i] = prob_old.value;
      b.distance[i] = binary_divergence<f_constant.value>(b.log_prob[i], b.log_prob_old[i], prob_old);
    }
  });
}

// The ball's bounds, solved for only where a token may be outside; elsewhere none are needed.
template <class T>
void find_ball(const LossParameters<T>& loss, Block<T>& b) {
  std::fill_n(b.lower, BLOCK, -infinity<T>), std::fill_n(b.upper, BLOCK, infinity<T>);
  int where[BLOCK], count = 0;
  for (int i = 0; i < BLOCK; ++i) {
    where[count] = i;
    count += may_be_outside(b.log_ratio[i], b.distance[i], loss);
  }
  if (count == 0) return;
  T log_p[BLOCK], lower[BLOCK], upper[BLOCK];
  int padded = (count + 15) / 16 * 16;
  for (int j = 0; j < padded; ++j) log_p[j] = b.log_prob_old[where[std::min(j, count - 1)]];
  with_divergence(loss.divergence, [&](auto f) { solve<f.value>(log_p, loss.radii, padded, lower, upper); });
  for (int j = 0; j < count; ++j) {
    Interval<T> bounds = relaxed(Interval<T>{lower[j], upper[j]}, loss);
    b.lower[where[j]] = bounds.lower, b.upper[where[j]] = bounds.upper;
  }
}

template <Region region, class T>
void find_simple(const LossParameters<T>& given, Block<T>& b) {
  const LossParameters<T> loss = given;  // as above
  for (int i = 0; i < BLOCK; ++i) {
    Interval<T> bounds = simple_interval<region>(b.log_prob_old[i], loss);
    b.lower[i] = bounds.lower, b.upper[i] = bounds.upper;
  }
}

template <class T>
void find_bounds(const LossParameters<T>& loss, Block<T>& b) {
  switch (loss.region) {
    case Region::none: return find_simple<Region::none>(loss, b);
    case Region::ratio_interval: return find_simple<Region::ratio_interval>(loss, b);
    case Region::dcpo: return find_simple<Region::dcpo>(loss, b);
    case Region::ball: return find_ball(loss, b);
  }
}

template <Surrogate surrogate, class T>
void weigh(const LossParameters<T>& given, Block<T>& b) {
  const LossParameters<T> loss = given;  // as above
  const bool is_ball = loss.region == Region::ball;
  for (int i = 0; i < BLOCK; ++i) {
    TokenLoss<T> token = token_loss<surrogate>(b.log_prob[i], b.log_ratio[i], b.advantage[i], b.distance[i],
                                               Interval<T>{b.lower[i], b.upper[i]}, b.entropy_ratio[i], loss);
    bool live = b.live[i] != 0;
    T weight = b.weight[i] * b.live[i];
    b.loss[i] = token.loss * weight, b.factor[i] = token.factor * weight, b.ratio[i] = token.ratio * b.live[i];
    T log_p = b.log_prob_old[i];
    bool capped = (is_ball & (log_p <= loss.capped_at)) | (!is_ball & ((token.bits & CAPPED) != 0));
    bool saturated = (log_p <= loss.low_saturates_at) | (log_p >= loss.high_saturates_at);
    int bits = (token.bits & ~CAPPED) | LIVE | capped * CAPPED | saturated * SATURATES;
    b.bits[i] = live ? bits : 0;
  }
}

template <class T>
void weigh(const LossParameters<T>& loss, Block<T>& b) {
  switch (loss.surrogate) {
    case Surrogate::clip: return weigh<Surrogate::clip>(loss, b);
    case Surrogate::mask: return weigh<Surrogate::mask>(loss, b);
    case Surrogate::preserve: return weigh<Surrogate::preserve>(loss, b);
    case Surrogate::cispo: return weigh<Surrogate::cispo>(loss, b);
  }
}

template <class T>
double sum(const T* x) {
  constexpr int LANES = 16;
  double lanes[LANES] = {};
  for (int i = 0; i < BLOCK; i += LANES) {
    for (int j = 0; j < LANES; ++j) lanes[j] += double(x[i + j]);
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

template <class T>
double largest(const T* x) {
  constexpr int LANES = 16;
  T lanes[LANES] = {};
  for (int i = 0; i < BLOCK; i += LANES) {
    for (int j = 0; j < LANES; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  }
  return *std::max_element(lanes, lanes + LANES);
}

// What is not live has log-ratio and divergence 0.
template <class T>
void add_statistics(const Block<T>& b, bool looks_at_entropy, double* s, int64_t* by_bits) {
  T magnitude[BLOCK], distance[BLOCK];
  int bin[BLOCK], bucket[BLOCK];
  for (int i = 0; i < BLOCK; ++i) {
    magnitude[i] = std::fabs(b.log_ratio[i]);
    distance[i] = at_most(b.distance[i], T(1e30));
    T log10_of_it = log_of(distance[i]) * T(LOG10_E);
    int edges = static_cast<int>(at_most(at_least((log10_of_it + 8) * 10 + 1, T(0)), T(101)));
    bin[i] = edges - (edges > 0 && log10_of_it < T(edges - 1) / 10 - 8);  // next to the edge at 1, the sum above rounds it away
    bucket[i] = probability_bucket(b.prob_old[i]);
  }
  s[LOG_RATIO] += sum(b.log_ratio), s[LOG_RATIO_ABS] += sum(magnitude), s[RATIO] += sum(b.ratio);
  s[DIVERGENCE] += sum(distance);
  s[LOG_RATIO_ABS_MAX] = std::max(s[LOG_RATIO_ABS_MAX], largest(magnitude));
  s[DIVERGENCE_MAX] = std::max(s[DIVERGENCE_MAX], largest(distance));
  for (int i = 0; i < BLOCK; ++i) {
    int bits = b.bits[i];
    ++by_bits[bits];
    s[DIVERGENCE_COUNTS + bin[i]] += (bits & LIVE) != 0;
    s[TOKENS_BY_BUCKET + bucket[i]] += (bits & LIVE) != 0;
    if (bits & (UP | DOWN)) s[(bits & UP ? UP_BY_BUCKET : DOWN_BY_BUCKET) + bucket[i]] += 1;
  }
  if (!looks_at_entropy) return;
  for (int i = 0; i < BLOCK; ++i) {
    if (!(b.bits[i] & LIVE)) continue;
    double ratio = b.entropy_ratio[i];
    bool lost = (b.bits[i] & BLOCKED) && ratio < 1, gained = (b.bits[i] & BLOCKED) && ratio > 1;
    s[ENTROPY_LOOKED_AT] += 1, s[ENTROPY_RATIO] += std::min(ratio, 100.0);
    s[ENTROPY_COUNTS + entropy_bin(std::log(ratio))] += 1;
    s[ENTROPY_LOST] += lost, s[ENTROPY_GAINED] += gained;
    s[ENTROPY_LOST_PROB] += lost ? b.prob_old[i] : 0, s[ENTROPY_GAINED_PROB] += gained ? b.prob_old[i] : 0;
  }
}

inline void count_bits(const int64_t* by_bits, double* s) {
  for (int bits = 0; bits < 128; ++bits) {
    if (!(bits & LIVE)) continue;
    bool outward = bits & (UP | DOWN), active = bits & ACTIVE, blocked = bits & BLOCKED;
    auto n = static_cast<double>(by_bits[bits]);
    s[TOKENS] += n;
    s[CLIPPED] += outward || blocked || !active ? n : 0;
    s[CLIPPED_UP] += bits & UP ? n : 0, s[CLIPPED_DOWN] += bits & DOWN ? n : 0;
    s[BLOCKED_BY_REGION] += outward && !active ? n : 0;
    s[BLOCKED_BY_DUAL_CLIP] += !active && !outward && !blocked ? n : 0;
    s[BLOCKED_BY_ENTROPY] += blocked ? n : 0;
    s[CAPPED_TOKENS] += bits & CAPPED ? n : 0, s[SATURATED] += bits & SATURATES ? n : 0;
  }
}

// Adds to `statistics`, an array of STATISTICS.
template <class T>
void find_policy_loss(const TokenColumns& columns, const LossParameters<T>& parameters, T* loss, T* factor, bool* active,
                 double* statistics, int64_t begin, int64_t end) {
  int64_t by_bits[128] = {};
  Block<T> b{};
  for (int64_t at = begin; at < end; at += BLOCK) {
    int count = static_cast<int>(std::min<int64_t>(BLOCK, end - at));
    prepare(columns, b, statistics, at, count);
    measure(parameters, b);
    if (parameters.region == Region::ball && parameters.surrogate == Surrogate::mask) {
      find_simple<Region::none>(parameters, b);
    } else {
      find_bounds(parameters, b);
    }
    weigh(parameters, b);
    add_statistics(b, columns.entropy.data != nullptr, statistics, by_bits);
    std::copy_n(b.loss, count, loss + at), std::copy_n(b.factor, count, factor + at);
    for (int i = 0; i < count; ++i) active[at + i] = (b.bits[i] & (ACTIVE | BLOCKED)) == ACTIVE;
  }
  count_bits(by_bits, statistics);
}

}  // namespace
}  // namespace trustregion
