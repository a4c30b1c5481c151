// Kernels in int4 and rows of x rounded to bytes, of which their products are made, with AVX512-VNNI.
#pragma once

#if defined(__AVX512VNNI__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace jaxserve {
namespace int4 {

constexpr int kAtOnce = 8;        // rows of x whose sums are in registers
constexpr int64_t kQuarter = 32;  // inputs that are scaled together; groups are a multiple
constexpr int64_t kInVector = 4;  // quarters of a vector
constexpr int64_t kVector = kInVector * kQuarter;
constexpr int64_t kBytes = 64;    // of a vector
constexpr int64_t kInChunk = 4;   // vectors of a chunk, whose quarters are as many as lanes
constexpr int64_t kAhead = 4096;  // least bytes of the kernel from what is read to what is prefetched
constexpr int64_t kInBlock = 16;  // outputs whose results are stored together

// The lane of a quarter in the sums of its chunk.
constexpr int64_t LaneOf(int64_t quarter) { return quarter % kInVector * kInChunk + quarter / kInVector % kInChunk; }

// A kernel [out, in], and what is known of it.
struct Kernel {
  const uint8_t* values;  // two a byte
  int64_t out, in;
  int64_t group, groups;  // inputs that share a scale, and how many such groups a row has
  const int8_t* zeros;    // [out, groups] or null

  int64_t Vectors() const { return (in + kVector - 1) / kVector; }
  int64_t Quarters() const { return Vectors() * kInVector; }
  int64_t Chunks() const { return (Vectors() + kInChunk - 1) / kInChunk; }
  // The bytes of vector v of an output.
  __mmask64 Mask(int64_t v) const {
    const int64_t count = std::clamp<int64_t>(in / 2 - v * kBytes, 0, kBytes);
    return count > 0 ? ~uint64_t{0} >> (kBytes - count) : 0;
  }
};

// Numbers from x on, in lanes of 32 bits; where the mask has none, zeros.
inline __m512i Lanes(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_epi32(mask, x); }
inline __m512i Lanes(const BFloat16* x, __mmask16 mask) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}
inline __m512i Lanes(const int8_t* x, __mmask16 mask) { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, x)); }

// Rows of x as bytes.
struct Bytes {
  Buffer<int8_t> values;       // [rows, chunks, kInChunk, 2, 64]: of even inputs, then of odd ones
  Buffer<float> steps;         // [rows, chunks, 16]: what a value of 1 stands for
  Buffer<int32_t> minus_sums;  // [rows, chunks, 16]: of the values of a quarter, negated
};

template <typename T>
inline void RoundRow(const T* x, const Kernel& kernel, int64_t row, Bytes& bytes) {
  thread_local Buffer<float> wide;
  thread_local Buffer<int8_t> values;
  const int64_t chunks = kernel.Chunks(), inputs = chunks * kInChunk * kVector;
  wide.assign(inputs, 0.0f), values.assign(inputs, 0);
  for (int64_t i = 0; i < kernel.in; i++) wide[i] = ToFloat(x[i]);
  float* steps = bytes.steps.data() + row * chunks * kLanes;
  int32_t* minus_sums = bytes.minus_sums.data() + row * chunks * kLanes;
  std::fill_n(steps, chunks * kLanes, 0.0f), std::fill_n(minus_sums, chunks * kLanes, 0);
  for (int64_t begin = 0; begin < kernel.in; begin += kernel.group) {
    const float most = Magnitude(wide.data() + begin, kernel.group);
    const float step = most / 127, inverse = std::isfinite(most) && most > 1e-30f ? 1 / step : 0;
    for (int64_t i = begin; i < begin + kernel.group; i += kQuarter) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t j = i; j < i + kQuarter && inverse != 0; j += kLanes) {
        const __m512i nearest = _mm512_cvtps_epi32((__m512)(Load(wide.data() + j) * inverse));
        _mm_store_si128(reinterpret_cast<__m128i*>(values.data() + j), _mm512_cvtepi32_epi8(nearest));
        sum = _mm512_add_epi32(sum, nearest);
      }
      const int64_t place = RoundDown(i / kQuarter, kLanes) + LaneOf(i / kQuarter);
      steps[place] = step, minus_sums[place] = -_mm512_reduce_add_epi32(sum);
    }
  }
  const __m512i low = _mm512_set1_epi16(255), order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const auto pack = [&](__m512i a, __m512i b) { return _mm512_permutexvar_epi64(order, _mm512_packus_epi16(a, b)); };
  int8_t* to = bytes.values.data() + row * inputs;
  for (int64_t i = 0; i < inputs; i += kVector) {
    const __m512i first = _mm512_load_si512(values.data() + i), second = _mm512_load_si512(values.data() + i + kBytes);
    _mm512_store_si512(to + i, pack(_mm512_and_si512(first, low), _mm512_and_si512(second, low)));
    _mm512_store_si512(to + i + kBytes, pack(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)));
  }
}

}  // namespace int4
}  // namespace jaxserve

#endif
