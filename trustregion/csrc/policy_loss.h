// The policy loss of one token: trustregion/regions.py and surrogates.py, for host and device. T is float or double.
#pragma once

#include "mathematics.h"

namespace trustregion {

enum class Region : int { none, ratio_interval, dcpo, ball };
enum class Surrogate : int { clip, mask, preserve, cispo };

// A loss as numbers; ops/policy_loss.py fills it in. Absent limits are inf.
template <class T>
struct LossParameters {
  Region region;
  Divergence divergence;  // of the ball; for other regions that of the metrics
  Surrogate surrogate;
  T log_lower, log_upper;            // ratio_interval; ball: the interval contains at least this, 0 and 0 for nothing
  T log_eps_low, log_eps_high;       // dcpo
  Radii<T> radii;                    // ball; log_cap: also of dcpo
  T low_saturates_at, high_saturates_at, capped_at;  // ball, log-probs: at most, at least, at most
  T entropy_lower, entropy_upper;    // the open band of entropy ratios
  T dual_clip, truncation;           // clip and preserve; mask
  T beta_1, beta_2;                  // preserve; clip: both 0
};

// What is told about a token, bit by bit.
// ACTIVE: the surrogate leaves the token a gradient. BLOCKED: the entropy band takes it.
enum Bit : int { LIVE = 1, ACTIVE = 2, UP = 4, DOWN = 8, BLOCKED = 16, CAPPED = 32, SATURATES = 64 };

constexpr double MAX_LOG_RATIO = 20;
constexpr double TOLERANCE = 1e-4;

// The statistics of a call, one float64 each: ops/policy_loss.py names them in this order.
enum Statistic : int {
  TOKENS, CLIPPED, CLIPPED_UP, CLIPPED_DOWN, BLOCKED_BY_REGION, BLOCKED_BY_DUAL_CLIP, LOG_RATIO, LOG_RATIO_ABS, RATIO,
  DIVERGENCE, CAPPED_TOKENS, SATURATED, BLOCKED_BY_ENTROPY, ENTROPY_LOOKED_AT, ENTROPY_RATIO, ENTROPY_LOST,
  ENTROPY_GAINED, ENTROPY_LOST_PROB, ENTROPY_GAINED_PROB, DROPPED_TOKENS,
  TOKENS_BY_BUCKET, UP_BY_BUCKET = TOKENS_BY_BUCKET + 5, DOWN_BY_BUCKET = UP_BY_BUCKET + 5,
  INVALID = DOWN_BY_BUCKET + 5,  // of log_prob, log_prob_old, advantages, weights, entropy, entropy_old
  DIVERGENCE_COUNTS = INVALID + 6, ENTROPY_COUNTS = DIVERGENCE_COUNTS + 102,
  LOG_RATIO_ABS_MAX = ENTROPY_COUNTS + 130, DIVERGENCE_MAX, STATISTICS
};

namespace {

template <class T>
TR_FUNCTION bool is_finite(T x) { return std::fabs(x) <= largest_finite<T>; }

template <class T>
TR_FUNCTION T dcpo_upper(T log_p, const LossParameters<T>& loss) {
  constexpr T largest = sizeof(T) == 8 ? T(707.7) : T(86.7);  // beyond, eps / p is out of range and the bound its root
  T log_rise = loss.log_eps_high - log_p, rise = exp_of(at_most(log_rise, largest));
  T near = log1p_of(2 * rise / (1 + std::sqrt(1 + 4 * rise)));
  return log_rise < largest ? near : T(0.5) * log_rise;
}

template <class T>
TR_FUNCTION T dcpo_lower(T log_p, const LossParameters<T>& loss) {
  T fall = exp_of(at_most(loss.log_eps_low - log_p, T(0)));
  return log1p_of(-2 * at_most(fall, T(0.25)) / (1 + std::sqrt(at_least(1 - 4 * fall, T(0)))));
}

// Bounds of regions but the ball, before the cap.
template <Region region, class T>
TR_FUNCTION Interval<T> simple_interval(T log_p, const LossParameters<T>& loss) {
  if constexpr (region == Region::ratio_interval) return {loss.log_lower, loss.log_upper};
  if constexpr (region == Region::dcpo) return {dcpo_lower(log_p, loss), dcpo_upper(log_p, loss)};
  return {-infinity<T>, infinity<T>};
}

// Whether a token may be outside the ball. Others need no bounds: half the radius is far more than rounding.
template <class T>
TR_FUNCTION bool may_be_outside(T log_ratio, T distance, const LossParameters<T>& loss) {
  return distance > (log_ratio > 0 ? loss.radii.delta_high : loss.radii.delta_low) / 2;
}

template <class T>
TR_FUNCTION Interval<T> relaxed(Interval<T> bounds, const LossParameters<T>& loss) {
  return {at_most(bounds.lower, loss.log_lower), at_least(bounds.upper, loss.log_upper)};
}

template <class T>
struct TokenLoss {
  T loss, factor;  // to be minimised, and its derivative by log_prob
  T ratio;
  int bits;
};

// `distance`: the divergence, `bounds`: before the cap; whichever the surrogate does not use may be anything.
template <Surrogate surrogate, class T>
TR_FUNCTION TokenLoss<T> token_loss(T log_prob, T log_ratio, T advantage, T distance, Interval<T> bounds, T entropy_ratio,
                                    const LossParameters<T>& loss) {
  // & and |, not && and ||: what follows is to be vectorized, and must not branch.
  constexpr T limit = T(MAX_LOG_RATIO);
  const bool by_divergence = surrogate == Surrogate::mask && loss.region == Region::ball;
  bool capped = bounds.upper > loss.radii.log_cap;
  T upper = at_most(bounds.upper, loss.radii.log_cap);
  // Either way a comparison of two numbers.
  T rise = by_divergence ? (log_ratio > 0 ? distance : T(0)) : log_ratio;
  T fall = by_divergence ? (log_ratio < 0 ? -distance : T(0)) : log_ratio;
  bool above = rise > (by_divergence ? loss.radii.delta_high : upper);
  bool below = fall < (by_divergence ? -loss.radii.delta_low : bounds.lower);
  bool up = above & (advantage > 0), down = below & (advantage < 0), outward = up | down;
  bool blocked = !((entropy_ratio > loss.entropy_lower) & (entropy_ratio < loss.entropy_upper));

  T x = at_most(at_least(log_ratio, -limit), limit), ratio = exp_of(x);
  T inside = at_most(at_least(x, bounds.lower), upper);
  T weight = ratio, slope = ratio, value = 1;
  bool active = true;
  if constexpr (surrogate == Surrogate::mask) {
    weight = outward ? T(0) : at_most(ratio, loss.truncation);
    slope = weight, value = log_prob, active = !outward;
  } else if constexpr (surrogate == Surrogate::cispo) {
    weight = exp_of(inside);
    slope = weight, value = log_prob;
  } else {
    T at_bound = exp_of(inside);
    bool too_heavy = (advantage < 0) & (ratio > loss.dual_clip), within = std::fabs(log_ratio) <= limit;
    T beta_1 = loss.beta_1, beta_2 = loss.beta_2, beta = advantage < 0 ? beta_1 : beta_2;
    T slope_inside = within ? ratio : T(0);
    weight = outward ? at_bound : ratio;
    slope = outward ? at_bound * beta : slope_inside;
    weight = too_heavy ? loss.dual_clip : weight;
    slope = too_heavy ? T(0) : slope;
    active = (surrogate == Surrogate::clip ? within & !outward : within | outward) & !too_heavy;
  }
  weight = blocked ? T(0) : weight;
  slope = blocked ? T(0) : slope;
  return {-weight * advantage * value, -slope * advantage, ratio,
          active * ACTIVE | up * UP | down * DOWN | blocked * BLOCKED | capped * CAPPED};
}

TR_FUNCTION int clamp_bin(double x, int last) { return x < 0 ? 0 : x >= last ? last : static_cast<int>(x); }

// Bins of metrics.py: 0 below the first edge, then one between each two, the last from the last edge up. Its edges are
// -8 + i/10 of the divergence's log10, 0.03 sinh(5.727 (i - 64) / 64) of the entropy ratio's ln, and of the probability:
TR_FUNCTION int divergence_bin(double log10_of_it) { return clamp_bin((log10_of_it + 8) * 10 + 1, 101); }
TR_FUNCTION int entropy_bin(double ln_of_it) { return clamp_bin(std::asinh(ln_of_it / 0.03) * (64 / 5.727) + 65, 129); }
template <class T>
TR_FUNCTION int probability_bucket(T p) { return (p >= T(0.01)) + (p >= T(0.2)) + (p >= T(0.5)) + (p >= T(0.8)); }

}  // namespace
}  // namespace trustregion
