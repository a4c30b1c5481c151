// An XLA call that multiplies by a kernel in int4, with a scale per group of inputs, with AVX512-VNNI. Kernels are
// widened in registers: only the narrow numbers are read.
//
// The instruction adds four products of unsigned by signed bytes to each of 16 sums. Rows of x are rounded to signed
// bytes, group by group. Numbers of the kernel become unsigned by an offset, which the sums of x take back. Lanes are
// outputs: 16 rows of the kernel are transposed while they are read. Results are bitwise the same whatever the other
// rows and the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "turn.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kAtOnce = 8;              // rows of x whose sums are in registers
constexpr int64_t kPiece = 2048;        // inputs of a transposed piece of the kernel; it stays in the L1 cache
constexpr int64_t kAhead = 1024;        // bytes of each row of the kernel that are prefetched
constexpr int64_t kAlone = 1 << 17;     // bytes read in the time that waking a thread takes

// A kernel [out, in], and what is known of it.
struct Kernel {
  const uint8_t* values;  // two a byte
  int64_t out, in;
  int64_t group, groups;  // inputs that share a scale, and how many such groups a row has
  const int8_t* zeros;    // [out, groups] or null
};

// Rows of x as bytes.
struct Bytes {
  Buffer<int8_t> values;  // [rows, pitch]: in the order of a kernel's words
  Buffer<float> scales;   // [rows, groups]
  Buffer<int32_t> sums;   // [rows, groups]: of the values
  int64_t pitch;
};

inline float Most(const float* x, int64_t count) {  // the largest magnitude; not a number if one is not
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    most = std::max(most, bits & 0x7FFFFFFF);
  }
  float y;
  std::memcpy(&y, &most, sizeof y);
  return y;
}

template <typename T>
void RoundRow(const T* x, const Kernel& kernel, int64_t row, Bytes& bytes) {
  Buffer<float> wide(kernel.group);
  int8_t* values = bytes.values.data() + row * bytes.pitch;
  for (int64_t g = 0; g < kernel.groups; g++) {
    const int64_t begin = g * kernel.group;
    for (int64_t i = 0; i < kernel.group; i++) wide[i] = ToFloat(x[begin + i]);
    const float most = Most(wide.data(), kernel.group), step = most / 127;
    const float inverse = std::isfinite(most) && most > 1e-30f ? 1 / step : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < kernel.group; i++) {
      const float scaled = wide[i] * inverse, nearest = scaled == scaled ? std::nearbyint(scaled) : 0.0f;
      const int32_t value = static_cast<int32_t>(nearest);
      values[begin + i] = static_cast<int8_t>(value);
      sum += value;
    }
    bytes.scales[row * kernel.groups + g] = step;
    bytes.sums[row * kernel.groups + g] = sum;
  }
  // Of each 8 inputs the even ones first, as they come out of a word of the kernel.
  const __m512i order = _mm512_set4_epi32(0x0F0D0B09, 0x0E0C0A08, 0x07050301, 0x06040200);
  for (int64_t i = 0; i < bytes.pitch; i += 64)
    _mm512_storeu_si512(values + i, _mm512_shuffle_epi8(_mm512_loadu_si512(values + i), order));
}

// 16 rows of the kernel, from `begin` on, as vectors of one 32-bit word of each row: inputs [first, last). Rows past
// the last are copies of it.
void TurnRows(const Kernel& kernel, int64_t begin, int64_t first, int64_t last, Vec* turned) {
  const int64_t from = first / 2, to = last / 2, stride = kernel.in / 2;
  for (int64_t byte = from; byte < to; byte += 64) {
    Vec* tile = turned + (byte - from) / 4;
    const __mmask64 mask = ~uint64_t{0} >> (64 - std::min<int64_t>(64, to - byte));
    for (int64_t i = 0; i < kLanes; i++) {
      const uint8_t* row = kernel.values + std::min(begin + i, kernel.out - 1) * stride + byte;
      __builtin_prefetch(row + kAhead);
      tile[i] = (Vec)_mm512_maskz_loadu_epi8(mask, row);
    }
    Turn(tile);
  }
}

