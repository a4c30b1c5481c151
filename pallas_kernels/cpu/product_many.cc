// XLA calls that multiply many rows by a kernel, or runs of rows by a kernel each, all bfloat16, with AVX512-BF16. CPUs
// without it use product_float.cc for one kernel, and product.cc for runs.
//
// Lanes are rows of x. They are packed first, so that a vector holds one pair of numbers of each of 16 rows, and each
// pair of the kernel, read in place, is multiplied by all of them. The terms of a sum are added in order, so results
// are bitwise the same whatever the other rows and the number of threads.
#if defined(__AVX512BF16__)

#include <algorithm>
#include <cstdint>
#include <vector>

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
constexpr int64_t kOutputs = 48;              // outputs in a panel's sums; a multiple of those summed at once
constexpr int64_t kRead = 1 << 20;            // bytes of an item's kernel where it is read once: 10 to 20% faster
constexpr int64_t kDepth = 1024;              // pairs processed at a time; they fit into the L2 cache
constexpr int64_t kAlone = 1 << 21;           // multiplications that take as long as waking a thread
constexpr int64_t kFilling = 1 << 23;         // bytes of kernels that drive results out of the caches

inline int64_t Pairs(int64_t in) { return (in + 1) / 2; }

// Stores the first `count` results of a vector, or all if there are fewer. Those that go past the caches are whole lines,
// which are not read before they are stored, and take no place of the kernel's.
inline void StoreResults(float* y, Vec x, int64_t count, bool past_caches) {
  if (past_caches) return _mm512_stream_ps(y, (__m512)x);
  _mm512_mask_storeu_ps(y, count < kLanes ? (1u << count) - 1 : 0xFFFF, (__m512)x);
}

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
                   int64_t out, bool past_caches) {
  constexpr int kRows = std::min(kMostAtOnce, kSums / kWidth);
  alignas(64) float sums[kOutputs * kPanel];
  for (int64_t first = 0; first < Pairs(in); first += kDepth) {
    const int64_t numbers = std::min(in - 2 * first, 2 * kDepth);
    MultiplyAllPairs<kRows, kWidth>(outputs, kernel + 2 * first, in, numbers, panel + first * kWidth * 2 * kLanes,
                                    kWidth * 2 * kLanes, sums, kPanel, first > 0);
  }
  for (int64_t o = 0; o < outputs; o += kLanes) {
    for (int64_t begin = 0; begin < rows; begin += kLanes) {
      Vec turned[kLanes];
      for (int64_t i = 0; i < kLanes; i++) turned[i] = Load(sums + (o + i) * kPanel + begin);
      Turn(turned);
      for (int64_t r = 0; r < std::min<int64_t>(kLanes, rows - begin); r++)
        StoreResults(y + (begin + r) * out + o, turned[r], outputs - o, past_caches);
    }
  }
}

template <typename... Args>
void MultiplyPanel(int64_t width, const Args&... args) {
  switch (width) {
    case 1: return MultiplyPanel<1>(args...);
    case 2: return MultiplyPanel<2>(args...);
    case 3: return MultiplyPanel<3>(args...);
    default: return MultiplyPanel<kGroups>(args...);
  }
}

// Rows of x that one kernel multiplies, and the groups of lanes from which on they are packed.
struct Run {
  const BFloat16* kernel;
  int64_t start, rows, first_group;

  int64_t groups() const { return (rows + kLanes - 1) / kLanes; }
  int64_t panels() const { return (groups() + kGroups - 1) / kGroups; }
  int64_t groups_of(int64_t panel) const { return std::min<int64_t>(kGroups, groups() - panel * kGroups); }
};

// Calls work(run, i) for each i below count(run) of every run, shared between threads.
template <typename Count, typename Work>
void ForEachOfRuns(ffi::ThreadPool& pool, const std::vector<Run>& runs, int64_t helpers, const Count& count,
                   const Work& work) {
  std::vector<int64_t> ends;
  for (const Run& run : runs) ends.push_back((ends.empty() ? 0 : ends.back()) + count(run));
  ForEach(pool, ends.empty() ? 0 : ends.back(), helpers, [&](int64_t item) {
    const size_t at = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    work(runs[at], item - (at == 0 ? 0 : ends[at - 1]));
  });
}

