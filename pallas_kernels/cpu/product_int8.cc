// An XLA call that multiplies few rows by a kernel in int8, with AVX512-VNNI.
//
// The instruction adds four products of unsigned by signed bytes to each of 16 sums. A row of x is the sum of two rows
// of signed bytes, 15 bits of its largest number, and the sums are exact. Numbers of the kernel become unsigned by an
// offset, which the sums of x take back. A row of the kernel is multiplied after the other, as they lie in memory.
// Results are bitwise the same whatever the other rows and the number of threads.
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

constexpr int kAtOnce = 4, kWidth = 3;  // rows of x, and outputs, whose sums are in registers
constexpr int64_t kVector = 64;         // inputs
constexpr int64_t kAlone = 1 << 17;     // bytes read in the time that waking a thread takes
constexpr int64_t kAhead = 4096;        // bytes of the kernel that are prefetched
constexpr float kFine = 254;            // low numbers in a high one

// Rows of x as bytes: x is (high + low / kFine) * step.
struct Bytes {
  Buffer<int8_t> values;  // [rows, vectors, 2, 64]: high, low
  Buffer<float> steps;    // [rows]
  Buffer<int32_t> sums;   // [rows, 2]: of the values
  int64_t vectors;

  int64_t pitch() const { return vectors * 2 * kVector; }
};

template <typename T>
void RoundRow(const T* x, int64_t count, int64_t row, Bytes& bytes) {
  thread_local Buffer<float> wide;
  wide.assign(bytes.vectors * kVector, 0.0f);
  for (int64_t i = 0; i < count; i++) wide[i] = ToFloat(x[i]);
  const float most = Magnitude(wide.data(), count);
  const float step = bytes.steps[row] = most / 127;
  const float inverse = std::isfinite(most) && most > 1e-30f ? 1 / step : 0;
  if (inverse == 0) std::fill(wide.begin(), wide.end(), 0.0f);
  __m512i sum_high = _mm512_setzero_si512(), sum_low = sum_high;
  for (int64_t i = 0; i < bytes.vectors * kVector; i += kLanes) {
    const Vec number = Load(wide.data() + i);
    const __m512i high = _mm512_cvtps_epi32((__m512)(number * inverse));  // to the nearest
    const Vec rest = number - (Vec)_mm512_cvtepi32_ps(high) * step;
    const __m512i low = _mm512_cvtps_epi32((__m512)(rest * (kFine * inverse)));
    int8_t* to = bytes.values.data() + row * bytes.pitch() + i / kVector * 2 * kVector + i % kVector;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kVector), _mm512_cvtepi32_epi8(low));
    sum_high = _mm512_add_epi32(sum_high, high), sum_low = _mm512_add_epi32(sum_low, low);
  }
  bytes.sums[row * 2] = _mm512_reduce_add_epi32(sum_high);
  bytes.sums[row * 2 + 1] = _mm512_reduce_add_epi32(sum_low);
}

// kOutputs outputs from `begin` on, `gap` apart, of kRows rows. Unless told to unroll all loops, GCC 12 keeps the sums
// in memory, which takes twice the time.
template <int kRows, int kOutputs>
void MultiplyTile(const uint8_t* kernel, int64_t out, int64_t in, const Bytes& bytes, int64_t row, int64_t begin,
                  int64_t gap, float* y) {
  __m512i high[kRows][kOutputs] = {}, low[kRows][kOutputs] = {};
  for (int64_t v = 0; v < bytes.vectors; v++) {
    const __mmask64 mask = ~uint64_t{0} >> (kVector - std::min(kVector, in - v * kVector));
    __m512i numbers[kOutputs];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; o++) {
      const uint8_t* from = kernel + (begin + o * gap) * in + v * kVector;
      __builtin_prefetch(from + kAhead);
      numbers[o] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from), _mm512_set1_epi8(-128));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const int8_t* x = bytes.values.data() + (row + r) * bytes.pitch() + v * 2 * kVector;
      const __m512i x_high = _mm512_loadu_si512(x), x_low = _mm512_loadu_si512(x + kVector);
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; o++) {
        high[r][o] = _mm512_dpbusd_epi32(high[r][o], numbers[o], x_high);
        low[r][o] = _mm512_dpbusd_epi32(low[r][o], numbers[o], x_low);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const int32_t* of_x = bytes.sums.data() + (row + r) * 2;
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; o++) {
      const float coarse = _mm512_reduce_add_epi32(high[r][o]) - 128 * of_x[0];
      const float fine = _mm512_reduce_add_epi32(low[r][o]) - 128 * of_x[1];
      y[(row + r) * out + begin + o * gap] = (coarse + fine / kFine) * bytes.steps[row + r];
    }
  }
}

template <int kRows, int kOutputs, typename... Args>
inline void MultiplyRows(int64_t rows, const Args&... args) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyRows<kRows - 1, kOutputs>(rows, args...);
  MultiplyTile<kRows, kOutputs>(args...);
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, const T* x, int64_t rows, const uint8_t* kernel, int64_t out, int64_t in,
              float* y) {
  Bytes bytes;
  bytes.vectors = (in + kVector - 1) / kVector;
  bytes.values.resize(rows * bytes.pitch());
  bytes.steps.resize(rows), bytes.sums.resize(rows * 2);
  for (int64_t r = 0; r < rows; r++) RoundRow(x + r * in, in, r, bytes);
  const int64_t outputs = OutputsOfItem(out, in, kWidth, pool);
  ForEach(pool, (out + outputs - 1) / outputs, out * in / kAlone, [&](int64_t item) {
    const int64_t begin = item * outputs, end = std::min(out, begin + outputs);
    const int64_t gap = (end - begin) / kWidth;  // far apart, so that the hardware prefetcher follows each output
    for (int64_t o = begin; o < begin + gap; o++)
      for (int64_t row = 0; row < rows; row += kAtOnce)
        MultiplyRows<kAtOnce, kWidth>(rows - row, kernel, out, in, bytes, row, o, gap, y);
    for (int64_t o = begin + gap * kWidth; o < end; o++)
      for (int64_t row = 0; row < rows; row += kAtOnce)
        MultiplyRows<kAtOnce, 1>(rows - row, kernel, out, in, bytes, row, o, gap, y);
  });
}

// Args: x [T, in], bfloat16 or float32; an int8 kernel [out, in]. Result: float32 [T, out].
ffi::Error ProductInt8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR2<ffi::S8> kernel,
                       ffi::ResultBufferR2<ffi::F32> y) {
  if (x.dimensions().size() != 2) return ffi::Error::InvalidArgument("the product is of two matrices");
  const int64_t rows = x.dimensions()[0], out = kernel.dimensions()[0], in = kernel.dimensions()[1];
  const auto* numbers = reinterpret_cast<const uint8_t*>(kernel.typed_data());
  switch (x.element_type()) {
    case ffi::F32:
      Multiply(pool, x.typed_data<float>(), rows, numbers, out, in, y->typed_data());
      return ffi::Error::Success();
    case ffi::BF16:
      Multiply(pool, static_cast<const BFloat16*>(x.untyped_data()), rows, numbers, out, in, y->typed_data());
      return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("the product is of bfloat16 or float32");
  }
}

#else

ffi::Error ProductInt8(ffi::ThreadPool, ffi::AnyBuffer, ffi::BufferR2<ffi::S8>, ffi::ResultBufferR2<ffi::F32>) {
  return ffi::Error::InvalidArgument("the product needs AVX512-VNNI");
}

#endif

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveProductInt8, jaxserve::ProductInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