// sums [kRows, 16] += kRows rows of x * the turned rows, groups [first, last).
template <int kRows>
void MultiplyPiece(const Kernel& kernel, const Bytes& bytes, int64_t row, int64_t first, int64_t last,
                   const Vec* turned, const float* scales, const int32_t* offsets, float* sums) {
  const __m512i low = _mm512_set1_epi8(15);
  Vec y[kRows];
  for (int r = 0; r < kRows; r++) y[r] = Load(sums + r * kLanes);
  for (int64_t g = first; g < last; g++) {
    __m512i dots[kRows];
    const __m512i offset = _mm512_loadu_si512(offsets + (kernel.zeros == nullptr ? 0 : g * kLanes));
    for (int r = 0; r < kRows; r++)
      dots[r] = _mm512_mullo_epi32(offset, _mm512_set1_epi32(bytes.sums[(row + r) * kernel.groups + g]));
    const int8_t* x = bytes.values.data() + row * bytes.pitch + g * kernel.group;
    const int64_t words = kernel.group / 8;
    const auto add = [&](__m512i numbers, int64_t at) {
      for (int r = 0; r < kRows; r++) {
        int32_t four;
        std::memcpy(&four, x + r * bytes.pitch + at, sizeof four);
        dots[r] = _mm512_dpbusd_epi32(dots[r], numbers, _mm512_set1_epi32(four));
      }
    };
    for (int64_t i = 0; i < words; i++, turned++) {
      const __m512i flipped = _mm512_xor_si512((__m512i)*turned, _mm512_set1_epi8(-120));
      add(_mm512_and_si512(flipped, low), 8 * i);
      add(_mm512_and_si512(_mm512_srli_epi32(flipped, 4), low), 8 * i + 4);
    }
    const Vec scale = Load(scales + g * kLanes);
    for (int r = 0; r < kRows; r++)
      y[r] += (Vec)_mm512_cvtepi32_ps(dots[r]) * (bytes.scales[(row + r) * kernel.groups + g] * scale);
  }
  for (int r = 0; r < kRows; r++) Store(sums + r * kLanes, y[r]);
}

template <int kRows, typename... Args>
inline void MultiplyRows(int64_t rows, const Args&... args) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyRows<kRows - 1>(rows, args...);
  MultiplyPiece<kRows>(args...);
}

// 16 outputs from `begin` on, of all rows.
template <typename S>
void MultiplyOutputs(const Kernel& kernel, const S* scales, const Bytes& bytes, int64_t rows, int64_t begin, float* y) {
  const int64_t lanes = std::min<int64_t>(kLanes, kernel.out - begin);
  const int64_t in_piece = std::max<int64_t>(1, kPiece / kernel.group);  // groups
  thread_local Buffer<float> sums, scale;
  thread_local Buffer<int32_t> offset;
  thread_local Buffer<Vec> turned;
  sums.assign(rows * kLanes, 0.0f);
  scale.resize(kernel.groups * kLanes);
  offset.assign((kernel.zeros == nullptr ? 1 : kernel.groups) * kLanes, -8);
  turned.resize(RoundUp(in_piece * kernel.group / 8, kLanes));
  for (int64_t lane = 0; lane < kLanes; lane++) {
    const int64_t o = std::min(begin + lane, kernel.out - 1);
    for (int64_t g = 0; g < kernel.groups; g++) {
      scale[g * kLanes + lane] = ToFloat(scales[o * kernel.groups + g]);
      if (kernel.zeros != nullptr) offset[g * kLanes + lane] -= kernel.zeros[o * kernel.groups + g];
    }
  }
  for (int64_t first = 0; first < kernel.groups; first += in_piece) {
    const int64_t last = std::min(kernel.groups, first + in_piece);
    TurnRows(kernel, begin, first * kernel.group, last * kernel.group, turned.data());
    for (int64_t row = 0; row < rows; row += kAtOnce)
      MultiplyRows<kAtOnce>(rows - row, kernel, bytes, row, first, last, turned.data(), scale.data(), offset.data(),
                            sums.data() + row * kLanes);
  }
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(sums.data() + r * kLanes, lanes, y + r * kernel.out + begin);
}

template <typename T, typename S>
void Multiply(ffi::ThreadPool& pool, const Kernel& kernel, const S* scales, const T* x, int64_t rows, float* y) {
  Bytes bytes;
  bytes.pitch = RoundUp(kernel.in, 64);
  bytes.values.assign(rows * bytes.pitch, 0);
  bytes.scales.resize(rows * kernel.groups);
  bytes.sums.resize(rows * kernel.groups);
  ForEach(pool, rows, rows * kernel.in / kAlone,
          [&](int64_t row) { RoundRow(x + row * kernel.in, kernel, row, bytes); });
  const int64_t items = (kernel.out + kLanes - 1) / kLanes;
  ForEach(pool, items, kernel.out * kernel.in / 2 / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    MultiplyOutputs(kernel, scales, bytes, rows, item * kLanes, y);
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
  if (kernel.group % 8 != 0) return ffi::Error::InvalidArgument("groups are of a multiple of 8 inputs");
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
