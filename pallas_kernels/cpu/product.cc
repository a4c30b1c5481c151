// XLA calls that multiply few rows by a large kernel, both bfloat16 or both float32. The kernel is read once, at memory
// bandwidth.
//
// Outputs are cut into items that threads share. The terms of a sum are added in the same order whatever the number of
// rows and threads, so results are bitwise the same.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

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
constexpr int kWidth = 3;            // outputs computed at once
constexpr int kAtOnce = kMostRows * kVectors / kWidth;  // rows computed at once: their sums fit into registers
constexpr int64_t kOutputs = 96;     // outputs of an item; a multiple of kWidth
constexpr int64_t kDepth = 4096;     // numbers of each row of x processed at a time; they fit into L2
constexpr int64_t kPitch = kDepth + 64;  // distance of those rows; a power of two would put all into one cache set
constexpr int64_t kAhead = 2048;     // bytes of the kernel that are prefetched; 1 to 4 KiB measure alike
constexpr int kFollowed = 4;         // most rows with which the hardware prefetcher alone keeps up: 10 to 20% faster
constexpr int64_t kAlone = 1 << 17;  // bytes read in the time that waking a thread takes

// How a number type is multiplied. With AVX512-BF16, one instruction adds neighbouring pairs of bfloat16 products.
// Without it, the numbers at even and at odd places of a vector are widened by one instruction each; x is widened into
// the same order first.
template <typename T>
struct Meeting;

template <>
struct Meeting<float> {
  using Number = float;  // type of x in the buffer
  using Terms = Vec;
  static constexpr int64_t kTerms = kLanes;  // numbers of the kernel per vector
  static constexpr int kHalves = 1;          // vectors it is widened to
  static Terms Load(const float* p) { return jaxserve::Load(p); }
  static Terms LoadWeights(const float* p, int) { return jaxserve::Load(p); }
  static Vec AddProducts(Vec sum, Terms a, Terms b) { return sum + a * b; }
  static void Arrange(const float* x, int64_t depth, float* held) { std::copy(x, x + depth, held); }
};

