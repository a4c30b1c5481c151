// An XLA call that multiplies by a kernel in int4, with a scale per group of inputs, with AVX512-VNNI. Kernels are
// widened in registers: only the narrow numbers are read.
//
// The instruction adds four products of unsigned by signed bytes to each of 16 sums. Rows of x are rounded to signed
// bytes, group by group. Numbers of the kernel become unsigned by an offset, which the sums of x take back. A vector of
// the kernel has four quarters of 32 inputs. With few rows, what four outputs give for a row is added up to one vector,
// whose lanes are outputs of quarters, before it is scaled; many rows are multiplied in int4_many.h. Results are bitwise
// the same whatever the other rows and the number of threads.
#include <algorithm>
#include <cstdint>

#include "int4.h"
#include "int4_many.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

#if defined(__AVX512VNNI__)

using namespace int4;

constexpr int64_t kAlone = 1 << 17;          // bytes read in the time that waking a thread takes
constexpr int64_t kAloneRounding = 1 << 14;  // numbers of x rounded in that time

// Where `Groups16::Pick` finds the lanes of each vector that 16 groups cover: [vectors, 16] places in two outputs' groups.
Buffer<int32_t> Picks(const Kernel& kernel) {
  const int64_t times = kernel.group / kQuarter, count = std::min(kernel.Vectors(), times * kLanes / kWidth);
  Buffer<int32_t> picks(count * kLanes);
  for (int64_t quarter = 0; quarter < count * kWidth; quarter++)
    for (int64_t i = 0; i < kWidth; i++) picks[quarter * kWidth + i] = quarter / times + i % 2 * kLanes;
  return picks;
}

// Scales or zero points of 16 groups, from `group` on, of four outputs.
struct Groups16 {
  __m512i numbers[kWidth];

  template <typename T>
  Groups16(const Kernel& kernel, const T* all, int64_t output, int64_t group) {
    const int64_t count = std::min<int64_t>(kLanes, kernel.groups - group);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kWidth; i++)
      numbers[i] = Lanes(all + std::min(output + i, kernel.out - 1) * kernel.groups + group, count);
  }

  // Those of a vector: lanes are the outputs of quarters.
  __m512i Pick(const int32_t* picks) const {
    const __m512i places = _mm512_load_si512(picks);
    return _mm512_mask_blend_epi32(0xCCCC, _mm512_permutex2var_epi32(numbers[0], places, numbers[1]),
                                   _mm512_permutex2var_epi32(numbers[2], places, numbers[3]));
  }
};

inline __m512i AddPairs(__m512i a, __m512i b) {  // of 32-bit lanes
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// sums [kRows, 16]: rows of x times four outputs from `output` on.
template <int kRows, bool kZeros, typename S>
void MultiplyTile(const Kernel& kernel, const S* scales, const Buffer<int32_t>& picks, const Bytes& bytes,
                  int64_t output, Vec* sums) {
  const int64_t vectors = kernel.Vectors(), length = kernel.in / 2;
  const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-120), none = _mm512_setzero_si512();
  const int64_t ahead = RoundUp(kAhead, kWidth * length);  // the same place in later outputs
  const uint8_t* values[kWidth];
  for (int64_t i = 0; i < kWidth; i++) values[i] = kernel.values + std::min(output + i, kernel.out - 1) * length;
  Vec y[kRows] = {};
  int64_t v = 0;
  for (int64_t group = 0; group < kernel.groups; group += kLanes) {
    const Groups16 of_scales(kernel, scales, output, group);
    const Groups16 of_zeros = kZeros ? Groups16(kernel, kernel.zeros, output, group) : of_scales;
    const int64_t end = std::min<int64_t>(vectors, v + picks.size() / kLanes);
    for (const int32_t* pick = picks.data(); v < end; v++, pick += kLanes) {
      const __mmask64 mask = kernel.Mask(v);
      __m512i even[kWidth], odd[kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; i++) {
        __builtin_prefetch(values[i] + v * kBytes + ahead);
        const __m512i numbers = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, values[i] + v * kBytes), flip);
        even[i] = _mm512_and_si512(numbers, low);
        odd[i] = _mm512_and_si512(_mm512_srli_epi32(numbers, 4), low);
      }
      const Vec scale = (Vec)of_scales.Pick(pick);
      const __m512i offset = kZeros ? _mm512_add_epi32(of_zeros.Pick(pick), _mm512_set1_epi32(8)) : none;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const int64_t at = r * vectors + v;
        const __m512i x_even = _mm512_load_si512(bytes.values.data() + at * kVector);
        const __m512i x_odd = _mm512_load_si512(bytes.values.data() + at * kVector + kBytes);
        __m512i dots[kWidth];
#pragma GCC unroll 8
        for (int i = 0; i < kWidth; i++)
          dots[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, even[i], x_even), odd[i], x_odd);
        const __m512i first = AddPairs(dots[0], dots[1]), second = AddPairs(dots[2], dots[3]);
        const __m512i all =
            _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
        const __m512i sum = _mm512_load_si512(bytes.sums.data() + at * kLanes);
        const __m512i back = kZeros ? _mm512_mullo_epi32(sum, offset) : _mm512_slli_epi32(sum, 3);
        y[r] += (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(all, back)) * (Load(bytes.steps.data() + at * kLanes) * scale);
      }
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

