// Binary f-divergences and the interval of log-ratios within a radius: the formulas of trustregion/divergences, with
// the reasons there, for one token on host or device. T is float or double.
#pragma once

#include "elementary.h"

namespace trustregion {

enum class Divergence : int { kl, reverse_kl, tv, chi2 };

// What the bounds need of two radii, computed once.
template <class T>
struct Radii {
  double low, high;
  T delta_low, delta_high;
  T root_low, root_high;         // sqrt(2 delta)
  T threshold, threshold_low;    // of the log-prob below which the token may vanish, and what rounding it to T lost
  T floor;                       // of complement masses: half an ulp of 1
  T chi2_floor_low, chi2_floor_high;
  T vanishes_at, fills_at;       // the token may vanish at log-probs <= the one, take all the mass at >= the other
  T log_cap;                     // of the upper bound; inf: none
};

namespace {

template <class T>
constexpr T complement_floor = std::numeric_limits<T>::epsilon() / 2;

template <class T>
Radii<T> make_radii(Divergence f, double low, double high, double vanishes_at, double fills_at, double log_cap) {
  Radii<T> r{};
  r.low = low, r.high = high;
  r.delta_low = T(low), r.delta_high = T(high);
  r.root_low = T(std::sqrt(2 * low)), r.root_high = T(std::sqrt(2 * high));
  double threshold = f == Divergence::tv ? std::log(low) : -std::log1p(1 / low);
  r.threshold = T(threshold), r.threshold_low = T(threshold - double(T(threshold)));
  r.floor = complement_floor<T>;
  r.chi2_floor_low = T(std::fmin(double(r.floor), 0.99e-8 / low));
  r.chi2_floor_high = T(std::fmin(double(r.floor), 0.99e-8 / high));
  r.vanishes_at = T(vanishes_at), r.fills_at = T(fills_at), r.log_cap = T(log_cap);
  return r;
}

// p (-ln(q/p) + q/p - 1) >= 0 of a cell of mass p that gained q - p; its log-ratio t = ln(q/p).
template <class T>
TR_FUNCTION T kl_term(T mass, T gained, T t) {
  T near = mass * (t * t * exp_series<2, sizeof(T) == 8 ? 20 : 12>(t)), far = gained - mass * t;
  return std::fabs(t) < 1 ? near : far;
}

// The same with the two policies exchanged.
template <class T>
TR_FUNCTION T reverse_kl_term(T mass, T gained, T t) {
  T new_mass = mass * exp_of(at_most(t, T(0))) + at_least(gained, T(0));
  return kl_term(new_mass, -gained, -at_least(t, T(-1000)));
}

template <Divergence f, class T>
TR_FUNCTION T term(T mass, T gained, T t) {
  constexpr T largest = sizeof(T) == 8 ? T(708.7) : T(87.7);  // no inf, which times 0 would be nan
  if constexpr (f == Divergence::kl) return kl_term(mass, gained, t);
  if constexpr (f == Divergence::reverse_kl) return reverse_kl_term(mass, gained, t);
  if constexpr (f == Divergence::tv) return T(0.5) * std::fabs(gained);
  if constexpr (f == Divergence::chi2) return gained * exp_pair(at_most(t, largest)).minus_one;
}

// D_f of {sampled token, all others}, from log-probs <= 0 under the policy and under the anchor.
template <Divergence f, class T>
TR_FUNCTION T binary_divergence(T log_prob, T log_prob_old, Exp<T> prob_old) {
  T t = log_prob - log_prob_old;
  Exp<T> prob = exp_pair(log_prob), shrinkage = exp_pair(-std::fabs(t));
  T rest = at_least(-prob.minus_one, complement_floor<T>), rest_old = at_least(-prob_old.minus_one, complement_floor<T>);
  T gained = (log_prob > log_prob_old ? prob.value : prob_old.value) * -shrinkage.minus_one;
  gained = t < 0 ? -gained : gained;
  T sampled = term<f>(at_least(prob_old.value, std::numeric_limits<T>::min()), gained, t), others = 0;
  if constexpr (f == Divergence::tv) {
    others = term<f>(rest_old, -gained, T(0));
  } else {
    T growth = -gained / rest_old;
    bool small = growth > T(-0.5);
    others = term<f>(rest_old, -gained, log_or_log1p(small, small ? growth : rest / rest_old));
  }
  return at_least(sampled + others, T(0));
}

template <class T>
struct Moved {
  T mass;  // that has changed cell
  T x;     // log-ratio of the cell that grew
};

// The shrinking cell falls by e^-z.
template <class T>
TR_FUNCTION Moved<T> move_mass(T z, T grow, T shrink, T log_grow) {
  Exp<T> kept = exp_pair(-z);
  T moved = shrink * -kept.minus_one, left = shrink * kept.value;
  bool nearly_all = moved > left, little = moved < grow;
  T argument = nearly_all ? -left : little ? moved / grow : grow + moved;
  T x = log_or_log1p(nearly_all || little, argument);
  return {moved, nearly_all || !little ? x - log_grow : x};
}

template <class T>
struct Side {
  T z, x;  // minus the log-ratio of the shrinking cell, and the log-ratio of the growing one
};

// KL(pi_old || pi) = delta: Newton from the right of the root of a convex function, whose slope is moved / (grow + moved).
template <class T>
TR_FUNCTION Side<T> kl_side(T grow, T shrink, T log_grow, T delta, T root) {
  T start = root * std::sqrt(grow / shrink) + delta / shrink, z = start;
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    Moved<T> to = move_mass(z, grow, shrink, log_grow);
    T excess = kl_term(grow, to.mass, to.x) + kl_term(shrink, -to.mass, -z) - delta;
    z = z - excess * ((grow + to.mass) / to.mass);
  }
  z = start < infinity<T> ? z : infinity<T>;
  return {z, move_mass(z, grow, shrink, log_grow).x};
}

// KL(pi || pi_old) = delta as a function of the moved mass: convex, with the slope x + z. Newton from the right, where
// Bernstein's inequality puts a start; where nearly all may go, in the mass that is left, from next to nothing up.
inline constexpr int REVERSE_KL_STEPS = 12;
TR_FUNCTION Side<double> reverse_kl_side(double grow, double shrink, double log_grow, double log_shrink, double delta) {
  double third = delta * shrink / 3, moved = third + std::sqrt(third * third + 2 * delta * grow * shrink);
  double room = (-log_grow - delta) / (shrink * (1 - log_grow));
  double needed = at_least(-log_of(at_least(room, 1e-300)), 0.0);
  double left = shrink * exp_of(-2 * needed - 3);
  bool most = moved > 0.9 * shrink;
  left = most ? left : shrink - moved;
  moved = most ? shrink - left : moved;
  double z = 0, x = 0;
  for (int step = 0; step <= REVERSE_KL_STEPS; ++step) {
    bool few = moved < 0.5 * shrink, little = moved < grow;
    z = log_or_log1p(few, few ? -moved / shrink : left);
    z = few ? -z : log_shrink - z;
    x = log_or_log1p(few ? little : true, few ? (little ? moved / grow : grow + moved) : -left);
    x = few && little ? x : x - log_grow;
    double distance = kl_term(grow + moved, -moved, -x) + kl_term(left, moved, z);
    double change = (distance - delta) / (x + z);
    change = step < REVERSE_KL_STEPS ? change : 0;
    moved -= change, left += change;
  }
  return {z, x};
}

template <class T>
TR_FUNCTION T log1p_quotient(T numerator, T denominator, T log_denominator) {
  T quotient = numerator / denominator;
  bool small = quotient < 1;
  T y = log_or_log1p(small, small ? quotient : denominator + numerator);
  return small ? y : y - log_denominator;
}

// ln(1 - fall), where 1 - fall is `remaining`, known without cancellation.
template <class T>
TR_FUNCTION T log_remaining(T fall, T remaining) {
  bool small = fall < T(0.5);
  return log_or_log1p(small, small ? -fall : remaining);
}

template <class T>
struct Interval {
  T lower, upper;  // log-ratios
};

template <Divergence f, class T>
TR_FUNCTION Interval<T> unsaturated_interval(T log_p, const Radii<T>& r) {
  if constexpr (f == Divergence::kl) {
    T clamped = at_least(log_p, T(-1000));
    Exp<T> p = exp_pair(clamped);
    T c = at_least(-p.minus_one, r.floor);
    T growth = kl_side(p.value, c, clamped, r.delta_high, r.root_high).x;
    T decay = kl_side(c, p.value, log_of(c), r.delta_low, r.root_low).z;
    return {-decay, growth + (clamped - log_p)};
  }
  if constexpr (f == Divergence::reverse_kl) {  // in float64: near saturation the divergence cancels
    double clamped = at_least(double(log_p), -1e5);
    Exp<double> p = exp_pair(clamped);
    double c = at_least(-p.minus_one, double(r.floor)), log_c = log_of(c);
    return {T(-reverse_kl_side(c, p.value, log_c, clamped, r.low).z),
            T(reverse_kl_side(p.value, c, clamped, log_c, r.high).x + (clamped - double(log_p)))};
  }
  if constexpr (f == Divergence::tv) {
    T p = exp_of(log_p), remaining = -exp_pair((r.threshold - log_p) + r.threshold_low).minus_one;
    return {log_remaining(r.delta_low / p, remaining), log1p_quotient(r.delta_high, p, log_p)};
  }
  if constexpr (f == Divergence::chi2) {
    T c = -exp_pair(log_p).minus_one, root_p = exp_of(T(0.5) * log_p);
    T low = std::sqrt(r.delta_low * at_least(c, r.chi2_floor_low));
    T high = std::sqrt(r.delta_high * at_least(c, r.chi2_floor_high));
    T fall = low / root_p, beyond = -exp_pair((r.threshold - log_p) + r.threshold_low).minus_one;
    return {log_remaining(fall, (1 + r.delta_low) * beyond / (1 + fall)),
            log1p_quotient(high, root_p, T(0.5) * log_p)};
  }
}

template <Divergence f, class T>
TR_FUNCTION Interval<T> interval(T log_p, const Radii<T>& r) {
  log_p = at_most(log_p, T(0));
  Interval<T> bounds = unsaturated_interval<f>(log_p, r);
  T lower = log_p <= r.vanishes_at ? -infinity<T> : bounds.lower;
  T upper = log_p >= r.fills_at ? -log_p : bounds.upper;
  upper = at_most(at_most(at_least(upper, T(0)), -log_p), r.log_cap);
  return {at_most(lower, T(0)), upper};
}

}  // namespace
}  // namespace trustregion
