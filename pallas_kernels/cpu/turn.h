// Transposes square tiles of numbers.
#pragma once

#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace jaxserve {

#if defined(__AVX512F__)
// Lanes of (a, b) that vectors take whose blocks of kSide lanes are swapped across the diagonal: those of the upper half,
// then of the lower. Constants, so that compilers have none to make.
template <int kSide>
struct Swapped {
  alignas(64) int32_t upper[kLanes], lower[kLanes];

  constexpr Swapped() : upper(), lower() {
    for (int lane = 0; lane < kLanes; lane++) {
      upper[lane] = lane & kSide ? kLanes + lane - kSide : lane;
      lower[lane] = lane & kSide ? kLanes + lane : lane + kSide;
    }
  }
};

// Swaps blocks of kSide lanes, then of half as many, and so on.
template <int kSide>
inline void SwapBlocks(Vec* x) {
  static constexpr Swapped<kSide> kSwapped;
  const __m512i upper = _mm512_load_si512(kSwapped.upper), lower = _mm512_load_si512(kSwapped.lower);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & kSide) continue;
    const __m512i a = (__m512i)x[i], b = (__m512i)x[i + kSide];
    x[i] = (Vec)_mm512_permutex2var_epi32(a, upper, b);
    x[i + kSide] = (Vec)_mm512_permutex2var_epi32(a, lower, b);
  }
  if constexpr (kSide > 1) SwapBlocks<kSide / 2>(x);
}
#endif

// Transposes a tile of 32-bit numbers with as many vectors as a vector has lanes: lane j of vector i goes to lane i of
// j.
inline void Turn(Vec* x) {
#if defined(__AVX512F__)
  SwapBlocks<kLanes / 2>(x);
#else
  alignas(Vec) float numbers[kLanes][kLanes];
  std::memcpy(numbers, x, sizeof numbers);
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) std::swap(numbers[i][j], numbers[j][i]);
  std::memcpy(x, numbers, sizeof numbers);
#endif
}

}  // namespace jaxserve
