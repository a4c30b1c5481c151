// Products of few rows by a kernel in int4. The kernel is read in the order of memory, so the hardware prefetches it.
// It did not prefetch four outputs that were read side by side, which took 1.3 times as long.
//
// Four vectors of an output are a chunk. What they give for a row is added up to one vector, whose lanes are the 16
// quarters of the chunk, before it is scaled.
#pragma once

#if defined(__AVX512VNNI__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "int4.h"
#include "vectors.h"

namespace jaxserve {
namespace int4 {

constexpr int64_t kChunksOfX = 32;  // of rounded rows, which fit into the L1 cache

// Where the scales and zero points of a chunk are.
struct Place {
  alignas(64) int32_t picks[kLanes];  // of each lane, which of the chunk's groups
  int64_t group;                      // the first
  __mmask16 mask;                     // of the 16 from it on, those that exist
};

inline Buffer<Place> Places(const Kernel& kernel) {
  const int64_t times = kernel.group / kQuarter;
  Buffer<Place> places(kernel.Chunks());
  for (int64_t c = 0; c < kernel.Chunks(); c++) {
    const int64_t group = c * kLanes / times;
    places[c].group = group, places[c].mask = (1u << std::min<int64_t>(kLanes, kernel.groups - group)) - 1;
    for (int64_t quarter = c * kLanes; quarter < (c + 1) * kLanes; quarter++)
      places[c].picks[LaneOf(quarter)] = quarter / times - group;
  }
  return places;
}

// y [kRows] += rows of x times chunk c of an output, of which there are kCount vectors, and zeros. `scales` and `zeros`
// are those of the output.
template <int kRows, int64_t kCount, bool kZeros, typename S, typename Numbers>
inline void AddChunk(const Kernel& kernel, const Bytes& bytes, const Place& place, int64_t c, const S* scales,
                     const int8_t* zeros, const Numbers& vector, Vec* y) {
  const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-120), ones = _mm512_set1_epi16(1);
  __m512i even[kCount], odd[kCount];
#pragma GCC unroll 4
  for (int64_t v = 0; v < kCount; v++) {
    const __m512i numbers = _mm512_xor_si512(vector(v), flip);
    even[v] = _mm512_and_si512(numbers, low);
    odd[v] = _mm512_and_si512(_mm512_srli_epi32(numbers, 4), low);
  }
  const __m512i picks = _mm512_load_si512(place.picks);
  const auto pick = [&](const auto* all) {
    return _mm512_permutexvar_epi32(picks, Lanes(all + place.group, place.mask));
  };
  const Vec scale = (Vec)pick(scales);
  const __m512i offset = kZeros ? _mm512_add_epi32(pick(zeros), _mm512_set1_epi32(8)) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const int64_t at = r * kernel.Chunks() + c;
    const int8_t* x = bytes.values.data() + at * kInChunk * kVector;
    __m512i dots[kInChunk] = {};
#pragma GCC unroll 4
    for (int64_t v = 0; v < kCount; v++) {
      dots[v] = _mm512_dpbusd_epi32(dots[v], even[v], _mm512_load_si512(x + v * kVector));
      dots[v] = _mm512_dpbusd_epi32(dots[v], odd[v], _mm512_load_si512(x + v * kVector + kBytes));
    }
    // Sums of 8 products, then of 16, fit into 16 bits.
    const __m512i first = _mm512_madd_epi16(_mm512_packs_epi32(dots[0], dots[1]), ones);
    __m512i second = _mm512_setzero_si512();
    if (kCount > 2) second = _mm512_madd_epi16(_mm512_packs_epi32(dots[2], dots[3]), ones);
    const __m512i minus = _mm512_load_si512(bytes.minus_sums.data() + at * kLanes);
    const __m512i back = kZeros ? _mm512_mullo_epi32(minus, offset) : _mm512_slli_epi32(minus, 3);
    const __m512i sum = _mm512_dpwssd_epi32(back, _mm512_packs_epi32(first, second), ones);
    y[r] += (Vec)_mm512_cvtepi32_ps(sum) * (Load(bytes.steps.data() + at * kLanes) * scale);
  }
}

