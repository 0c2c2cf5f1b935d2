// Masks by a binary KL, where bounds on it mostly decide. Nothing but time depends on what they decide.
#pragma once
#include "gates_sums.h"
#include "hpo/correction_rules.h"

namespace hpo::HPO_ISA {

// With t(s) = q + s (p - q) the KL divergence of q from p is (p - q)^2 times the integral of s / (t (1 - t)) over s from 0
// to 1. 1 / (t (1 - t)) is convex: its chord gives an upper bound, its tangent at the mean s = 2 / 3 a lower one. Nothing is
// decided within this of a bound, which is more than all roundings together, nor of limits or probabilities that may round by
// as much.
constexpr float kUndecided = 0.02f, kLeastLimit = 1e-3f, kLeastOther = 1.0f / 1024.0f;
constexpr float kMostLog = 18.5f;  // of (1 - q + guard) / (1 - p + guard)

struct Decided {
  Mask inside, outside;
};

// Whether the signed KL of first = log p and second = log q, within [-87, 0], lies between low < 0 and high > 0; u: their
// difference, and its exponential.
HPO_INLINE Decided decide_binary_kl(Floats second, Floats u, Floats ratio, Floats low, Floats high) {
  const Floats zero = {}, one = all<Floats>(1.0f), most = all<Floats>(1e30f);
  const Floats q = exp_of_number(second), p = q * ratio, d = p - q, other_p = one - p, other_q = one - q;
  const Floats limit = u > zero ? high : -low, bounded = limit < most ? limit : most;
  const Floats under = bounded * (1.0f - kUndecided), over = bounded * (1.0f + kUndecided), square = d * d;
  const Floats of_p = p * other_p, of_q = q * other_q, least = all<Floats>(kLeastOther);
  const Mask known = at_least(bounded, all<Floats>(kLeastLimit));
  const Mask apart = both(at_least(other_p, least), at_least(other_q, least));
  const Mask by_chord = both(apart, at_least(6.0f * under * of_p * of_q, square * (of_p + 2.0f * of_q)));
  const Mask by_fall = both(at_least(zero, u), at_least(under, -u));                       // KL <= q |u|
  const Mask by_rise = both(less(zero, u), at_least(under, kMostLog * (other_q + 1e-6f)));  // KL <= (1 - q) kMostLog
  const Floats t = Number<Floats>::fused(all<Floats>(2.0f / 3.0f), d, q);
  const Mask beyond = both(apart, at_least(square, 2.0f * over * t * (one - t)));
  return {both(known, either(by_chord, either(by_fall, by_rise))), both(known, beyond)};
}

}  // namespace hpo::HPO_ISA