void Multiply(ffi::ThreadPool& pool, const BFloat16* x, const std::vector<Run>& runs, int64_t in, int64_t out,
              BFloat16* packed, float* y) {
  int64_t rows = 0;
  for (const Run& run : runs) rows += run.rows;
  const int64_t helpers = rows * in * out / kAlone, all = out * static_cast<int64_t>(runs.size());
  const int64_t once = std::max(kOutputs, OutputsOfItem(all, 2 * in, kOutputs, pool, kRead));
  // A step of a large model takes 4 to 9% less time so; one whose layers fit into the caches would take 3% more.
  const bool are_lines = out % kLanes == 0 && reinterpret_cast<uintptr_t>(y) % kCacheLine == 0;
  const bool past_caches = are_lines && 2 * all * in >= kFilling;
  const auto outputs_of = [&](const Run& run) { return run.panels() == 1 ? once : kOutputs; };
  const auto begin_of = [&](const Run& run, int64_t panel) {
    return packed + (run.first_group + panel * kGroups) * kLanes * 2 * Pairs(in);
  };
  ForEachOfRuns(pool, runs, helpers, [](const Run& run) { return run.groups(); }, [&](const Run& run, int64_t group) {
    const int64_t panel = group / kGroups, first = group * kLanes;
    Pack(x + (run.start + first) * in, std::min<int64_t>(kLanes, run.rows - first), in, run.groups_of(panel),
         begin_of(run, panel) + group % kGroups * 2 * kLanes);
  });
  const auto items_of = [&](const Run& run) { return (out - 1) / outputs_of(run) + 1; };
  ForEachOfRuns(pool, runs, helpers, [&](const Run& run) { return items_of(run) * run.panels(); },
                [&](const Run& run, int64_t item) {
    const int64_t panel = item % run.panels(), first = panel * kPanel, count = std::min(kPanel, run.rows - first);
    const int64_t start = item / run.panels() * outputs_of(run), end = std::min(out, start + outputs_of(run));
    for (int64_t begin = start; begin < end; begin += kOutputs)
      MultiplyPanel(run.groups_of(panel), begin_of(run, panel), count, run.kernel + begin * in, in,
                    std::min(kOutputs, end - begin), y + (run.start + first) * out + begin, out, past_caches);
  });
}

// Args: x [T, in], kernel [out, in], both bfloat16. Results: float32 [T, out], and a work buffer: bfloat16, T rounded
// up to whole vectors times `in` rounded up to whole pairs.
ffi::Error ProductMany(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR2<ffi::BF16> kernel,
                       ffi::ResultBufferR2<ffi::F32> y, ffi::ResultBufferR2<ffi::BF16> packed) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = kernel.dimensions()[0];
  if (packed->dimensions()[0] != RoundUp(rows, kLanes) || packed->dimensions()[1] != 2 * Pairs(in))
    return ffi::Error::InvalidArgument("x does not fit when packed");
  const auto* by = static_cast<const BFloat16*>(kernel.untyped_data());
  Multiply(pool, static_cast<const BFloat16*>(x.untyped_data()), {{by, 0, rows, 0}}, in, out,
           static_cast<BFloat16*>(packed->untyped_data()), y->typed_data());
  return ffi::Error::Success();
}

// Args: x [R, in], kernels [G, out, in], both bfloat16, sizes int32 [G]. Results: float32 [R, out] (see
// `MultiplyRuns` in product.cc), and a work buffer: bfloat16, R and a vector more for each run, rounded up to whole
// vectors, times `in` rounded up to whole pairs.
ffi::Error RunsProductMany(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x, ffi::BufferR3<ffi::BF16> kernels,
                           ffi::BufferR1<ffi::S32> sizes, ffi::ResultBufferR2<ffi::F32> y,
                           ffi::ResultBufferR2<ffi::BF16> packed) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1];
  const int64_t groups = kernels.dimensions()[0], out = kernels.dimensions()[1];
  if (packed->dimensions()[0] != RoundUp(rows, kLanes) + kLanes * std::min(groups, rows) ||
      packed->dimensions()[1] != 2 * Pairs(in))
    return ffi::Error::InvalidArgument("x does not fit when packed");
  std::vector<Run> runs;
  int64_t start = 0, group = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min<int64_t>(std::max(sizes.typed_data()[g], 0), rows - start);
    if (count == 0) continue;
    runs.push_back({static_cast<const BFloat16*>(kernels.untyped_data()) + g * out * in, start, count, group});
    start += count, group += runs.back().groups();
  }
  std::fill(y->typed_data() + start * out, y->typed_data() + rows * out, 0.0f);
  Multiply(pool, static_cast<const BFloat16*>(x.untyped_data()), runs, in, out,
           static_cast<BFloat16*>(packed->untyped_data()), y->typed_data());
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveRunsProductMany, jaxserve::RunsProductMany,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR3<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>());

#endif
