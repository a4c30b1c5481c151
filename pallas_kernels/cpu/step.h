// A step of attention: some slots of a chunk's row, and the products of queries with their keys and of weights with
// their values.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pairs.h"
#include "vectors.h"

namespace jaxserve {

constexpr int kStep = 128;               // slots whose scores are computed at a time
constexpr int kScores = kStep + kLanes;  // and a whole vector after the last

// Slots of one step that lie in one block: the step's columns from `column` on.
struct Run {
  int64_t place, slot, column, count;

  // The part of it from a column on; may be empty.
  Run From(int64_t first) const {
    const int64_t skipped = std::max<int64_t>(0, first - column);
    return {place, slot + skipped, column + skipped, count - skipped};
  }
};

struct Step {
  int size = 0;
  Run runs[kStep];
};

// Columns of a step that some queries see, from the first to before the last.
struct Columns {
  int64_t from, to;

  bool empty() const { return from >= to; }
};

// Products in float32; keys and values are read in the pool's layout.
template <typename Q, typename P>
class PlainProducts {
 public:
  // Args: query: row -> its numbers.
  template <typename Query>
  void TakeQueries(int64_t rows, int64_t dim, const Query& query) {
    queries_.resize(rows * dim);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d++) queries_[r * dim + d] = ToFloat(query(r)[d]);
  }

  template <typename Call>
  void TakeStep(const Call&, const Step&, const Step& /*next*/) {}

  // scores [some, kScores] of the rows from `first` on with the slots that they see. Whole vectors are written.
  template <typename Call>
  void Score(const Call& call, const Step& step, int64_t first, int some, Columns seen, float* scores) const {
    for (int i = 0; i < step.size && step.runs[i].column < seen.to; i++) {
      const Run run = step.runs[i].From(seen.from);
      if (run.count <= 0) continue;
      const int64_t wanted = std::min(run.count, seen.to - run.column);
      // Whole vectors, as far as the block goes; columns beyond `wanted` are overwritten or ignored.
      const int64_t columns = std::min(RoundUp(wanted, kLanes), call.size - run.slot);
      Multiply<false>(some, &queries_[first * call.dim], call.dim, call.KeysOf(run), call.size, call.dim,
                      scores + run.column, kScores, columns, call.ValuesOf(run));
    }
  }

  // sums [some, dim in whole vectors] += weights [some, kScores] * values of the slots that they see.
  template <typename Call>
  void AddValues(const Call& call, const Step& step, const Step& next, int some, Columns seen, const float* weights,
                 float* sums) const {
    const int64_t width = RoundUp(call.dim, kLanes);
    for (int i = 0; i < step.size && step.runs[i].column < seen.to; i++) {
      const Run run = step.runs[i].From(seen.from);
      if (run.count <= 0) continue;
      const P* later = i < next.size ? call.KeysOf(next.runs[i]) : call.ValuesOf(run);
      Multiply<true>(some, weights + run.column, kScores, call.ValuesOf(run), call.dim,
                     std::min(run.count, seen.to - run.column), sums, width, call.dim, later);
    }
  }

 private:
  Buffer<float> queries_;  // [rows, dim]
};

#if defined(__AVX512BF16__)

// The same in bfloat16 by the CPU's own instruction: a step's keys and values are put into pairs, once for all rows.
// Weights are rounded to bfloat16.
class PairedProducts {
 public:
  template <typename Query>
  void TakeQueries(int64_t rows, int64_t dim, const Query& query) {
    queries_.resize(rows * dim);
    for (int64_t r = 0; r < rows; r++) std::copy_n(query(r), dim, &queries_[r * dim]);
  }

