// Vectors of the CPU's width, as the compiler's vector types (GCC and Clang), and operations on them.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Rows and vectors of a product that are summed in registers: 24 of 32, or 12 of 16.
constexpr int kMostRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

constexpr int kFewRows = 2;  // few enough to be bound by memory
constexpr size_t kCacheLine = 64;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef int16_t ShortVec __attribute__((vector_size(2 * kLanes)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

struct BFloat16 {
  uint16_t bits;
};

// An array that is aligned to cache lines, so that no vector spans two of them.
template <typename T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kCacheLine}));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{kCacheLine}); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
template <typename T>
using Buffer = std::vector<T, LineAllocator<T>>;

constexpr int64_t RoundDown(int64_t n, int64_t multiple) { return n / multiple * multiple; }
constexpr int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Keeps a vector in a register. GCC loads it again for each instruction that takes it, as if that cost nothing.
template <typename V>
inline void KeepInRegister([[maybe_unused]] V& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

inline Vec Splat(float x) { return x - Vec{}; }

// A number type in memory, a vector of it, and its conversion to float.
template <typename T>
struct Packed;
template <>
struct Packed<float> {
  using type = Vec;
  static Vec Widen(Vec x) { return x; }
};
template <>
struct Packed<BFloat16> {
  using type = HalfVec;
  static Vec Widen(HalfVec x) { return (Vec)(__builtin_convertvector(x, BitVec) << 16); }
};
template <>
struct Packed<int8_t> {
  using type = ByteVec;
  static Vec Widen(ByteVec x) {  // in steps of twice the width: GCC converts larger steps number by number
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, ShortVec), IntVec), Vec);
  }
};

// The vector at p; with a count, only the first `count` numbers, and zeros.
template <typename T>
inline Vec Load(const T* p) {
  typename Packed<T>::type x;
  std::memcpy(&x, p, sizeof x);
  return Packed<T>::Widen(x);
}

template <typename T>
inline Vec Load(const T* p, int count) {
  typename Packed<T>::type x{};
  std::memcpy(&x, p, count * sizeof(T));
  return Packed<T>::Widen(x);
}

inline void Store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

inline float ToFloat(float x) { return x; }
inline float ToFloat(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// The largest magnitude of `count` numbers; not a number if one is not.
inline float Magnitude(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    if (bits > most) most = bits;
  }
  float y;
  std::memcpy(&y, &most, sizeof y);
  return y;
}

inline void Assign(float& y, float x) { y = x; }
inline void Assign(BFloat16& y, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y.bits = x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// Reduces lanes by halves: a fixed order, the same everywhere. Halves are vectors, which stay in registers; a loop over
// lanes in memory took as long as the rest of a short product.
template <int kCount = kLanes, typename Vector, typename Operator>
inline float Reduce(const Vector& x, Operator combine) {
  if constexpr (kCount == 2) {
    float lanes[2];
    std::memcpy(lanes, &x, sizeof lanes);
    return combine(lanes[0], lanes[1]);
  } else {
    typedef float Half __attribute__((vector_size(2 * kCount)));
    Half low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
    return Reduce<kCount / 2>(combine(low, high), combine);
  }
}

// Splits e^x into 2^n and e^rest: returns e^rest - 1, and n in `exponent`, as the exponent bits of a float.
inline Vec ExpOfRest(Vec x, IntVec& exponent) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the last bits
  const Vec shifted = x * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Vec p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  exponent = (IntVec)shifted << 23;
  return p * (r * r) + r;
}

// e^x of x <= 0, within 2 units in the last place: 1 for 0, 0 below -87 (the smallest float), NaN for NaN.
inline Vec Exp(Vec x) {
  IntVec exponent;
  const Vec p = ExpOfRest(x, exponent) + 1.0f;
  const Vec y = (Vec)((IntVec)p + exponent);
  return x == x ? (x < -87.0f ? Vec{} : y) : x;
}

