// An XLA call that multiplies many rows by a kernel, both bfloat16, with AVX512-BF16. CPUs without it use
// product_float.cc.
//
// Lanes are rows of x. They are packed first, so that a vector holds one pair of numbers of each of 16 rows, and each
// pair of the kernel, read in place, is multiplied by all of them. The terms of a sum are added in order, so results
// are bitwise the same whatever the other rows and the number of threads.
#if defined(__AVX512BF16__)

#include <algorithm>
#include <cstdint>

#include "pairs.h"
#include "parallel.h"
#include "turn.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int kGroups = 4;                    // vectors of a panel
constexpr int64_t kPanel = kGroups * kLanes;  // rows of x in a panel
constexpr int kSums = 24;                     // registers for sums
constexpr int kMostAtOnce = 12;               // rows of the kernel at once: each takes an address register
constexpr int64_t kOutputs = 48;              // outputs of an item; a multiple of those summed at once
constexpr int64_t kDepth = 512;               // pairs processed at a time; they fit into the L2 cache
constexpr int64_t kAlone = 1 << 21;           // multiplications that take as long as waking a thread

inline int64_t Pairs(int64_t in) { return (in + 1) / 2; }

// Packs up to 16 rows of x as [pairs, 16] of a panel whose pairs are `groups` vectors apart. Missing rows are zeros.
void Pack(const BFloat16* x, int64_t rows, int64_t in, int64_t groups, BFloat16* packed) {
  for (int64_t first = 0; first < Pairs(in); first += kLinePairs) {
    const int64_t numbers = std::min<int64_t>(in - 2 * first, 2 * kLinePairs);
    const __mmask32 mask = ~uint32_t{0} >> (32 - numbers);
    Vec lines[kLanes];
    for (int64_t r = 0; r < kLanes; r++)
      lines[r] = r < rows ? (Vec)_mm512_maskz_loadu_epi16(mask, x + r * in + 2 * first) : Vec{};
    Turn(lines);
    for (int64_t i = 0; i < Pairs(numbers); i++)
      _mm512_storeu_si512(packed + (first + i) * groups * 2 * kLanes, (__m512i)lines[i]);
  }
}

// y [rows, outputs], rows `out` apart = a panel of at most kWidth * 16 rows times `outputs` rows of the kernel.
template <int kWidth>
void MultiplyPanel(const BFloat16* panel, int64_t rows, const BFloat16* kernel, int64_t in, int64_t outputs, float* y,
                   int64_t out) {
  constexpr int kRows = std::min(kMostAtOnce, kSums / kWidth);
  alignas(64) float sums[kOutputs * kPanel];
  for (int64_t first = 0; first < Pairs(in); first += kDepth) {
    const int64_t numbers = std::min(in - 2 * first, 2 * kDepth);
    MultiplyAllPairs<kRows, kWidth>(outputs, kernel + 2 * first, in, numbers, panel + first * kWidth * 2 * kLanes,
                                    kWidth * 2 * kLanes, sums, kPanel, first > 0);
  }
  for (int64_t o = 0; o < outputs; o += kLanes) {
    const __mmask16 mask = 0xFFFF >> (kLanes - std::min<int64_t>(kLanes, outputs - o));
    for (int64_t begin = 0; begin < rows; begin += kLanes) {
      Vec turned[kLanes];
      for (int64_t i = 0; i < kLanes; i++) turned[i] = Load(sums + (o + i) * kPanel + begin);
      Turn(turned);
      for (int64_t r = 0; r < std::min<int64_t>(kLanes, rows - begin); r++)
        _mm512_mask_storeu_epi32(y + (begin + r) * out + o, mask, (__m512i)turned[r]);
    }
  }
}

void Multiply(ffi::ThreadPool& pool, const BFloat16* x, const BFloat16* kernel, int64_t rows, int64_t in, int64_t out,
              BFloat16* packed, float* y) {
  const int64_t all_groups = (rows + kLanes - 1) / kLanes, panels = (all_groups + kGroups - 1) / kGroups;
  const int64_t blocks = (out + kOutputs - 1) / kOutputs, helpers = rows * in * out / kAlone;
  const auto groups_of = [&](int64_t panel) { return std::min<int64_t>(kGroups, all_groups - panel * kGroups); };
  const auto begin_of = [&](int64_t panel) { return packed + panel * kPanel * 2 * Pairs(in); };
  ForEach(pool, all_groups, helpers, [&](int64_t group) {
    const int64_t panel = group / kGroups, first = group * kLanes;
    Pack(x + first * in, std::min<int64_t>(kLanes, rows - first), in, groups_of(panel),
         begin_of(panel) + group % kGroups * 2 * kLanes);
  });
  ForEach(pool, blocks * panels, helpers, [&](int64_t item) {
    const int64_t panel = item % panels, begin = item / panels * kOutputs, first = panel * kPanel;
    const int64_t outputs = std::min(kOutputs, out - begin), count = std::min(kPanel, rows - first);
    const BFloat16 *from = begin_of(panel), *by = kernel + begin * in;
    float* to = y + first * out + begin;
    switch (groups_of(panel)) {
      case 1: return MultiplyPanel<1>(from, count, by, in, outputs, to, out);
      case 2: return MultiplyPanel<2>(from, count, by, in, outputs, to, out);
      case 3: return MultiplyPanel<3>(from, count, by, in, outputs, to, out);
      default: return MultiplyPanel<kGroups>(from, count, by, in, outputs, to, out);
    }
  });
}

// Args: x [T, in], kernel [out, in], both bfloat16. Results: float32 [T, out], and a work buffer: bfloat16, T rounded
// up to whole vectors times `in` rounded up to whole pairs.
ffi::Error ProductMany(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR2<ffi::BF16> kernel,
                       ffi::ResultBufferR2<ffi::F32> y, ffi::ResultBufferR2<ffi::BF16> packed) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (packed->dimensions()[0] != RoundUp(rows, kLanes) || packed->dimensions()[1] != 2 * Pairs(in))
    return ffi::Error::InvalidArgument("x does not fit when packed");
  const auto* from = static_cast<const BFloat16*>(x.untyped_data());
  const auto* by = static_cast<const BFloat16*>(kernel.untyped_data());
  Multiply(pool, from, by, rows, in, out, static_cast<BFloat16*>(packed->untyped_data()), y->typed_data());
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
                                  .Ret<ffi::BufferR2<ffi::BF16>>());

#endif
