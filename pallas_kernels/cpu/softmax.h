// Turns the scores of one step into weights, with a running softmax over the steps (online, Milakov and Gimelshein,
// 2018).
#pragma once

#include <limits>

#include "step.h"
#include "vectors.h"

namespace jaxserve {

// How a query's scores are changed: scaled, capped to soft_cap * tanh(score / soft_cap) (0: not capped), and biased by
// slope * (j - back) in column j.
struct Scoring {
  float scale, soft_cap, slope, back;
};

// Makes the weights of these columns zeros, in whole vectors.
inline void Clear(float* weights, Columns columns) {
  for (int64_t j = RoundDown(columns.from, kLanes); j < columns.to; j += kLanes) Store(weights + j, Vec{});
}

// Turns a row's scores of the visible columns, at least one, into weights, and the others of `seen` into zeros.
//
// Args:
//   key_scales / value_scales: [kStep] of the step's slots, or null.
//   maximum / total: of the row's scores so far, and the sum of their weights.
// Returns: the factor for the row's sums so far.
inline float Weigh(float* scores, Columns visible, Columns seen, const Scoring& scoring, const float* key_scales,
                   const float* value_scales, float& maximum, float& total) {
  const int64_t from = RoundDown(visible.from, kLanes);
  IntVec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  const Vec column = __builtin_convertvector(lane, Vec);
  const uint32_t count = static_cast<uint32_t>(visible.to - visible.from);
  const auto is_visible = [&](int64_t j) { return (BitVec)(lane + static_cast<int32_t>(j - visible.from)) < count; };
  const float inverse_cap = 1 / scoring.soft_cap;
  Vec most = Splat(maximum);
  for (int64_t j = from; j < visible.to; j += kLanes) {
    Vec x = Load(scores + j) * scoring.scale;
    if (key_scales != nullptr) x *= Load(key_scales + j);
    if (scoring.soft_cap > 0) x = scoring.soft_cap * Tanh(x * inverse_cap);
    x += scoring.slope * (column + (static_cast<float>(j) - scoring.back));
    x = is_visible(j) ? x : Splat(-std::numeric_limits<float>::infinity());
    Store(scores + j, x);
    most = x > most ? x : most;
  }
  const float raised = Reduce(most, [](auto a, auto b) { return a > b ? a : b; });
  Vec sum{};
  for (int64_t j = from; j < visible.to; j += kLanes) {
    Vec x = Exp(Load(scores + j) - raised);
    x = is_visible(j) ? x : Vec{};
    sum += x;
    if (value_scales != nullptr) x = is_visible(j) ? x * Load(value_scales + j) : Vec{};
    Store(scores + j, x);
  }
  Clear(scores, {seen.from, from});
  Clear(scores, {RoundUp(visible.to, kLanes), seen.to});
  const float shrink = Exp(Splat(maximum - raised))[0];
  total = total * shrink + Reduce(sum, [](auto a, auto b) { return a + b; });
  maximum = raised;
  return shrink;
}

}  // namespace jaxserve