// sums [kRows, kInBlock] += rows of x times chunks [first, last) of outputs [begin, end), at most kInBlock. Lanes are
// the quarters of a chunk. If `first` is 0, `sums` hold nothing yet.
template <int kRows, bool kZeros, typename S>
void AddChunks(const Kernel& kernel, const S* scales, const Buffer<Place>& places, const Bytes& bytes, int64_t begin,
               int64_t end, int64_t first, int64_t last, Vec (*sums)[kInBlock]) {
  constexpr int64_t kOfChunk = kInChunk * kBytes;
  const int64_t length = kernel.in / 2, whole = length / kOfChunk;
  // What is read next: a piece is followed by the same piece of later outputs.
  const int64_t ahead = last - first < kernel.Chunks() ? RoundUp(kAhead, length) : kAhead;
  const int64_t rest = last > whole ? kernel.Vectors() - whole * kInChunk : 0;
  __mmask64 masks[kInChunk];
  for (int64_t v = 0; v < kInChunk; v++) masks[v] = kernel.Mask(whole * kInChunk + v);
  for (int64_t output = begin; output < end; output++) {
    const uint8_t* values = kernel.values + output * length;
    const S* scales_here = scales + output * kernel.groups;
    const int8_t* zeros = kZeros ? kernel.zeros + output * kernel.groups : nullptr;
    Vec y[kRows] = {};
    if (first > 0)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) y[r] = sums[r][output - begin];
    for (int64_t c = first; c < std::min(last, whole); c++) {
      const auto vector = [from = values + c * kOfChunk, ahead](int64_t v) {
        __builtin_prefetch(from + v * kBytes + ahead);
        return _mm512_loadu_si512(from + v * kBytes);
      };
      AddChunk<kRows, kInChunk, kZeros>(kernel, bytes, places[c], c, scales_here, zeros, vector, y);
    }
    const auto add_rest = [&](auto count) {
      const auto vector = [from = values + whole * kOfChunk, ahead, &masks](int64_t v) {
        __builtin_prefetch(from + v * kBytes + ahead);
        return _mm512_maskz_loadu_epi8(masks[v], from + v * kBytes);
      };
      AddChunk<kRows, count, kZeros>(kernel, bytes, places[whole], whole, scales_here, zeros, vector, y);
    };
    if (rest > 2) {
      add_rest(std::integral_constant<int64_t, kInChunk>());
    } else if (rest > 0) {
      add_rest(std::integral_constant<int64_t, 2>());
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) sums[r][output - begin] = y[r];
  }
}

// The same of all chunks, in pieces of which all rows stay in the L1 cache for all outputs.
template <int kRows, typename S>
void MultiplyOutputs(int64_t rows, const Kernel& kernel, const S* scales, const Buffer<Place>& places,
                     const Bytes& bytes, int64_t begin, int64_t end, Vec (*sums)[kInBlock]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyOutputs<kRows - 1>(rows, kernel, scales, places, bytes, begin, end, sums);
  constexpr int64_t kPiece = kChunksOfX / kRows;
  const auto& add = kernel.zeros == nullptr ? AddChunks<kRows, false, S> : AddChunks<kRows, true, S>;
  for (int64_t first = 0; first < kernel.Chunks(); first += kPiece)
    add(kernel, scales, places, bytes, begin, end, first, std::min(kernel.Chunks(), first + kPiece), sums);
}

// Lane i is the sum of x[i], whose lanes are those of a chunk: the quarters of a vector are added up, then the vectors.
inline Vec SumsOfLanes(const Vec* x) {
  const auto far = [](Vec a, Vec b, auto which) { return (Vec)_mm512_shuffle_f32x4((__m512)a, (__m512)b, which); };
  const auto near = [](Vec a, Vec b, auto which) { return (Vec)_mm512_shuffle_ps((__m512)a, (__m512)b, which); };
  const std::integral_constant<int, 0x88> even;
  const std::integral_constant<int, 0xDD> odd;
  Vec sums[4];  // lanes: of four outputs, the vectors
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vec a = far(x[i], x[i + 4], even), b = far(x[i], x[i + 4], odd);
    const Vec c = far(x[i + 8], x[i + 12], even), d = far(x[i + 8], x[i + 12], odd);
    sums[i] = ((far(a, c, even) + far(b, d, even)) + far(a, c, odd)) + far(b, d, odd);
  }
  const auto add = [&](Vec a, Vec b) { return near(a, b, even) + near(a, b, odd); };
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

// Outputs [begin, end) of few rows, at most kInBlock.
template <typename S>
void MultiplyFew(const Kernel& kernel, const S* scales, const Buffer<Place>& places, const Bytes& bytes, int64_t rows,
                 int64_t begin, int64_t end, float* y) {
  Vec sums[kAtOnce][kInBlock];
  MultiplyOutputs<kAtOnce>(rows, kernel, scales, places, bytes, begin, end, sums);
  const __mmask16 mask = (1u << (end - begin)) - 1;
  for (int64_t r = 0; r < rows; r++) {
    std::fill(sums[r] + (end - begin), sums[r] + kInBlock, Vec{});
    _mm512_mask_storeu_ps(y + r * kernel.out + begin, mask, (__m512)SumsOfLanes(sums[r]));
  }
}

}  // namespace int4
}  // namespace jaxserve

#endif
