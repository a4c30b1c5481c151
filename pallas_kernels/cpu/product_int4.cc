// An XLA call that multiplies by a kernel in int4, with a scale per group of inputs, with AVX512-VNNI. Kernels are
// widened in registers: only the narrow numbers are read.
//
// The instruction adds four products of unsigned by signed bytes to each of 16 sums. Rows of x are rounded to signed
// bytes, group by group. Numbers of the kernel become unsigned by an offset, which the sums of x take back. A vector of
// the kernel has four quarters of 32 inputs. What four outputs give for a row is added up to one vector, whose lanes
// are outputs of quarters, before it is scaled. Results are bitwise the same whatever the other rows and the number of
// threads.
#include <algorithm>
#include <cmath>
#include <cstdint>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kAtOnce = 8;              // rows of x whose sums are in registers
constexpr int kWidth = 4;               // outputs of a tile
constexpr int64_t kQuarter = 32;        // inputs that are scaled together; groups are a multiple
constexpr int64_t kVector = 4 * kQuarter;
constexpr int64_t kBytes = 64;          // of a vector
constexpr int64_t kAhead = 4096;        // least bytes of the kernel from what is read to what is prefetched
constexpr int64_t kInBlock = 16;        // outputs whose scales are prepared together
constexpr int64_t kAlone = 1 << 17;     // bytes read in the time that waking a thread takes

// A kernel [out, in], and what is known of it.
struct Kernel {
  const uint8_t* values;  // two a byte
  int64_t out, in;
  int64_t group, groups;  // inputs that share a scale, and how many such groups a row has
  const int8_t* zeros;    // [out, groups] or null

  int64_t Vectors() const { return (in + kVector - 1) / kVector; }
};

// Rows of x as bytes. Lanes of steps and sums are the outputs of quarters: they are equal for all outputs.
struct Bytes {
  Buffer<int8_t> values;  // [rows, vectors, 2, 64]: of even inputs, then of odd ones
  Buffer<float> steps;    // [rows, vectors, 16]: what a value of 1 stands for
  Buffer<int32_t> sums;   // [rows, vectors, 16]: of the values of a quarter
};

