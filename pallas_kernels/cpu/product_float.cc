// An XLA call that multiplies many rows by a kernel in float32. The kernel is float32, or bfloat16 on CPUs without an
// instruction for it (see product_many.cc).
//
// Lanes are rows of x. They are packed first, so that a vector holds one number of each of its rows, and each number of
// the kernel is multiplied by all of them. The terms of a sum are added in order, so results are bitwise the same
// whatever the other rows and the number of threads.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "parallel.h"
#include "turn.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kPanel = kVectors * kLanes;  // rows of x multiplied at a time
constexpr int64_t kTogether = 128;             // rows of x of an item; a multiple of a panel
constexpr int64_t kOutputs = 48;               // outputs of an item; a multiple of those summed at once
constexpr int64_t kDepth = 256;                // numbers of a row processed at a time
constexpr int kSums = kMostRows * kVectors;    // registers for sums
constexpr int kMostAtOnce = 12;                // rows of the kernel at once: each takes an address register
constexpr int64_t kAlone = 1 << 20;            // multiplications that take as long as waking a thread

// Packs up to a vector of rows of x as [in, ...] of a panel whose numbers are `width` apart. Missing rows are zeros.
template <typename T>
void Pack(const T* x, int64_t rows, int64_t in, int64_t width, float* packed) {
  for (int64_t first = 0; first < in; first += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, in - first));
    Vec lines[kLanes];
    for (int64_t r = 0; r < kLanes; r++)
      lines[r] = r >= rows         ? Vec{}
                 : count == kLanes ? Load(x + r * in + first)
                                   : Load(x + r * in + first, count);
    Turn(lines);
    for (int k = 0; k < count; k++) Store(packed + (first + k) * width, lines[k]);
  }
}

// The next part of the kernel, `outputs` rows that are `in` numbers apart. It is prefetched into the L2 cache while the
// current part is multiplied, so that memory is not idle.
template <typename T>
struct Coming {
  static constexpr int64_t kNumbers = kCacheLine / sizeof(T), kLines = kDepth / kNumbers;

  const T* kernel;  // null: nothing to prefetch
  int64_t in;

  Coming From(int64_t row) const { return {kernel == nullptr ? nullptr : kernel + row * in, in}; }
  int64_t Lines(int64_t rows) const { return kernel == nullptr ? 0 : rows * kLines; }
  void Fetch(int64_t line) const {
    __builtin_prefetch(kernel + line / kLines * in + line % kLines * kNumbers, /*rw=*/0, /*locality=*/2);
  }
};

// c [kRows, kWidth vectors] (+)= the first `depth` numbers of a [kRows, kDepth] * b [depth, kWidth vectors].
template <int kRows, int kWidth, typename T>
inline void MultiplyRowsOnce(const float* a, int64_t depth, const float* b, float* c, bool add, Coming<T> coming) {
  Vec sums[kRows][kWidth];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) sums[i][j] = add ? Load(c + (i * kWidth + j) * kLanes) : Vec{};
  const int64_t lines = coming.Lines(kRows);
  for (int64_t k = 0; k < depth; k++) {
    if (k < lines) coming.Fetch(k);
    Vec row[kWidth];
    for (int j = 0; j < kWidth; j++) row[j] = Load(b + (k * kWidth + j) * kLanes);
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kWidth; j++) sums[i][j] += a[i * kDepth + k] * row[j];
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) Store(c + (i * kWidth + j) * kLanes, sums[i][j]);
}

// The same for any number of rows: kRows at a time, then half of that, and so on.
template <int kRows, int kWidth, typename T>
inline void MultiplyAllRows(int64_t rows, const float* a, int64_t depth, const float* b, float* c, bool add,
                            Coming<T> coming) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    MultiplyRowsOnce<kRows, kWidth>(a + i * kDepth, depth, b, c + i * kWidth * kLanes, add, coming.From(i));
  if constexpr (kRows > 1)
    MultiplyAllRows<kRows / 2, kWidth>(rows - i, a + i * kDepth, depth, b, c + i * kWidth * kLanes, add,
                                       coming.From(i));
}

// sums [outputs, groups vectors] (+)= a part of the kernel times a part of a panel.
template <int kWidth, typename... Args>
void MultiplyPanel(int64_t outputs, const float* part, const Args&... args) {
  MultiplyAllRows<std::min(kMostAtOnce, kSums / kWidth), kWidth>(outputs, part, args...);
}

template <typename... Args>
void MultiplyPanel(int64_t groups, int64_t outputs, const float* part, const Args&... args) {
  switch (groups) {
    case 1: return MultiplyPanel<1>(outputs, part, args...);
    case 2: return MultiplyPanel<std::min(2, kVectors)>(outputs, part, args...);
    case 3: return MultiplyPanel<std::min(3, kVectors)>(outputs, part, args...);
    default: return MultiplyPanel<kVectors>(outputs, part, args...);
  }
}

