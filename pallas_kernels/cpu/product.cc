// The product of few rows with a large kernel, both bfloat16, as one call of XLA's: the kernel is read once, in order, at
// the memory's pace.
//
// Outputs are cut into items that threads share. A sum goes over its row in the same order whatever the number of rows
// and of threads: results are the same to the bit in any company.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kMostProductRows = 16;
constexpr int64_t kOutputs = 48;              // of an item; a multiple of those that are summed at once
constexpr int64_t kTerms = 2 * kLanes;        // numbers of the kernel: a vector
constexpr int64_t kAlone = 1 << 17;           // bytes that are read before another thread has woken up
constexpr int kWidth = 3;                     // outputs that rows meet at once
constexpr int kAtOnce = kMostRows * kVectors / kWidth;  // rows that do
constexpr int64_t kLine = kCacheLine / sizeof(BFloat16);

// Neighbouring pairs of products are added up by the CPU's own instruction where it has one. Where it has none, the
// numbers of a vector at even places and those at odd ones are widened apart from each other, by an instruction each; x
// is widened into the same order first.
#if defined(__AVX512BF16__)
using Number = BFloat16;
using Terms = __m512bh;
constexpr int kHalves = 1;
inline Terms LoadTerms(const BFloat16* p) {
  Terms x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Terms LoadWeights(const BFloat16* p, int) { return LoadTerms(p); }
inline Vec AddProducts(Vec sum, Terms a, Terms b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
inline void Arrange(const BFloat16* x, int64_t depth, BFloat16* held) { std::copy(x, x + depth, held); }
#else
using Number = float;
using Terms = Vec;
constexpr int kHalves = 2;
inline Terms LoadTerms(const float* p) { return Load(p); }
inline Terms LoadWeights(const BFloat16* p, int half) {
  BitVec pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return (Vec)(half == 0 ? pairs << 16 : pairs & 0xFFFF0000);
}
inline Vec AddProducts(Vec sum, Terms a, Terms b) { return sum + a * b; }
inline void Arrange(const BFloat16* x, int64_t depth, float* held) {
  int64_t i = 0;
  for (; i + kTerms <= depth; i += kTerms)
    for (int half = 0; half < kHalves; half++) {
      const Vec numbers = LoadWeights(x + i, half);
      std::memcpy(held + i + half * kLanes, &numbers, sizeof numbers);
    }
  for (; i < depth; i++) held[i] = ToFloat(x[i]);
}
#endif

constexpr int64_t kDepth = (1 << 11) / sizeof(Number);  // numbers of a row in hand: of 8, half of the first cache

// y [kRows, kOuts] (+)= x [kRows, kDepth], of which so many numbers, * kernel [kOuts, depth] transposed; rows of the
// kernel are `in` apart.
template <int kRows, int kOuts>
void MultiplyBlock(const Number* x, const BFloat16* kernel, int64_t in, int64_t depth, float* y, int64_t out,
                   bool add) {
  Vec sums[kRows][kOuts];
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kOuts; o++) sums[r][o] = Vec{};
  const auto add_terms = [&](int64_t i) {
    for (int half = 0; half < kHalves; half++) {
      Terms weights[kOuts];
      for (int o = 0; o < kOuts; o++) weights[o] = LoadWeights(kernel + o * in + i, half);
      for (int r = 0; r < kRows; r++) {
        const Terms row = LoadTerms(x + r * kDepth + i + half * kLanes);
        for (int o = 0; o < kOuts; o++) sums[r][o] = AddProducts(sums[r][o], row, weights[o]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kLine <= depth; i += kLine) {
    for (int o = 0; o < kOuts; o++)
      __builtin_prefetch(kernel + (o + kOuts) * in + i, /*rw=*/0, /*locality=*/2);  // of the block after this
    for (int64_t j = 0; j < kLine; j += kTerms) add_terms(i + j);
  }
  for (; i + kTerms <= depth; i += kTerms) add_terms(i);
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kOuts; o++) {
      float sum = Reduce(sums[r][o], [](float a, float b) { return a + b; });
      for (int64_t j = i; j < depth; j++) sum += ToFloat(x[r * kDepth + j]) * ToFloat(kernel[o * in + j]);
      y[r * out + o] = add ? y[r * out + o] + sum : sum;
    }
}

// The same for as many rows, at most kRows.
template <int kRows, int kOuts>
inline void MultiplyGroup(int rows, const Number* x, const BFloat16* kernel, int64_t in, int64_t depth, float* y,
                         int64_t out, bool add) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyGroup<kRows - 1, kOuts>(rows, x, kernel, in, depth, y, out, add);
  MultiplyBlock<kRows, kOuts>(x, kernel, in, depth, y, out, add);
}

// All rows, in groups of about as many that meet a few outputs at a time: those stay in the first cache meanwhile.
void MultiplyOutputs(int rows, const BFloat16* x, const BFloat16* kernel, int64_t in, float* y, int64_t out,
                     int64_t begin, int64_t end) {
  alignas(64) Number held[kMostProductRows * kDepth];
  const int groups = (rows + kAtOnce - 1) / kAtOnce;
  for (int64_t start = 0; start < in; start += kDepth) {
    const int64_t depth = std::min(kDepth, in - start);
    for (int r = 0; r < rows; r++) Arrange(x + r * in + start, depth, held + r * kDepth);
    const auto multiply = [&](int64_t o, auto width) {
      for (int g = 0; g < groups; g++) {
        const int r = rows * g / groups, count = rows * (g + 1) / groups - r;
        MultiplyGroup<kAtOnce, decltype(width)::value>(count, held + r * kDepth, kernel + o * in + start, in, depth,
                                                      y + r * out + o, out, start > 0);
      }
    };
    int64_t o = begin;
    for (; o + kWidth <= end; o += kWidth) multiply(o, std::integral_constant<int, kWidth>());
    for (; o < end; o++) multiply(o, std::integral_constant<int, 1>());
  }
}

// Args: x [T, in], kernel [out, in], both bfloat16. Result: float32 [T, out].
ffi::Error Product(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR2<ffi::BF16> kernel,
                   ffi::ResultBufferR2<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (rows < 1 || rows > kMostProductRows) return ffi::Error::InvalidArgument("the product is for 1 to 16 rows");
  const auto* from = static_cast<const BFloat16*>(x.untyped_data());
  const auto* by = static_cast<const BFloat16*>(kernel.untyped_data());
  float* to = y->typed_data();
  const int64_t items = (out + kOutputs - 1) / kOutputs;
  ForEach(pool, items, out * in * static_cast<int64_t>(sizeof(BFloat16)) / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t begin = item * kOutputs, end = std::min(out, begin + kOutputs);
    MultiplyOutputs(rows, from, by, in, to, out, begin, end);
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