template <typename T>
void RoundRow(const T* x, const Kernel& kernel, int64_t row, Bytes& bytes) {
  thread_local Buffer<float> wide;
  thread_local Buffer<int8_t> values;
  const int64_t vectors = kernel.Vectors(), inputs = vectors * kVector;
  wide.assign(inputs, 0.0f), values.assign(inputs, 0);
  for (int64_t i = 0; i < kernel.in; i++) wide[i] = ToFloat(x[i]);
  float* steps = bytes.steps.data() + row * vectors * kLanes;
  int32_t* sums = bytes.sums.data() + row * vectors * kLanes;
  std::fill_n(steps, vectors * kLanes, 0.0f), std::fill_n(sums, vectors * kLanes, 0);
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
      std::fill_n(steps + i / kQuarter * kWidth, kWidth, step);
      std::fill_n(sums + i / kQuarter * kWidth, kWidth, _mm512_reduce_add_epi32(sum));
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

// lanes [quarters, kWidth] = convert(x), of x [kWidth, groups] with `times` quarters in a group.
template <typename T, typename To, typename Convert>
inline void ByQuarter(const T* const* x, int64_t groups, int64_t times, To* lanes, Convert convert) {
  thread_local Buffer<To> of_groups;
  of_groups.resize(groups * kWidth);
  To* __restrict to = times == 1 ? lanes : of_groups.data();
  const T *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
  static_assert(kWidth == 4);
  for (int64_t g = 0; g < groups; g++) {  // compilers make vectors of this loop
    to[4 * g] = convert(x0[g]), to[4 * g + 1] = convert(x1[g]);
    to[4 * g + 2] = convert(x2[g]), to[4 * g + 3] = convert(x3[g]);
  }
  for (int64_t g = 0; g < groups && times > 1; g++)
    for (int64_t i = 0; i < times; i++) std::copy_n(to + g * kWidth, kWidth, lanes + (g * times + i) * kWidth);
}

// Four outputs of a kernel. Lanes of scales and offsets are the outputs of quarters.
struct Tile {
  const uint8_t* values[kWidth];
  Buffer<float> scales;     // [vectors, 16]
  Buffer<int32_t> offsets;  // [vectors, 16]: what the unsigned numbers have too much, with zero points

  template <typename S>
  void Set(const Kernel& kernel, const S* all_scales, int64_t begin) {
    const int64_t lanes = kernel.Vectors() * kLanes, times = kernel.group / kQuarter;
    const S* of_scales[kWidth];
    const int8_t* of_zeros[kWidth];
    for (int64_t i = 0; i < kWidth; i++) {
      const int64_t o = std::min(begin + i, kernel.out - 1);
      values[i] = kernel.values + o * kernel.in / 2;
      of_scales[i] = all_scales + o * kernel.groups;
      of_zeros[i] = kernel.zeros == nullptr ? nullptr : kernel.zeros + o * kernel.groups;
    }
    scales.resize(lanes), std::fill(scales.end() - kLanes, scales.end(), 0.0f);
    ByQuarter(of_scales, kernel.groups, times, scales.data(), [](S x) { return ToFloat(x); });
    if (kernel.zeros == nullptr) return;
    offsets.assign(lanes, 0);
    ByQuarter(of_zeros, kernel.groups, times, offsets.data(), [](int8_t x) { return int32_t{x} + 8; });
  }
};

inline __m512i AddPairs(__m512i a, __m512i b) {  // of 32-bit lanes
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// sums [kRows, 16]: rows [row, row + kRows) of x times the outputs of a tile.
template <int kRows, bool kZeros>
void MultiplyTile(const Kernel& kernel, const Bytes& bytes, int64_t row, const Tile& tile, Vec* sums) {
  const int64_t vectors = kernel.Vectors(), length = kernel.in / 2;
  const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-120), none = _mm512_setzero_si512();
  const int64_t ahead = RoundUp(kAhead, kWidth * length);  // the same place in later outputs
  Vec y[kRows] = {};
  for (int64_t v = 0; v < vectors; v++) {
    const __mmask64 mask = ~uint64_t{0} >> (kBytes - std::min(kBytes, length - v * kBytes));
    __m512i even[kWidth], odd[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i++) {
      __builtin_prefetch(tile.values[i] + v * kBytes + ahead);
      const __m512i numbers = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, tile.values[i] + v * kBytes), flip);
      even[i] = _mm512_and_si512(numbers, low);
      odd[i] = _mm512_and_si512(_mm512_srli_epi32(numbers, 4), low);
    }
    const Vec scale = Load(tile.scales.data() + v * kLanes);
    const __m512i offset = kZeros ? _mm512_load_si512(tile.offsets.data() + v * kLanes) : none;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const int64_t at = (row + r) * vectors + v;
      const __m512i x_even = _mm512_load_si512(bytes.values.data() + at * kVector);
      const __m512i x_odd = _mm512_load_si512(bytes.values.data() + at * kVector + kBytes);
      __m512i dots[kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; i++)
        dots[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, even[i], x_even), odd[i], x_odd);
      const __m512i first = AddPairs(dots[0], dots[1]), second = AddPairs(dots[2], dots[3]);
      const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
      const __m512i sum = _mm512_load_si512(bytes.sums.data() + at * kLanes);
      const __m512i back = kZeros ? _mm512_mullo_epi32(sum, offset) : _mm512_slli_epi32(sum, 3);
      y[r] += (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(all, back)) * (Load(bytes.steps.data() + at * kLanes) * scale);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) sums[r] = y[r];
}

template <int kRows, typename... Args>
inline void MultiplyRows(int64_t rows, const Kernel& kernel, Args&&... args) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyRows<kRows - 1>(rows, kernel, args...);
  if (kernel.zeros == nullptr) return MultiplyTile<kRows, false>(kernel, args...);
  MultiplyTile<kRows, true>(kernel, args...);
}

