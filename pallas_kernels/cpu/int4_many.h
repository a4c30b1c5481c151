// Products of many rows by a kernel in int4. The numbers of 16 outputs are unpacked and transposed for all rows: lanes are
// outputs, so nothing is added up across them.
#pragma once

#if defined(__AVX512VNNI__)

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "int4.h"
#include "turn.h"
#include "vectors.h"

namespace jaxserve {
namespace int4 {

constexpr int64_t kFours = kQuarter / 4;

// Rounded rows in groups of kAtOnce, four values a number.
struct Groups {
  Buffer<int32_t> fours;  // [groups, quarters, kFours, kAtOnce]: of even inputs, then of odd ones
  Buffer<float> steps;    // [groups, quarters, kAtOnce], as in Bytes
  Buffer<int32_t> minus_sums;

  void Reserve(const Kernel& kernel, int64_t rows) {
    const int64_t lanes = RoundUp(rows, kAtOnce) * kernel.Quarters();
    fours.resize(lanes * kFours), steps.resize(lanes), minus_sums.resize(lanes);
  }

  void Take(const Kernel& kernel, const Bytes& bytes, int64_t row) {
    const int64_t quarters = kernel.Quarters(), first = row / kAtOnce * quarters, r = row % kAtOnce;
    for (int64_t at = 0; at < quarters; at++) {
      const int64_t from = row * kernel.Chunks() * kLanes, to = (first + at) * kAtOnce + r;
      const int8_t* x = bytes.values.data() + (from + at) / kInVector * kVector + at % kInVector * kLanes;
      for (int64_t i = 0; i < kFours; i++)
        std::memcpy(&fours[((first + at) * kFours + i) * kAtOnce + r], x + i / 4 * kBytes + i % 4 * 4, 4);
      const int64_t place = from + RoundDown(at, kLanes) + LaneOf(at);
      steps[to] = bytes.steps[place], minus_sums[to] = bytes.minus_sums[place];
    }
  }
};

// Outputs [begin, end) of a kernel, at most 16. Lanes are outputs.
struct Block {
  int64_t begin, end;
  Buffer<float> scales;      // [quarters, 16]
  Buffer<int32_t> offsets;   // [quarters, 16]: what the unsigned numbers have too much, with zero points
  Buffer<uint8_t> unpacked;  // [quarters, kFours, 64]: unsigned numbers, four a lane; even inputs, then odd ones

  template <typename S>
  void Set(const Kernel& kernel, const S* all_scales, int64_t first, int64_t last) {
    begin = first, end = last;
    Unpack(kernel);
    ByQuarter(kernel, all_scales, scales);
    if (kernel.zeros == nullptr) return;
    ByQuarter(kernel, kernel.zeros, offsets);
    for (int32_t& offset : offsets) offset += 8;
  }

 private:
  // Outputs after the last are that one.
  int64_t Output(int64_t i) const { return std::min(begin + i, end - 1); }

  void Unpack(const Kernel& kernel) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-120);
    const int64_t length = kernel.in / 2, ahead = RoundUp(kAhead, kInBlock * length);
    unpacked.resize(kernel.Vectors() * 2 * kInBlock * kBytes);
    uint8_t* to = unpacked.data();
    for (int64_t v = 0; v < kernel.Vectors(); v++) {
      const __mmask64 mask = kernel.Mask(v);
      Vec numbers[kInBlock];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kInBlock; i++) {
        const uint8_t* from = kernel.values + Output(i) * length + v * kBytes;
        __builtin_prefetch(from + ahead, /*rw=*/0, /*locality=*/2);
        numbers[i] = (Vec)_mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from), flip);
      }
      Turn(numbers);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kInBlock; i++) {
        uint8_t* even = to + (v * kInBlock + i / 4 * 4) * 2 * kBytes + i % 4 * kBytes;
        _mm512_store_si512(even, _mm512_and_si512((__m512i)numbers[i], low));
        _mm512_store_si512(even + 4 * kBytes, _mm512_and_si512(_mm512_srli_epi32((__m512i)numbers[i], 4), low));
      }
    }
  }

  // to [quarters, 16] = x [outputs, groups] of the block, and zeros up to a whole vector.
  template <typename T, typename To>
  void ByQuarter(const Kernel& kernel, const T* x, Buffer<To>& to) {
    const int64_t times = kernel.group / kQuarter;
    to.resize(RoundUp(kernel.groups * times, kInVector) * kLanes);
    std::fill(to.end() - kInVector * kLanes, to.end(), To{});
    for (int64_t g = 0; g < kernel.groups; g += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, kernel.groups - g);
      const __mmask16 mask = (1u << count) - 1;
      Vec of_groups[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++)
        of_groups[i] = (Vec)Lanes(x + Output(i) * kernel.groups + g, mask);
      Turn(of_groups);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++)
        for (int64_t j = 0; j < times && i < count; j++)
          _mm512_store_si512(to.data() + ((g + i) * times + j) * kLanes, (__m512i)of_groups[i]);
    }
  }
};

// A group of rows, from `row` on, times a block. Sums are of every 16th quarter, which are added in the order of
// `SumsOfLanes`: results are to the bit those of few rows.
template <bool kZeros>
void MultiplyGroup(int64_t rows, const Kernel& kernel, const Groups& groups, int64_t row, const Block& block,
                   float* y) {
  const int64_t quarters = kernel.Quarters();
  Vec sums[kInChunk][kAtOnce];
  for (int64_t v = 0; v < kInChunk; v++) {
    Vec of_vector[kAtOnce] = {};
    for (int64_t first = v * kInVector; first < (v + 1) * kInVector; first++) {
      Vec of_quarter[kAtOnce] = {};
      for (int64_t at = first; at < quarters; at += kLanes) {
        const uint8_t* numbers = block.unpacked.data() + at * kFours * kBytes;
        const int64_t place = row * quarters + at * kAtOnce;
        const int32_t *x = groups.fours.data() + place * kFours, *minus_sums = groups.minus_sums.data() + place;
        const float* steps = groups.steps.data() + place;
        __m512i dots[kAtOnce] = {};
#pragma GCC unroll 8
        for (int64_t i = 0; i < kFours; i++) {
          const __m512i some = _mm512_load_si512(numbers + i * kBytes);
#pragma GCC unroll 8
          for (int r = 0; r < kAtOnce; r++)
            dots[r] = _mm512_dpbusd_epi32(dots[r], some, _mm512_set1_epi32(x[i * kAtOnce + r]));
        }
        const Vec scale = Load(block.scales.data() + at * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kAtOnce; r++) {
          const __m512i minus = _mm512_set1_epi32(minus_sums[r]);
          const __m512i back =
              kZeros ? _mm512_mullo_epi32(minus, _mm512_load_si512(block.offsets.data() + at * kLanes))
                     : _mm512_slli_epi32(minus, 3);
          of_quarter[r] += (Vec)_mm512_cvtepi32_ps(_mm512_add_epi32(dots[r], back)) * (Splat(steps[r]) * scale);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kAtOnce; r++) of_vector[r] += of_quarter[r];
    }
    std::copy_n(of_vector, kAtOnce, sums[v]);
  }
  const __mmask16 mask = (1u << (block.end - block.begin)) - 1;
  for (int64_t r = 0; r < std::min<int64_t>(kAtOnce, rows - row); r++)
    _mm512_mask_storeu_ps(y + (row + r) * kernel.out + block.begin, mask,
                          (__m512)((sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r])));
}

}  // namespace int4
}  // namespace jaxserve

#endif
