// Binary f-divergences and the interval of log-ratios within a radius: the formulas of trustregion/divergences, with
// the reasons there, for one token on host or device. T is float or double.
#pragma once

#include "elementary.h"

namespace trustregion {

enum class Divergence : int { kl, reverse_kl, tv, chi2 };

// What the bounds need of two radii, computed once.
template <class T>
struct Radii {
  double low, high, log_low, log_high;  // for reverse_kl, within a range whose squares are floats
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
  r.low = std::fmin(std::fmax(low, 1e-200), 1e4), r.high = std::fmin(std::fmax(high, 1e-200), 1e4);
  r.log_low = std::log(r.low), r.log_high = std::log(r.high);
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

// D_f of {sampled token, all others}, from log-probs <= 0 under the policy and under the anchor.
template <Divergence f, class T>
TR_FUNCTION T binary_divergence(T log_prob, T log_prob_old, Exp<T> prob_old) {
  constexpr T largest = f != Divergence::chi2 ? largest_finite<T> : sizeof(T) == 8 ? T(708.7) : T(87.7);  // e^t is no inf
  T t = log_prob - log_prob_old, d = at_most(std::fabs(t), largest);
  Exp<T> prob = exp_all(log_prob), kept = exp_all(-d);
  T rest = at_least(-prob.minus_one, complement_floor<T>), rest_old = at_least(-prob_old.minus_one, complement_floor<T>);
  T larger = t > 0 ? prob.value : prob_old.value, lost = -kept.minus_one, moved = larger * lost;
  if constexpr (f == Divergence::tv) return moved;
  T gained = t > 0 ? -moved : moved, growth = gained / rest_old, left = rest / rest_old;  // of the others
  bool small = growth > T(-0.5);
  if constexpr (f == Divergence::chi2) {
    return moved * (t > 0 ? lost / kept.value : lost) + gained * (small ? growth : left - 1);
  }

  // Each cell's u ln(u/v) - u + v, in u the larger mass and in u the smaller one: no term is negative.
  T from_larger = larger * kept.rest, from_smaller = larger * (d < 1 ? d * lost - kept.rest : lost - d * kept.value);
  Log<T> log = log_all(small, small ? growth : left);
  T change = !small & (log.value > -1) ? left - 1 : growth;  // of masses at their floor, growth may be anything
  T sampled = 0, others = 0;
  if constexpr (f == Divergence::kl) {
    sampled = t > 0 ? from_smaller : from_larger;
    others = small ? log.rest : change - log.value;
  } else {
    sampled = t > 0 ? from_larger : from_smaller;
    others = small ? growth * log.value - log.rest : left * log.value - change;
  }
  return at_least(sampled + rest_old * others, T(0));
}

template <class T>
struct Side {
  T z, x;  // minus the log-ratio of the shrinking cell, and the log-ratio of the growing one
};

// KL(pi_old || pi) = delta for z. The slope is moved / q with q the grown mass, its slope grow left / q^2, and that one's
// -(1 + 2 left / q) times as much. The start is off by at most 1.2 %: with t = sqrt(2 delta / (grow shrink)), z / grow is
// t + (1 + shrink) t^2 / 6 for small t and t^2 / 2 for large, between them a fit. A step of fourth order then leaves a
// relative error of 4e-9, a second one none, for every delta and p.
template <class T>
TR_FUNCTION Side<T> kl_side(T grow, T shrink, T log_grow, T delta, T root) {
  T inverse = 1 / grow, ratio = std::sqrt(grow / shrink), t = at_most(root * ratio * inverse, T(1e15));
  T a = T(0.99036) - T(0.04337) * shrink, b = T(0.37282) - T(0.28227) * shrink;
  T z = root * ratio + delta / shrink * (1 - (2 - shrink + 2 * b * t) / (3 + t * (a + b * t))), x = 0, left = 0;
  TR_UNROLL for (int step = 0; step < (sizeof(T) == 8 ? 2 : 1); ++step) {
    Exp<T> kept = exp_all(-z);
    T moved = shrink * -kept.minus_one, growth = moved * inverse;
    Log<T> rise = log_all(true, growth);
    left = shrink * kept.value;
    T excess = (shrink * kept.rest + grow * rise.rest) - delta;
    T flow = left / (grow + moved), newton = excess / moved * (grow + moved);  // in this order: their product may underflow
    T bend = newton * flow / growth;
    T change = newton * (1 + T(0.5) * bend * (1 + bend + newton * (1 + 2 * flow) / 3));
    z = z < infinity<T> ? z - change : z;
    x = rise.value - change * flow * (1 + T(0.5) * change * (1 + flow) * (1 + change * (1 + 2 * flow) / 3));
    left += left > 0 ? left * change * (1 + T(0.5) * change * (1 + change / 3)) : T(0);  // the change may be inf
  }
  // Exact where hardly anything is left: ln(1 - left) - ln(grow).
  constexpr T far = sizeof(T) == 8 ? 10 : 5;
  return {z, z < far ? x : -(left * (1 + left * (T(0.5) + left / 3)) + log_grow)};
}

// KL(pi || pi_old) = delta as a function of the moved mass: convex, with the slope x + z. It starts next to Bernstein's
// inequality or, where most may go, in the mass that is left, from the first terms of an expansion there. Halley's
// method leaves a relative error of 1e-2, 2e-8, none, for delta from 1e-12 up and every p.
TR_FUNCTION Side<double> reverse_kl_side(double grow, double shrink, double log_grow, double log_shrink, double delta,
                                         double log_delta, int steps) {
  double third = delta * shrink / (3 + 0.5 * at_least(log_delta - log_grow + 1, 0.0));
  double moved = third + std::sqrt(third * third + 2 * delta * grow * shrink);
  double all = 1 - log_grow, room = at_least((-log_grow - delta) / (shrink * all), 1e-15);
  double needed = at_least(-log_of(room), 0.0), more = needed / all;
  double few_left = shrink * all * room / (all + needed + more * (6 + more) / (6 + 4 * more));
  bool most = moved > 0.6 * shrink;
  double left = most ? few_left : shrink - moved;
  moved = most ? shrink - left : moved;
  double fall = 1 / shrink, rise = 1 / grow, z = 0, x = 0;
  TR_UNROLL for (int step = 0; step < steps; ++step) {
    bool few = moved < 0.5 * shrink, little = moved < grow;
    double lost = moved * fall, gained = moved * rise, grown = grow + moved;
    Log<double> of_fall = log_all(few, few ? -lost : left);
    Log<double> of_rise = log_all(little | !few, little ? gained : few ? grown : -left);
    z = few ? -of_fall.value : log_shrink - of_fall.value;
    x = little ? of_rise.value : of_rise.value - log_grow;
    double of_shrinking = few ? shrink * (lost * lost - (1 - lost) * of_fall.rest) : moved - left * z;
    double of_growing = little ? grow * (gained * x - of_rise.rest) : grown * x - moved;
    double slope = x + z, missing = at_most(delta - (of_shrinking + of_growing), 0.5 * left * slope);  // some is to be left
    double change = missing / (slope + 0.5 * missing / (grown * left * slope));
    double in_left = change / left, in_grown = change / grown;
    moved += change, left -= change;
    z += in_left * (1 + in_left * (0.5 + in_left / 3));
    x += in_grown * (1 - in_grown * (0.5 - in_grown / 3));
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
    // Of a mass below, 1 / p overflows; by then what the token may grow to no longer depends on p.
    constexpr T least = 4 * smallest_normal<T>, log_least = T((std::numeric_limits<T>::min_exponent + 1) * 0.69314718055994531);
    Exp<T> p = exp_all(log_p);
    T c = at_least(-p.minus_one, r.floor), clamped = at_least(log_p, log_least);
    T growth = kl_side(at_least(p.value, least), c, clamped, r.delta_high, r.root_high).x;
    T decay = kl_side(c, p.value, T(0), r.delta_low, r.root_low).z;
    return {-decay, growth + (clamped - log_p)};
  }
  if constexpr (f == Divergence::reverse_kl) {  // in float64: near saturation the divergence cancels
    double clamped = at_least(double(log_p), -1e5);
    Exp<double> p = exp_all(clamped);
    double c = at_least(-p.minus_one, double(r.floor)), log_c = log_of(c);
    constexpr int steps = sizeof(T) == 8 ? 3 : 2;
    return {T(-reverse_kl_side(c, p.value, log_c, clamped, r.low, r.log_low, steps).z),
            T(reverse_kl_side(p.value, c, clamped, log_c, r.high, r.log_high, steps).x + (clamped - double(log_p)))};
  }
  if constexpr (f == Divergence::tv) {
    T p = exp_of(log_p), remaining = -exp_all((r.threshold - log_p) + r.threshold_low).minus_one;
    return {log_remaining(r.delta_low / p, remaining), log1p_quotient(r.delta_high, p, log_p)};
  }
  if constexpr (f == Divergence::chi2) {
    T c = -exp_all(log_p).minus_one, root_p = exp_of(T(0.5) * log_p);
    T low = std::sqrt(r.delta_low * at_least(c, r.chi2_floor_low));
    T high = std::sqrt(r.delta_high * at_least(c, r.chi2_floor_high));
    T fall = low / root_p, beyond = -exp_all((r.threshold - log_p) + r.threshold_low).minus_one;
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