// Outputs [begin, end) of all rows: a block.
template <typename S>
void MultiplyBlock(const Kernel& kernel, const S* scales, const Bytes& bytes, int64_t rows, int64_t begin, int64_t end,
                   float* y) {
  thread_local Tile tiles[kInBlock / kWidth];
  const S* later = scales + end * kernel.groups;  // of the next block
  for (size_t i = 0; i < kInBlock * kernel.groups; i += kCacheLine / sizeof(S)) __builtin_prefetch(later + i);
  const int64_t count = (end - begin + kWidth - 1) / kWidth;
  for (int64_t i = 0; i < count; i++) tiles[i].Set(kernel, scales, begin + i * kWidth);
  for (int64_t row = 0; row < rows; row += kAtOnce)
    for (int64_t i = 0; i < count; i++) {
      Vec sums[kAtOnce];
      MultiplyRows<kAtOnce>(rows - row, kernel, bytes, row, tiles[i], sums);
      const int64_t first = begin + i * kWidth;
      for (int64_t r = 0; r < std::min<int64_t>(kAtOnce, rows - row); r++)
        for (int64_t o = 0; o < std::min<int64_t>(kWidth, end - first); o++)
          y[(row + r) * kernel.out + first + o] =
              (sums[r][o] + sums[r][kWidth + o]) + (sums[r][2 * kWidth + o] + sums[r][3 * kWidth + o]);
    }
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, const Kernel& kernel, const T* scales, const T* x, int64_t rows, float* y) {
  Bytes bytes;
  bytes.values.resize(rows * kernel.Vectors() * kVector);
  bytes.steps.resize(rows * kernel.Vectors() * kLanes);
  bytes.sums.resize(rows * kernel.Vectors() * kLanes);
  ForEach(pool, rows, rows * kernel.in / kAlone,
          [&](int64_t row) { RoundRow(x + row * kernel.in, kernel, row, bytes); });
  const int64_t outputs = OutputsOfItem(kernel.out, kernel.in / 2, kInBlock, pool);
  ForEach(pool, (kernel.out + outputs - 1) / outputs, kernel.out * kernel.in / 2 / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t last = std::min(kernel.out, (item + 1) * outputs);
    for (int64_t begin = item * outputs; begin < last; begin += kInBlock)
      MultiplyBlock(kernel, scales, bytes, rows, begin, std::min(last, begin + kInBlock), y);
  });
}

// Args: x [T, in] and scales [out, groups], both bfloat16 or both float32; an int4 kernel [out, in]; zero points
// int8 [out, groups], or [0]. Result: float32 [T, out].
ffi::Error ProductInt4(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                       ffi::AnyBuffer zeros, ffi::ResultBufferR2<ffi::F32> y) {
  if (x.dimensions().size() != 2 || values.dimensions().size() != 2 || scales.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("the product is of two matrices, with scales of groups");
  if (values.element_type() != ffi::S4) return ffi::Error::InvalidArgument("the kernel is int4");
  const int64_t rows = x.dimensions()[0];
  Kernel kernel;
  kernel.values = static_cast<const uint8_t*>(values.untyped_data());
  kernel.out = values.dimensions()[0], kernel.in = values.dimensions()[1];
  kernel.groups = scales.dimensions()[1], kernel.group = kernel.in / kernel.groups;
  kernel.zeros = zeros.element_count() > 0 ? static_cast<const int8_t*>(zeros.untyped_data()) : nullptr;
  if (kernel.group % kQuarter != 0) return ffi::Error::InvalidArgument("groups are of a multiple of 32 inputs");
  if (x.element_type() != scales.element_type()) return ffi::Error::InvalidArgument("x and the scales differ in type");
  switch (x.element_type()) {
    case ffi::F32:
      Multiply(pool, kernel, scales.typed_data<float>(), x.typed_data<float>(), rows, y->typed_data());
      return ffi::Error::Success();
    case ffi::BF16:
      Multiply(pool, kernel, static_cast<const BFloat16*>(scales.untyped_data()),
               static_cast<const BFloat16*>(x.untyped_data()), rows, y->typed_data());
      return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("the product is of bfloat16 or float32");
  }
}

#else

ffi::Error ProductInt4(ffi::ThreadPool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer,
                       ffi::ResultBufferR2<ffi::F32>) {
  return ffi::Error::InvalidArgument("the product needs AVX512-VNNI");
}

#endif

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveProductInt4, jaxserve::ProductInt4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