// y [rows, outputs], rows `out` apart = sums [outputs, side] transposed.
void Put(const float* sums, int64_t side, int64_t rows, int64_t outputs, float* y, int64_t out) {
  for (int64_t o = 0; o < outputs; o += kLanes)
    for (int64_t first = 0; first < rows; first += kLanes) {
      Vec lines[kLanes];
      for (int64_t i = 0; i < kLanes; i++) lines[i] = Load(sums + (o + i) * side + first);
      Turn(lines);
      const int64_t bytes = std::min<int64_t>(kLanes, outputs - o) * static_cast<int64_t>(sizeof(float));
      for (int64_t r = 0; r < std::min<int64_t>(kLanes, rows - first); r++)
        std::memcpy(y + (first + r) * out + o, &lines[r], bytes);
    }
}

// y [rows, outputs], rows `out` apart = x, packed in panels, times `outputs` rows of the kernel. Each part of the
// kernel is copied and widened once for all rows. `after` is this thread's next item.
template <typename T>
void MultiplyItem(const float* packed, int64_t rows, const T* kernel, const T* after, int64_t in, int64_t outputs,
                  float* y, int64_t out) {
  alignas(64) float sums[kOutputs * kTogether], part[kOutputs * kDepth];
  const auto groups_of = [&](int64_t row) { return (std::min(kPanel, rows - row) + kLanes - 1) / kLanes; };
  for (int64_t first = 0; first < in; first += kDepth) {
    const int64_t depth = std::min(in - first, kDepth);
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t k = 0; k < depth; k++) part[o * kDepth + k] = ToFloat(kernel[o * in + first + k]);
    Coming<T> coming{first + depth < in ? kernel + first + depth : after, in};
    for (int64_t row = 0; row < rows; row += kPanel, coming.kernel = nullptr)
      MultiplyPanel(groups_of(row), outputs, part, depth, packed + row * in + first * groups_of(row) * kLanes,
                    sums + row * kOutputs, first > 0, coming);
  }
  for (int64_t row = 0; row < rows; row += kPanel)
    Put(sums + row * kOutputs, groups_of(row) * kLanes, std::min(kPanel, rows - row), outputs, y + row * out, out);
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, const T* x, const T* kernel, int64_t rows, int64_t in, int64_t out, float* packed,
              float* y) {
  const int64_t groups = (rows + kLanes - 1) / kLanes, blocks = (out + kOutputs - 1) / kOutputs;
  const int64_t parts = (rows + kTogether - 1) / kTogether, helpers = rows * in * out / kAlone;
  ForEach(pool, groups, helpers, [&](int64_t group) {
    const int64_t first = group * kLanes, panel = first / kPanel * kPanel;
    Pack(x + first * in, std::min<int64_t>(kLanes, rows - first), in, RoundUp(std::min(kPanel, rows - panel), kLanes),
         packed + panel * in + first - panel);
  });
  const int64_t ahead = std::min(helpers + 1, pool.num_threads());  // items of the other threads are between
  ForEach(pool, blocks * parts, helpers, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t block = item % blocks, begin = block * kOutputs, first = item / blocks * kTogether;
    const T* after = block + ahead < blocks ? kernel + (begin + ahead * kOutputs) * in : nullptr;
    MultiplyItem(packed + first * in, std::min(kTogether, rows - first), kernel + begin * in, after, in,
                 std::min(kOutputs, out - begin), y + first * out + begin, out);
  });
}

// Args: x [T, in], kernel [out, in], both of one type. Results: float32 [T, out], and a work buffer: float32, T
// rounded up to whole vectors or more, times `in`.
template <ffi::DataType type>
ffi::Error Product(ffi::ThreadPool pool, ffi::BufferR2<type> x, ffi::BufferR2<type> kernel,
                   ffi::ResultBufferR2<ffi::F32> y, ffi::ResultBufferR2<ffi::F32> packed) {
  using Number = std::conditional_t<type == ffi::F32, float, BFloat16>;
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (packed->dimensions()[0] < RoundUp(rows, kLanes) || packed->dimensions()[1] != in)
    return ffi::Error::InvalidArgument("x does not fit when packed");
  Multiply(pool, static_cast<const Number*>(x.untyped_data()), static_cast<const Number*>(kernel.untyped_data()), rows,
           in, out, packed->typed_data(), y->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_PRODUCT(name, type)                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, jaxserve::Product<type>,       \
                                ffi::Ffi::Bind()                     \
                                    .Ctx<ffi::ThreadPool>()          \
                                    .Arg<ffi::BufferR2<type>>()      \
                                    .Arg<ffi::BufferR2<type>>()      \
                                    .Ret<ffi::BufferR2<ffi::F32>>()  \
                                    .Ret<ffi::BufferR2<ffi::F32>>())

JAXSERVE_PRODUCT(JaxserveProductFloat, ffi::F32);
#if !defined(__AVX512BF16__)
JAXSERVE_PRODUCT(JaxserveProductMany, ffi::BF16);
#endif