// The hyperbolic tangent, within 3 units in the last place: -e / (e + 2) with e = exp(-2|x|) - 1, and x's sign.
inline Vec Tanh(Vec x) {
  const uint32_t kSign = 0x80000000;
  const int32_t kOne = 0x3F800000;  // 1.0f
  const Vec y = -2.0f * (Vec)((BitVec)x & ~kSign);
  IntVec exponent;
  const Vec rest = ExpOfRest(y < -40.0f ? Splat(-40.0f) : y, exponent);
  const Vec power = (Vec)(exponent + kOne);
  const Vec e = power * rest + (power - 1.0f);
  return (Vec)((BitVec)(e / (e + 2.0f)) & ~kSign | (BitVec)x & kSign);
}

// c [kRows, kWidth vectors] (+)= a [kRows, depth] * b [depth, ...], the terms of each sum in order. With kPartial only
// `count` numbers of each row of b may be read, less than a vector.
//
// `next` has the layout of b and is needed soon. With few rows the product is bound by memory, so it is prefetched into
// the L2 cache (it does not fit into L1).
template <int kRows, int kWidth, bool kAdd, bool kPartial = false, typename T>
inline void MultiplyTile(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
                         int64_t c_stride, const T* next, int count = 0) {
  Vec sums[kRows][kWidth];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) sums[i][j] = kAdd ? Load(c + i * c_stride + j * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec row[kWidth];
    for (int j = 0; j < kWidth; j++) {
      const T* from = b + k * b_stride + j * kLanes;
      row[j] = kPartial ? Load(from, count) : Load(from);
    }
    if (kRows <= kFewRows)
      for (size_t line = 0; line < kWidth * kLanes * sizeof(T); line += kCacheLine)
        __builtin_prefetch(reinterpret_cast<const char*>(next + k * b_stride) + line, /*rw=*/0, /*locality=*/2);
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kWidth; j++) sums[i][j] += a[i * a_stride + k] * row[j];
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kWidth; j++) Store(c + i * c_stride + j * kLanes, sums[i][j]);
}

template <int kRows, bool kAdd, typename T>
void MultiplyRows(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
                  int64_t c_stride, int64_t columns, const T* next) {
  // Few rows use more vectors: enough sums to hide the latency of one, and 64 numbers where possible.
  constexpr int kWidth = kRows > kFewRows ? kVectors : kLanes == 16 ? 4 : 8 / kRows;
  int64_t n = 0;
  for (; n + kWidth * kLanes <= columns; n += kWidth * kLanes)
    MultiplyTile<kRows, kWidth, kAdd>(a, a_stride, b + n, b_stride, depth, c + n, c_stride, next + n);
  for (; n + kLanes <= columns; n += kLanes)
    MultiplyTile<kRows, 1, kAdd>(a, a_stride, b + n, b_stride, depth, c + n, c_stride, next + n);
  if (n < columns)
    MultiplyTile<kRows, 1, kAdd, true>(a, a_stride, b + n, b_stride, depth, c + n, c_stride, next + n, columns - n);
}

// c [rows, columns] (+)= a [rows, depth] * b [depth, columns], for up to kMostRows rows. Writes whole vectors of c, so
// its rows must be long enough for them.
template <bool kAdd, typename T>
void Multiply(int rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
              int64_t c_stride, int64_t columns, const T* next) {
  switch (rows) {
    case 1: return MultiplyRows<1, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
    case 2: return MultiplyRows<2, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
    case 3: return MultiplyRows<3, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
    case 4: return MultiplyRows<4, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
    case 5: return MultiplyRows<5, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
    default: return MultiplyRows<kMostRows, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, columns, next);
  }
}

// While alive, treats subnormal numbers as zero on this thread: they are slow, and threads differ in the setting.
class NoSubnormals {
 public:
#if defined(__SSE__)
  NoSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  NoSubnormals() {}
  ~NoSubnormals() {}
#endif
};

}  // namespace jaxserve
