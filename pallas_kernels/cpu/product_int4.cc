// An XLA call that multiplies by a kernel in int4, with a scale per group of inputs, with AVX512-VNNI. Kernels are
// widened in registers: only the narrow numbers are read.
//
// The instruction adds four products of unsigned by signed bytes to each of 16 sums. Rows of x are rounded to signed
// bytes, group by group. Numbers of the kernel become unsigned by an offset, which the sums of x take back. A vector of
// the kernel has four quarters of 32 inputs. Few rows are multiplied in int4_few.h, many in int4_many.h. Results are
// bitwise the same whatever the other rows and the number of threads.
#include <algorithm>
#include <cstdint>

#include "int4.h"
#include "int4_few.h"
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

// Outputs [begin, end) of many rows.
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
  bytes.values.resize(rows * kernel.Chunks() * kInChunk * kVector);
  bytes.steps.resize(rows * kernel.Chunks() * kLanes);
  bytes.minus_sums.resize(rows * kernel.Chunks() * kLanes);
  if (!few) groups.Reserve(kernel, rows);
  ForEach(pool, rows, rows * kernel.in / kAloneRounding, [&](int64_t row) {
    RoundRow(x + row * kernel.in, kernel, row, bytes);
    if (!few) groups.Take(kernel, bytes, row);
  });
  const Buffer<Place> places = few ? Places(kernel) : Buffer<Place>();
  const int64_t outputs = OutputsOfItem(kernel.out, kernel.in / 2, kInBlock, pool);
  ForEach(pool, (kernel.out + outputs - 1) / outputs, kernel.out * kernel.in / 2 / kAlone, [&](int64_t item) {
    const NoSubnormals guard;
    const int64_t last = std::min(kernel.out, (item + 1) * outputs);
    for (int64_t begin = item * outputs; begin < last; begin += kInBlock) {
      const int64_t end = std::min(last, begin + kInBlock);
      const T* later = scales + end * kernel.groups;  // of the next block
      for (size_t i = 0; i < kInBlock * kernel.groups; i += kCacheLine / sizeof(T)) __builtin_prefetch(later + i);
      if (few)
        MultiplyFew(kernel, scales, places, bytes, rows, begin, end, y);
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