// Outputs [begin, end) of few rows.
template <typename S>
void MultiplyFew(const Kernel& kernel, const S* scales, const Buffer<int32_t>& picks, const Bytes& bytes, int64_t rows,
                 int64_t begin, int64_t end, float* y) {
  for (int64_t first = begin; first < end; first += kWidth) {
    Vec sums[kAtOnce];
    MultiplyRows<kAtOnce>(rows, kernel, scales, picks, bytes, first, sums);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < std::min<int64_t>(kWidth, end - first); o++)
        y[r * kernel.out + first + o] =
            (sums[r][o] + sums[r][kWidth + o]) + (sums[r][2 * kWidth + o] + sums[r][3 * kWidth + o]);
  }
}

// The same of many rows.
template <typename S>
void MultiplyMany(const Kernel& kernel, const S* scales, const Groups& groups, int64_t rows, int64_t begin, int64_t end,
                  float* y) {
  thread_local Block block;
  block.Set(kernel, scales, begin, end);
  for (int64_t row = 0; row < rows; row += kAtOnce)
    kernel.zeros == nullptr ? MultiplyGroup<false>(rows, kernel, groups, row, block, y)
                            : MultiplyGroup<true>(rows, kernel, groups, row, block, y);
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, const Kernel& kernel, const T* scales, const T* x, int64_t rows, float* y) {
  const bool few = rows <= kAtOnce;
  Bytes bytes;
  Groups groups;
  bytes.values.resize(rows * kernel.Vectors() * kVector);
  bytes.steps.resize(rows * kernel.Vectors() * kLanes);
  bytes.sums.resize(rows * kernel.Vectors() * kLanes);
  if (!few) groups.Reserve(kernel, rows);
  ForEach(pool, rows, rows * kernel.in / kAloneRounding, [&](int64_t row) {
    RoundRow(x + row * kernel.in, kernel, row, bytes);
    if (!few) groups.Take(kernel, bytes, row);
  });
  const Buffer<int32_t> picks = Picks(kernel);
  const int64_t outputs = OutputsOfItem(kernel.out, kernel.in / 2, kInBlock, pool);
  ForEach(pool, (kernel.out + outputs - 1) / outputs, kernel.out * kernel.in / 2 / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t last = std::min(kernel.out, (item + 1) * outputs);
    for (int64_t begin = item * outputs; begin < last; begin += kInBlock) {
      const int64_t end = std::min(last, begin + kInBlock);
      const T* later = scales + end * kernel.groups;  // of the next block
      for (size_t i = 0; i < kInBlock * kernel.groups; i += kCacheLine / sizeof(T)) __builtin_prefetch(later + i);
      if (few)
        MultiplyFew(kernel, scales, picks, bytes, rows, begin, end, y);
      else
        MultiplyMany(kernel, scales, groups, rows, begin, end, y);
    }
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