#if defined(__AVX512BF16__)
template <>
struct Meeting<BFloat16> {
  using Number = BFloat16;
  using Terms = __m512bh;
  static constexpr int64_t kTerms = 2 * kLanes;
  static constexpr int kHalves = 1;
  static Terms Load(const BFloat16* p) {
    Terms x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static Terms LoadWeights(const BFloat16* p, int) { return Load(p); }
  static Vec AddProducts(Vec sum, Terms a, Terms b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
  static void Arrange(const BFloat16* x, int64_t depth, BFloat16* held) { std::copy(x, x + depth, held); }
};
#else
template <>
struct Meeting<BFloat16> {
  using Number = float;
  using Terms = Vec;
  static constexpr int64_t kTerms = 2 * kLanes;
  static constexpr int kHalves = 2;
  static Terms Load(const float* p) { return jaxserve::Load(p); }
  static Terms LoadWeights(const BFloat16* p, int half) {
    BitVec pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return (Vec)(half == 0 ? pairs << 16 : pairs & 0xFFFF0000);
  }
  static Vec AddProducts(Vec sum, Terms a, Terms b) { return sum + a * b; }
  static void Arrange(const BFloat16* x, int64_t depth, float* held) {
    int64_t i = 0;
    for (; i + kTerms <= depth; i += kTerms)
      for (int half = 0; half < kHalves; half++) Store(held + i + half * kLanes, LoadWeights(x + i, half));
    for (; i < depth; i++) held[i] = ToFloat(x[i]);
  }
};
#endif

template <typename T>
using Number = typename Meeting<T>::Number;

// y [kRows, kOuts] (+)= the first `depth` numbers of x [kRows, kDepth] * kernel [kOuts, depth] transposed. Rows of the
// kernel are `stride` numbers apart, columns of y `gap`. The kernel is prefetched, so that memory is not idle while many
// rows keep the CPU busy.
template <int kRows, int kOuts, typename T>
void MultiplyBlock(const Number<T>* x, const T* kernel, int64_t stride, int64_t depth, float* y, int64_t out,
                   int64_t gap, bool add) {
  using Meet = Meeting<T>;
  constexpr int64_t kTerms = Meet::kTerms;
  Vec sums[kRows][kOuts];
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kOuts; o++) sums[r][o] = Vec{};
  int64_t i = 0;
  for (; i + kTerms <= depth; i += kTerms)
    for (int half = 0; half < Meet::kHalves; half++) {
      typename Meet::Terms weights[kOuts];
      for (int o = 0; o < kOuts; o++) {
        weights[o] = Meet::LoadWeights(kernel + o * stride + i, half);
        if (kRows > kFollowed && half == 0)
          __builtin_prefetch(reinterpret_cast<const char*>(kernel + o * stride + i) + kAhead);
      }
      for (int r = 0; r < kRows; r++) {
        auto row = Meet::Load(x + r * kPitch + i + half * kLanes);
        KeepInRegister(row);
        for (int o = 0; o < kOuts; o++) sums[r][o] = Meet::AddProducts(sums[r][o], row, weights[o]);
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int o = 0; o < kOuts; o++) {
      float sum = Reduce(sums[r][o], [](auto a, auto b) { return a + b; });
      for (int64_t j = i; j < depth; j++) sum += ToFloat(x[r * kPitch + j]) * ToFloat(kernel[o * stride + j]);
      float& to = y[r * out + o * gap];
      to = add ? to + sum : sum;
    }
}

// The same for `rows` rows, at most kRows.
template <int kRows, int kOuts, typename T, typename... Args>
inline void MultiplyGroup(int rows, const Number<T>* x, const T* kernel, const Args&... args) {
  if constexpr (kRows > 1)
    if (rows < kRows) return MultiplyGroup<kRows - 1, kOuts>(rows, x, kernel, args...);
  MultiplyBlock<kRows, kOuts>(x, kernel, args...);
}

// All rows, in groups of similar size. A few outputs are computed for all groups in turn, so that their part of the
// kernel stays in the L1 cache. These outputs are far apart, so that the hardware prefetcher follows each of them; side
// by side they ran at two thirds of the speed. As many pieces of x as fit are processed for an output before the next
// one: the prefetcher lost the kernel where a row of it was left half read.
template <typename T>
void MultiplyOutputs(int rows, const T* x, const T* kernel, int64_t in, float* y, int64_t out, int64_t begin,
                     int64_t end) {
  alignas(64) Number<T> held[kMostProductRows * kPitch];  // pieces of x: [piece, row, kPitch]
  const int groups = (rows + kAtOnce - 1) / kAtOnce;
  const int64_t gap = (end - begin) / kWidth, most = kMostProductRows / rows * kDepth;
  for (int64_t first = 0; first < in; first += most) {
    const int64_t last = std::min(in, first + most);
    const auto each_piece = [&](const auto& work) {
      Number<T>* piece = held;
      for (int64_t start = first; start < last; start += kDepth, piece += rows * kPitch)
        work(piece, start, std::min(kDepth, last - start));
    };
    each_piece([&](Number<T>* piece, int64_t start, int64_t depth) {
      for (int r = 0; r < rows; r++) Meeting<T>::Arrange(x + r * in + start, depth, piece + r * kPitch);
    });
    const auto multiply = [&](int64_t o, auto width) {
      each_piece([&](const Number<T>* piece, int64_t start, int64_t depth) {
        for (int g = 0; g < groups; g++) {
          const int r = rows * g / groups, count = rows * (g + 1) / groups - r;
          MultiplyGroup<kAtOnce, decltype(width)::value>(count, piece + r * kPitch, kernel + o * in + start, gap * in,
                                                         depth, y + r * out + o, out, gap, start > 0);
        }
      });
    };
    for (int64_t o = begin; o < begin + gap; o++) multiply(o, std::integral_constant<int, kWidth>());
    for (int64_t o = begin + gap * kWidth; o < end; o++) multiply(o, std::integral_constant<int, 1>());
  }
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, int rows, const T* x, const T* kernel, int64_t in, float* y, int64_t out) {
  const int64_t items = (out + kOutputs - 1) / kOutputs;
  ForEach(pool, items, out * in * static_cast<int64_t>(sizeof(T)) / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t begin = item * kOutputs;
    MultiplyOutputs(rows, x, kernel, in, y, out, begin, std::min(out, begin + kOutputs));
  });
}

// Args: x [T, in], kernel [out, in], both bfloat16 or both float32. Result: float32 [T, out].
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::ResultBufferR2<ffi::F32> y) {
  if (x.dimensions().size() != 2 || kernel.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("the product is of two matrices");
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (rows < 1 || rows > kMostProductRows) return ffi::Error::InvalidArgument("the product is for 1 to 16 rows");
  if (x.element_type() != kernel.element_type()) return ffi::Error::InvalidArgument("x and the kernel differ in type");
  switch (x.element_type()) {
    case ffi::F32:
      Multiply(pool, rows, x.typed_data<float>(), kernel.typed_data<float>(), in, y->typed_data(), out);
      return ffi::Error::Success();
    case ffi::BF16:
      Multiply(pool, rows, static_cast<const BFloat16*>(x.untyped_data()),
               static_cast<const BFloat16*>(kernel.untyped_data()), in, y->typed_data(), out);
      return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("the product is of bfloat16 or float32");
  }
}

// y [rows, out] = x [rows, in] * a kernel [out, in] of its own for each run of rows, of which there are `groups`, one
// after another: kernels[g] for sizes[g] rows. Rows past the last run are zeros. An item's part of a kernel stays in
// the L2 cache for all rows of the run.
template <typename T>
void MultiplyRuns(ffi::ThreadPool& pool, int64_t rows, const T* x, const T* kernels, const int32_t* sizes,
                  int64_t groups, int64_t in, float* y, int64_t out) {
  struct Run {
    int64_t group, start, rows;
  };
  std::vector<Run> runs;
  int64_t start = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min<int64_t>(std::max(sizes[g], 0), rows - start);
    if (count > 0) runs.push_back({g, start, count});
    start += count;
  }
  std::fill(y + start * out, y + rows * out, 0.0f);
  const int64_t items = (out + kOutputs - 1) / kOutputs, count = items * static_cast<int64_t>(runs.size());
  ForEach(pool, count, count * kOutputs * in * static_cast<int64_t>(sizeof(T)) / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const Run& run = runs[item / items];
    const int64_t begin = item % items * kOutputs, end = std::min(out, begin + kOutputs);
    for (int64_t first = 0; first < run.rows; first += kMostProductRows) {
      const int64_t row = run.start + first;
      MultiplyOutputs(static_cast<int>(std::min<int64_t>(kMostProductRows, run.rows - first)), x + row * in,
                      kernels + run.group * out * in, in, y + row * out, out, begin, end);
    }
  });
}

