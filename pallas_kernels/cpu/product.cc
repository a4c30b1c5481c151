// The product of few rows with a large kernel, both bfloat16, as one call of XLA's: the kernel is read once, in order, at
// the memory's pace.
//
// Outputs are cut into items that threads share. A sum goes over its row in the same order whatever the number of rows
// and of threads: results are the same to the bit in any company.
#include <algorithm>
#include <cstdint>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kMostProductRows = 8;
constexpr int64_t kOutputs = 32;     // of an item
constexpr int64_t kDepth = 1024;     // numbers of each row of x that are in hand at a time: the first cache has room
constexpr int64_t kAlone = 1 << 17;  // bytes that are read before another thread has woken up

// A vector of partial sums: neighbouring pairs are added up by the CPU's own instruction where it has one.
#if defined(__AVX512BF16__)
constexpr int64_t kTerms = 2 * kLanes;
using Terms = __m512bh;
inline Terms LoadTerms(const BFloat16* p) {
  Terms x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Vec AddProducts(Vec sum, Terms a, Terms b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
constexpr int64_t kTerms = kLanes;
using Terms = Vec;
inline Terms LoadTerms(const BFloat16* p) { return Load(p); }
inline Vec AddProducts(Vec sum, Terms a, Terms b) { return sum + a * b; }
#endif

// y [kRows, kWidth] (+)= x [kRows, depth] * kernel [kWidth, depth] transposed; rows of both are `in` apart.
template <int kRows, int kWidth>
void MultiplyBlock(const BFloat16* x, const BFloat16* kernel, int64_t in, int64_t depth, float* y, int64_t out,
                   bool add) {
  Vec sums[kRows][kWidth];
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kWidth; o++) sums[r][o] = Vec{};
  int64_t i = 0;
  for (; i + kTerms <= depth; i += kTerms) {
    Terms weights[kWidth];
    for (int o = 0; o < kWidth; o++) {
      weights[o] = LoadTerms(kernel + o * in + i);
      __builtin_prefetch(kernel + (o + kWidth) * in + i, /*rw=*/0, /*locality=*/2);  // of the block after this
    }
    for (int r = 0; r < kRows; r++) {
      const Terms row = LoadTerms(x + r * in + i);
      for (int o = 0; o < kWidth; o++) sums[r][o] = AddProducts(sums[r][o], row, weights[o]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kWidth; o++) {
      float sum = Reduce(sums[r][o], [](float a, float b) { return a + b; });
      for (int64_t j = i; j < depth; j++) sum += ToFloat(x[r * in + j]) * ToFloat(kernel[o * in + j]);
      y[r * out + o] = add ? y[r * out + o] + sum : sum;
    }
}

template <int kRows>
void MultiplyOutputs(const BFloat16* x, const BFloat16* kernel, int64_t in, float* y, int64_t out, int64_t begin,
                     int64_t end) {
  constexpr int kWidth = kRows * 4 <= 16 ? 4 : 3;  // sums that fit into registers
  for (int64_t start = 0; start < in; start += kDepth) {
    const int64_t depth = std::min(kDepth, in - start);
    int64_t o = begin;
    for (; o + kWidth <= end; o += kWidth)
      MultiplyBlock<kRows, kWidth>(x + start, kernel + o * in + start, in, depth, y + o, out, start > 0);
    for (; o < end; o++)
      MultiplyBlock<kRows, 1>(x + start, kernel + o * in + start, in, depth, y + o, out, start > 0);
  }
}

// Args: x [T, in], kernel [out, in], both bfloat16. Result: float32 [T, out].
ffi::Error Product(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR2<ffi::BF16> kernel,
                   ffi::ResultBufferR2<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (rows < 1 || rows > kMostProductRows) return ffi::Error::InvalidArgument("the product is for 1 to 8 rows");
  const auto* from = static_cast<const BFloat16*>(x.untyped_data());
  const auto* by = static_cast<const BFloat16*>(kernel.untyped_data());
  float* to = y->typed_data();
  const int64_t items = (out + kOutputs - 1) / kOutputs;
  ForEach(pool, items, out * in * static_cast<int64_t>(sizeof(BFloat16)) / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t begin = item * kOutputs, end = std::min(out, begin + kOutputs);
    switch (rows) {
      case 1: return MultiplyOutputs<1>(from, by, in, to, out, begin, end);
      case 2: return MultiplyOutputs<2>(from, by, in, to, out, begin, end);
      case 3: return MultiplyOutputs<3>(from, by, in, to, out, begin, end);
      case 4: return MultiplyOutputs<4>(from, by, in, to, out, begin, end);
      case 5: return MultiplyOutputs<5>(from, by, in, to, out, begin, end);
      case 6: return MultiplyOutputs<6>(from, by, in, to, out, begin, end);
      case 7: return MultiplyOutputs<7>(from, by, in, to, out, begin, end);
      default: return MultiplyOutputs<kMostProductRows>(from, by, in, to, out, begin, end);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveProduct, jaxserve::Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
