// Transposes square tiles of numbers.
#pragma once

#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace jaxserve {

// Transposes a tile of 32-bit numbers with as many vectors as a vector has lanes: lane j of vector i goes to lane i of
// j.
inline void Turn(Vec* x) {
#if defined(__AVX512F__)  // swaps blocks across the diagonal: halves, then quarters, and so on
  for (int side = kLanes / 2; side > 0; side /= 2) {
    IntVec upper, lower;  // lanes of (a, b) that vectors of the upper half take, and of the lower half
    for (int lane = 0; lane < kLanes; lane++) {
      upper[lane] = lane & side ? kLanes + lane - side : lane;
      lower[lane] = lane & side ? kLanes + lane : lane + side;
    }
    for (int i = 0; i < kLanes; i++) {
      if (i & side) continue;
      const __m512i a = (__m512i)x[i], b = (__m512i)x[i + side];
      x[i] = (Vec)_mm512_permutex2var_epi32(a, (__m512i)upper, b);
      x[i + side] = (Vec)_mm512_permutex2var_epi32(a, (__m512i)lower, b);
    }
  }
#else
  alignas(Vec) float numbers[kLanes][kLanes];
  std::memcpy(numbers, x, sizeof numbers);
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) std::swap(numbers[i][j], numbers[j][i]);
  std::memcpy(x, numbers, sizeof numbers);
#endif
}

}  // namespace jaxserve