// Args: x [R, in], kernels [G, out, in], both bfloat16 or both float32, sizes int32 [G]. Result: float32 [R, out].
ffi::Error RunsProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernels,
                       ffi::BufferR1<ffi::S32> sizes, ffi::ResultBufferR2<ffi::F32> y) {
  if (x.dimensions().size() != 2 || kernels.dimensions().size() != 3)
    return ffi::Error::InvalidArgument("the product is of a matrix with matrices");
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1];
  const int64_t groups = kernels.dimensions()[0], out = kernels.dimensions()[1];
  if (x.element_type() != kernels.element_type()) return ffi::Error::InvalidArgument("x and the kernels differ in type");
  switch (x.element_type()) {
    case ffi::F32:
      MultiplyRuns(pool, rows, x.typed_data<float>(), kernels.typed_data<float>(), sizes.typed_data(), groups, in,
                   y->typed_data(), out);
      return ffi::Error::Success();
    case ffi::BF16:
      MultiplyRuns(pool, rows, static_cast<const BFloat16*>(x.untyped_data()),
                   static_cast<const BFloat16*>(kernels.untyped_data()), sizes.typed_data(), groups, in,
                   y->typed_data(), out);
      return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("the product is of bfloat16 or float32");
  }
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveRunsProduct, jaxserve::RunsProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveProduct, jaxserve::Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
