// Products of bfloat16 with AVX512-BF16: the instruction adds two neighbouring products to each of 16 sums. So two rows
// of the right operand are interleaved in pairs, with the two numbers of each column next to each other.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <algorithm>

#include "vectors.h"

namespace jaxserve {

constexpr int64_t kLinePairs = 16;  // in a cache line

// Interleaves two rows into pairs; without a lower row (null), pairs with zeros. Writes whole vectors of 16 pairs.
inline void PairUpRows(const BFloat16* upper, const BFloat16* lower, int64_t columns, BFloat16* paired) {
  constexpr int kNumbers = 2 * kLanes;  // in a vector
  typedef int16_t Indices __attribute__((vector_size(2 * kNumbers)));
  Indices first, second;  // indices into (upper, lower) of the first 16 pairs, and of the other 16
  for (int i = 0; i < kNumbers; i++) {
    first[i] = static_cast<int16_t>(i / 2 + i % 2 * kNumbers);
    second[i] = static_cast<int16_t>(first[i] + kLanes);
  }
  for (int64_t n = 0; n < columns; n += kNumbers) {
    const int64_t count = std::min<int64_t>(kNumbers, columns - n);
    const __mmask32 mask = ~uint32_t{0} >> (kNumbers - count);
    const __m512i above = _mm512_maskz_loadu_epi16(mask, upper + n);
    const __m512i below = lower == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, lower + n);
    _mm512_storeu_si512(paired + 2 * n, _mm512_permutex2var_epi16(above, (__m512i)first, below));
    if (count > kLanes)
      _mm512_storeu_si512(paired + 2 * (n + kLanes), _mm512_permutex2var_epi16(above, (__m512i)second, below));
  }
}

// c [kRows, kWidth vectors] (+)= a [kRows, numbers] * b, as pairs [numbers / 2, kWidth vectors] that are b_stride
// numbers apart. The terms of a sum are added in order. The next rows of a are prefetched into the L2 cache.
template <int kRows, int kWidth>
inline void MultiplyPairs(const BFloat16* a, int64_t a_stride, int64_t numbers, const BFloat16* b, int64_t b_stride,
                          float* c, int64_t c_stride, bool add) {
  __m512 sums[kRows][kWidth];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++)
      sums[i][j] = add ? _mm512_loadu_ps(c + i * c_stride + j * kLanes) : _mm512_setzero_ps();
  const auto add_pair = [&](int64_t k, size_t bytes) {
    __m512bh row[kWidth];
    for (int j = 0; j < kWidth; j++) row[j] = (__m512bh)_mm512_loadu_si512(b + k * b_stride + j * 2 * kLanes);
    for (int i = 0; i < kRows; i++) {
      int32_t pair = 0;
      std::memcpy(&pair, a + i * a_stride + 2 * k, bytes);
      const __m512bh everywhere = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < kWidth; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], everywhere, row[j]);
    }
  };
  int64_t k = 0;
  for (; k + kLinePairs <= numbers / 2; k += kLinePairs) {
    for (int i = 0; i < kRows; i++)
      __builtin_prefetch(a + (kRows + i) * a_stride + 2 * k, /*rw=*/0, /*locality=*/2);
    for (int64_t j = k; j < k + kLinePairs; j++) add_pair(j, 2 * sizeof(BFloat16));
  }
  for (; k < numbers / 2; k++) add_pair(k, 2 * sizeof(BFloat16));
  if (numbers % 2) add_pair(k, sizeof(BFloat16));
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) _mm512_storeu_ps(c + i * c_stride + j * kLanes, sums[i][j]);
}

// The same for any number of rows: kRows at a time, then half of that, and so on.
template <int kRows, int kWidth>
inline void MultiplyAllPairs(int64_t rows, const BFloat16* a, int64_t a_stride, int64_t numbers, const BFloat16* b,
                             int64_t b_stride, float* c, int64_t c_stride, bool add) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    MultiplyPairs<kRows, kWidth>(a + i * a_stride, a_stride, numbers, b, b_stride, c + i * c_stride, c_stride, add);
  if constexpr (kRows > 1)
    MultiplyAllPairs<kRows / 2, kWidth>(rows - i, a + i * a_stride, a_stride, numbers, b, b_stride, c + i * c_stride,
                                        c_stride, add);
}

}  // namespace jaxserve

#endif