  // Prefetches into the L2 cache: the values while keys are multiplied, the next step's keys while
  // values are multiplied.
  template <typename Call>
  void TakeStep(const Call& call, const Step& step, const Step& next) {
    const int64_t dim = call.dim, width = RoundUp(dim, kLanes);
    keys_.resize(RoundUp(dim, 2) * kScores);
    values_.resize(kStep * width);
    const BFloat16* slots[kStep + 1] = {};
    int64_t from = step.runs[0].column, to = from;
    for (int i = 0; i < step.size; i++) {
      const Run& run = step.runs[i];
      const BFloat16 *key = call.KeysOf(run), *value = call.ValuesOf(run);
      for (int64_t j = 0; j < run.count; j++) slots[to++] = value + j * dim;
      for (int64_t d = 0; d < dim; d += 2, key += 2 * call.size) {
        Fetch(value + d * run.count, 2 * run.count);
        PairUpRows(key, d + 1 < dim ? key + call.size : nullptr, run.count, &keys_[d * kScores + 2 * run.column]);
      }
    }
    if (from % 2 > 0) {  // the other slot of the pair has a weight of 0
      slots[from - 1] = slots[from];
      from--;
    }
    const int64_t count = to - from;
    for (int64_t s = from; s < to; s += 2) {
      for (int64_t d = (s - from) * dim / count; d < std::min(s - from + 2, count) * dim / count; d++)
        for (int i = 0; i < next.size; i++) Fetch(call.KeysOf(next.runs[i]) + d * call.size, next.runs[i].count);
      PairUpRows(slots[s], slots[s + 1], dim, &values_[s * width]);
    }
  }

  template <typename Call>
  void Score(const Call& call, const Step&, int64_t first, int some, Columns seen, float* scores) const {
    const int64_t from = RoundDown(seen.from, kLanes);
    Multiply(some, &queries_[first * call.dim], call.dim, call.dim, &keys_[2 * from], kScores, scores + from, kScores,
             RoundUp(seen.to - from, kLanes), false);
  }

  template <typename Call>
  void AddValues(const Call& call, const Step&, const Step& /*next*/, int some, Columns seen, const float* weights,
                 float* sums) const {
    const int64_t width = RoundUp(call.dim, kLanes), from = RoundDown(seen.from, 2);
    alignas(64) BFloat16 rounded[kMostRows * kStep];
    for (int r = 0; r < some; r++)
      for (int64_t j = RoundDown(from, kLanes); j < seen.to; j += kLanes) {
        const __m256bh some_of_them = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + r * kScores + j));
        std::memcpy(rounded + r * kStep + j, &some_of_them, sizeof some_of_them);
      }
    Multiply(some, rounded + from, kStep, seen.to - from, &values_[from * width], width, sums, width, width, true);
  }

 private:
  static constexpr int kVectorsAtOnce = 4;

  // c [rows, columns] (+)= a [rows, numbers] * b, as pairs [numbers / 2, b_columns].
  static void Multiply(int rows, const BFloat16* a, int64_t a_stride, int64_t numbers, const BFloat16* b,
                       int64_t b_columns, float* c, int64_t c_stride, int64_t columns, bool add) {
    int64_t n = 0;
    for (; n + kVectorsAtOnce * kLanes <= columns; n += kVectorsAtOnce * kLanes)
      MultiplyAllPairs<kMostRows, kVectorsAtOnce>(rows, a, a_stride, numbers, b + 2 * n, 2 * b_columns, c + n, c_stride,
                                                  add);
    for (; n < columns; n += kLanes)
      MultiplyAllPairs<kMostRows, 1>(rows, a, a_stride, numbers, b + 2 * n, 2 * b_columns, c + n, c_stride, add);
  }

  static void Fetch(const BFloat16* p, int64_t count) {
    for (int64_t i = 0; i < count; i += static_cast<int64_t>(kCacheLine / sizeof(BFloat16)))
      __builtin_prefetch(p + i, /*rw=*/0, /*locality=*/2);
  }

  Buffer<BFloat16> queries_, keys_, values_;  // [rows, dim], [dim / 2, kScores] pairs, [kStep / 2, width] pairs
};

template <typename Q, typename P>
using Products = std::conditional_t<std::is_same_v<Q, BFloat16> && std::is_same_v<P, BFloat16>, PairedProducts,
                                    PlainProducts<Q, P>>;

#else

template <typename Q, typename P>
using Products = PlainProducts<Q, P>;

#endif

}  // namespace jaxserve
