// The product of many rows with a kernel, both bfloat16, as one call of XLA's, where the CPU has no instruction for it
// (product_many.cc): numbers are widened, and multiplied as float32.
//
// Lanes are rows of x: those are packed first, so that a vector holds one number of each of its rows, and a number of
// the kernel meets all of them. A sum goes over its terms in order, one after another, so results are the same to the
// bit in any company and with any number of threads.
#if !defined(__AVX512BF16__)

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kPanel = kVectors * kLanes;   // rows of x that are multiplied at a time
constexpr int64_t kTogether = 128;              // rows of x that an item is for; a multiple of them
constexpr int64_t kOutputs = 48;                // of an item; a multiple of those that are summed at once
constexpr int64_t kDepth = (1 << 12) / kPanel;  // numbers of a row in hand at a time: of a panel, half the first cache
constexpr int kSums = kMostRows * kVectors;     // registers that hold sums
constexpr int kMostAtOnce = 12;                 // rows of the kernel: each is an address in a register
constexpr int64_t kAlone = 1 << 20;             // multiplications that take as long as waking another thread

// Up to a panel of rows of x, as [in, width]. Rows past the last are zeros.
void Pack(const BFloat16* x, int64_t rows, int64_t in, int64_t width, float* packed) {
  for (int64_t k = 0; k < in; k++)
    for (int64_t r = 0; r < width; r++) packed[k * width + r] = r < rows ? ToFloat(x[r * in + k]) : 0.0f;
}

// c [kRows, kWidth vectors] (+)= a [kRows, kDepth], of which so many numbers, * b [depth, kWidth vectors].
template <int kRows, int kWidth>
inline void MultiplyRowsOnce(const float* a, int64_t depth, const float* b, float* c, bool add) {
  Vec sums[kRows][kWidth];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) sums[i][j] = add ? Load(c + (i * kWidth + j) * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec row[kWidth];
    for (int j = 0; j < kWidth; j++) row[j] = Load(b + (k * kWidth + j) * kLanes);
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kWidth; j++) sums[i][j] += a[i * kDepth + k] * row[j];
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) Store(c + (i * kWidth + j) * kLanes, sums[i][j]);
}

// The same for any number of rows: kRows at a time, then half of that, and so on.
template <int kRows, int kWidth>
inline void MultiplyAllRows(int64_t rows, const float* a, int64_t depth, const float* b, float* c, bool add) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    MultiplyRowsOnce<kRows, kWidth>(a + i * kDepth, depth, b, c + i * kWidth * kLanes, add);
  if constexpr (kRows > 1)
    MultiplyAllRows<kRows / 2, kWidth>(rows - i, a + i * kDepth, depth, b, c + i * kWidth * kLanes, add);
}

// sums [outputs, groups vectors] (+)= a part of the kernel's times one of a panel.
template <int kWidth>
void MultiplyPanel(int64_t outputs, const float* part, int64_t depth, const float* panel, float* sums, bool add) {
  MultiplyAllRows<std::min(kMostAtOnce, kSums / kWidth), kWidth>(outputs, part, depth, panel, sums, add);
}

void MultiplyPanel(int64_t groups, int64_t outputs, const float* part, int64_t depth, const float* panel, float* sums,
                   bool add) {
  switch (groups) {
    case 1: return MultiplyPanel<1>(outputs, part, depth, panel, sums, add);
    case 2: return MultiplyPanel<std::min(2, kVectors)>(outputs, part, depth, panel, sums, add);
    case 3: return MultiplyPanel<std::min(3, kVectors)>(outputs, part, depth, panel, sums, add);
    default: return MultiplyPanel<kVectors>(outputs, part, depth, panel, sums, add);
  }
}

// y [rows, outputs], rows `out` apart = x, packed in panels, times `outputs` of the kernel's. A part of the kernel is
// widened once and meets all of the rows.
void MultiplyItem(const float* packed, int64_t rows, const BFloat16* kernel, int64_t in, int64_t outputs, float* y,
                  int64_t out) {
  alignas(64) float sums[kOutputs * kTogether], part[kOutputs * kDepth];
  const auto groups_of = [&](int64_t row) { return (std::min(kPanel, rows - row) + kLanes - 1) / kLanes; };
  for (int64_t first = 0; first < in; first += kDepth) {
    const int64_t depth = std::min(in - first, kDepth);
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t k = 0; k < depth; k++) part[o * kDepth + k] = ToFloat(kernel[o * in + first + k]);
    for (int64_t row = 0; row < rows; row += kPanel)
      MultiplyPanel(groups_of(row), outputs, part, depth, packed + row * in + first * groups_of(row) * kLanes,
                    sums + row * kOutputs, first > 0);
  }
  for (int64_t row = 0; row < rows; row += kPanel) {
    const int64_t side = groups_of(row) * kLanes;
    for (int64_t r = 0; r < std::min(kPanel, rows - row); r++)
      for (int64_t o = 0; o < outputs; o++) y[(row + r) * out + o] = sums[row * kOutputs + o * side + r];
  }
}

// Args: x [T, in], kernel [out, in], both bfloat16. Results: float32 [T, out], and what the call works in: float32, T
// rounded up to whole vectors or more, times `in`.
ffi::Error ProductMany(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR2<ffi::BF16> kernel,
                       ffi::ResultBufferR2<ffi::F32> y, ffi::ResultBufferR2<ffi::F32> packed) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (packed->dimensions()[0] < RoundUp(rows, kLanes) || packed->dimensions()[1] != in)
    return ffi::Error::InvalidArgument("x does not fit when packed");
  const auto* from = static_cast<const BFloat16*>(x.untyped_data());
  const auto* by = static_cast<const BFloat16*>(kernel.untyped_data());
  float *room = packed->typed_data(), *to = y->typed_data();
  const int64_t panels = (rows + kPanel - 1) / kPanel, blocks = (out + kOutputs - 1) / kOutputs;
  const int64_t parts = (rows + kTogether - 1) / kTogether, helpers = rows * in * out / kAlone;
  ForEach(pool, panels, helpers, [&](int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, rows - first);
    Pack(from + first * in, count, in, RoundUp(count, kLanes), room + first * in);
  });
  ForEach(pool, blocks * parts, helpers, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t begin = item % blocks * kOutputs, first = item / blocks * kTogether;
    MultiplyItem(room + first * in, std::min(kTogether, rows - first), by + begin * in, in,
                 std::min(kOutputs, out - begin), to + first * out + begin, out);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveProductMany, jaxserve::ProductMany,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

#endif
