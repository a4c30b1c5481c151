// Ragged attention over block tables as one XLA call: writes new keys and values to the pool in place, then computes
// the attention of every query.
//
// Work is cut into (query tile, key head) items that threads share. A query's arithmetic does not depend on the cut:
// scores, softmax (online, Milakov and Gimelshein, 2018) and sums go over the row in order, in steps that begin at
// multiples of kStep. So results are bitwise the same for any other queries in the tile, any chunk boundaries and any
// number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "softmax.h"
#include "step.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kTile = 48;        // rows (queries times group) of a tile
constexpr int64_t kAlone = 1 << 17;  // multiplications that take as long as waking another thread

// Consecutive tokens of one chunk.
struct Tokens {
  int64_t chunk, first, count;  // `first` counts from the chunk's first
  int64_t cost;
};

// Operands and sizes of a call. Q is the type of queries, new keys and values and outputs, P that of the pool.
template <typename Q, typename P>
struct Call {
  const Q *q, *k, *v;  // [T, N, D], [T, K, D], [T, K, D]
  Q* out;              // [T, N, D]
  P* keys;             // [blocks, K, D, size]
  P* values;           // [blocks, K, size, D]
  float* key_scales = nullptr;  // [blocks, K, size], of int8
  float* value_scales = nullptr;
  const int32_t* offsets;  // [C + 1]
  const int32_t* kv_lens;  // [C]
  const int32_t* tables;   // [C, max_blocks], blocks counted from first_block
  const float* slopes = nullptr;  // [N]
  const float* sinks = nullptr;   // [N]
  int64_t num_chunks, max_blocks, first_block, heads, kv_heads, dim, size, window;
  float scale, soft_cap;  // soft_cap 0: none

  static constexpr bool kScaled = sizeof(P) == 1;

  int64_t group() const { return heads / kv_heads; }
  int64_t length(int64_t chunk) const { return offsets[chunk + 1] - offsets[chunk]; }
  // Position of the first of these tokens.
  int64_t Begin(const Tokens& tokens) const { return kv_lens[tokens.chunk] - length(tokens.chunk) + tokens.first; }
  const P* KeysOf(const Run& run) const { return keys + run.place * dim * size + run.slot; }
  const P* ValuesOf(const Run& run) const { return values + (run.place * size + run.slot) * dim; }
  // The first position that is visible to a query at this position.
  int64_t FirstSeen(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }
  // Index of the (block, key head) that holds a position of a chunk's row.
  int64_t Place(int64_t chunk, int64_t position, int64_t head) const {
    return (first_block + tables[chunk * max_blocks + position / size]) * kv_heads + head;
  }
};

// Writing.

template <typename Q, typename P>
void WriteVector(const Q* x, int64_t dim, P* y, int64_t stride, float* /*scale*/) {
  for (int64_t d = 0; d < dim; d++) Assign(y[d * stride], ToFloat(x[d]));
}

// Rounds like int8.quantize.
template <typename Q>
void WriteVector(const Q* x, int64_t dim, int8_t* y, int64_t stride, float* scale) {
  float most = 0;
  bool finite = true;
  for (int64_t d = 0; d < dim; d++) {
    const float size = std::fabs(ToFloat(x[d]));
    finite &= size <= std::numeric_limits<float>::max();
    most = std::max(most, size);
  }
  *scale = finite ? most * (1.0f / 127) : std::numeric_limits<float>::quiet_NaN();
  const float divisor = *scale > 0 ? *scale : 1;
  for (int64_t d = 0; d < dim; d++)
    y[d * stride] = finite ? static_cast<int8_t>(std::nearbyint(ToFloat(x[d]) / divisor)) : 0;
}

template <typename Q, typename P>
void Write(const Call<Q, P>& call, const Tokens& tokens, int64_t head) {
  const int64_t begin = call.Begin(tokens);
  for (int64_t i = 0; i < tokens.count; i++) {
    const int64_t place = call.Place(tokens.chunk, begin + i, head), slot = (begin + i) % call.size;
    const int64_t from = ((call.offsets[tokens.chunk] + tokens.first + i) * call.kv_heads + head) * call.dim;
    P* key = call.keys + place * call.dim * call.size + slot;
    P* value = call.values + (place * call.size + slot) * call.dim;
    const int64_t scale = Call<Q, P>::kScaled ? place * call.size + slot : 0;
    WriteVector(call.k + from, call.dim, key, call.size, call.key_scales + scale);
    WriteVector(call.v + from, call.dim, value, 1, call.value_scales + scale);
  }
}

// Attending.

// The buffers of a thread. Rows are (query, head of the group), each padded to whole vectors.
struct Scratch {
  Buffer<float> sums, maxima, totals;

  void Reset(int64_t rows, int64_t width) {
    sums.assign(rows * width, 0);
    maxima.assign(rows, -std::numeric_limits<float>::infinity());
    totals.assign(rows, 0);
  }
};

// The step that begins at position `start` of a chunk's row: its slots from position `from` to before `end`.
template <typename Q, typename P>
void Cut(const Call<Q, P>& call, int64_t chunk, int64_t head, int64_t start, int64_t from, int64_t end, Step& step) {
  const int64_t last = std::min(start + kStep, end);
  step.size = 0;
  for (int64_t position = std::max(start, from); position < last;) {
    const int64_t slot = position % call.size, count = std::min(call.size - slot, last - position);
    step.runs[step.size++] = {call.Place(chunk, position, head), slot, position - start, count};
    position += count;
  }
}

// The first step of some tokens' row.
template <typename Q, typename P>
void CutFirst(const Call<Q, P>& call, const Tokens& tokens, int64_t head, Step& step) {
  const int64_t begin = call.Begin(tokens), lowest = call.FirstSeen(begin);
  Cut(call, tokens.chunk, head, RoundDown(lowest, kStep), lowest, begin + tokens.count, step);
}

// Args: later: tokens whose keys, of later_head, this thread probably reads next; they are prefetched. Or null.
template <typename Q, typename P>
void Attend(const Call<Q, P>& call, const Tokens& tokens, int64_t head, const Tokens* later, int64_t later_head) {
  thread_local Scratch scratch;
  thread_local Products<Q, P> products;
  const int64_t group = call.group(), dim = call.dim, width = RoundUp(dim, kLanes);
  const int64_t rows = tokens.count * group;
  scratch.Reset(rows, width);
  if (call.sinks != nullptr)
    for (int64_t r = 0; r < rows; r++) {
      scratch.maxima[r] = call.sinks[head * group + r % group];
      scratch.totals[r] = 1;
    }
  const int64_t token = call.offsets[tokens.chunk] + tokens.first;
  // Start of row r in [T, N, D], seen as [T, K, group, D].
  const auto at = [&](int64_t r) { return ((token + r / group) * call.heads + head * group + r % group) * dim; };
  products.TakeQueries(rows, dim, [&](int64_t r) { return call.q + at(r); });
  const int64_t begin = call.Begin(tokens);
  const int64_t end = begin + tokens.count;         // one past the last position
  const int64_t lowest = call.FirstSeen(begin);     // blocks before it may belong to other rows
  const int64_t first_step = RoundDown(lowest, kStep);
  // Columns of the step at `start` that queries at these positions see.
  const auto seen_from = [&](int64_t start, int64_t first, int64_t last) {
    return Columns{std::max<int64_t>(0, call.FirstSeen(first) - start), std::min<int64_t>(kStep, last + 1 - start)};
  };

  alignas(64) float scores[kMostRows * kScores];
  alignas(64) float key_scales[kScores], value_scales[kScores];
  constexpr bool kScaled = Call<Q, P>::kScaled;
  Step steps[2];  // this one and the next
  CutFirst(call, tokens, head, steps[first_step / kStep % 2]);
  for (int64_t start = first_step; start < end; start += kStep) {
    const Step& step = steps[start / kStep % 2];
    Step& next = steps[1 - start / kStep % 2];
    if (start + kStep < end || later == nullptr)
      Cut(call, tokens.chunk, head, start + kStep, lowest, end, next);
    else
      CutFirst(call, *later, later_head, next);
    if (kScaled)
      for (int i = 0; i < step.size; i++) {
        const Run& run = step.runs[i];
        const int64_t from = run.place * call.size + run.slot;
        std::copy_n(call.key_scales + from, run.count, key_scales + run.column);
        std::copy_n(call.value_scales + from, run.count, value_scales + run.column);
      }
    products.TakeStep(call, step, next);
    for (int64_t first = 0; first < rows; first += kMostRows) {
      const int some = static_cast<int>(std::min<int64_t>(kMostRows, rows - first));
      const Columns seen = seen_from(start, begin + first / group, begin + (first + some - 1) / group);
      if (seen.empty()) continue;
      products.Score(call, step, first, some, seen, scores);
      for (int r = 0; r < some; r++) {
        const int64_t row = first + r, position = begin + row / group;
        float* weights = scores + r * kScores;
        const Columns visible = seen_from(start, position, position);
        if (visible.empty()) {
          Clear(weights, seen);
          continue;
        }
        const float slope = call.slopes == nullptr ? 0 : call.slopes[head * group + row % group];
        const float shrink =
            Weigh(weights, visible, seen, {call.scale, call.soft_cap, slope, static_cast<float>(position - start)},
                  kScaled ? key_scales : nullptr, kScaled ? value_scales : nullptr, scratch.maxima[row],
                  scratch.totals[row]);
        for (int64_t d = 0; d < width; d++) scratch.sums[row * width + d] *= shrink;
      }
      products.AddValues(call, step, next, some, seen, scores, &scratch.sums[first * width]);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d++)
      Assign(call.out[at(r) + d], scratch.sums[r * width + d] / scratch.totals[r]);
}

// Cuts chunks into tiles, sorted by decreasing work.
template <typename Q, typename P>
std::vector<Tokens> Tiles(const Call<Q, P>& call) {
  const int64_t tile = std::max<int64_t>(1, kTile / call.group());
  std::vector<Tokens> tiles;
  for (int64_t chunk = 0; chunk < call.num_chunks; chunk++) {
    const int64_t length = call.length(chunk);
    for (int64_t first = 0; first < length; first += tile) {
      const int64_t count = std::min(tile, length - first);
      const int64_t begin = call.kv_lens[chunk] - length + first;
      const int64_t seen = begin + count - call.FirstSeen(begin);
      tiles.push_back({chunk, first, count, count * call.group() * seen * 2 * call.dim});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tokens& a, const Tokens& b) { return a.cost > b.cost; });
  return tiles;
}

template <typename Q, typename P>
void Serve(ffi::ThreadPool& pool, const Call<Q, P>& call) {
  const std::vector<Tokens> tiles = Tiles(call);
  int64_t cost = 0;
  bool prompts = false;
  for (const Tokens& tile : tiles) {
    cost += tile.cost * call.kv_heads;
    prompts |= call.length(tile.chunk) > 1;
  }
  const int64_t count = static_cast<int64_t>(tiles.size()) * call.kv_heads, helpers = cost / kAlone;
  // A tile may read keys that other tiles of its chunk write; a decode reads nothing that others write.
  if (prompts)
    ForEach(pool, count, helpers, [&](int64_t i) {
      const NoSubnormals guard;
      const Tokens& tile = tiles[i / call.kv_heads];
      if (call.length(tile.chunk) > 1) Write(call, tile, i % call.kv_heads);
    });
  ForEach(pool, count, helpers, [&](int64_t i) {
    const NoSubnormals guard;
    const Tokens& tile = tiles[i / call.kv_heads];
    if (call.length(tile.chunk) == 1) Write(call, tile, i % call.kv_heads);
    const int64_t later = i + pool.num_threads();
    Attend(call, tile, i % call.kv_heads, later < count ? &tiles[later / call.kv_heads] : nullptr,
           later % call.kv_heads);
  });
}

template <typename Q, typename P>
ffi::Error Serve(ffi::ThreadPool& pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                 ffi::BufferR1<ffi::S32> offsets, ffi::BufferR1<ffi::S32> kv_lens, ffi::BufferR2<ffi::S32> tables,
                 ffi::BufferR0<ffi::S32> first_block, ffi::BufferR1<ffi::F32> slopes, ffi::BufferR1<ffi::F32> sinks,
                 ffi::AnyBuffer out, const std::vector<void*>& held, int64_t size, int64_t window, float scale,
                 float soft_cap) {
  const auto dims = q.dimensions();
  Call<Q, P> call;
  call.q = static_cast<const Q*>(q.untyped_data());
  call.k = static_cast<const Q*>(k.untyped_data());
  call.v = static_cast<const Q*>(v.untyped_data());
  call.out = static_cast<Q*>(out.untyped_data());
  call.keys = static_cast<P*>(held[0]);
  call.values = static_cast<P*>(held[1]);
  if (Call<Q, P>::kScaled) {
    call.key_scales = static_cast<float*>(held[2]);
    call.value_scales = static_cast<float*>(held[3]);
  }
  call.offsets = offsets.typed_data();
  call.kv_lens = kv_lens.typed_data();
  call.tables = tables.typed_data();
  if (slopes.element_count() > 0) call.slopes = slopes.typed_data();
  if (sinks.element_count() > 0) call.sinks = sinks.typed_data();
  call.num_chunks = tables.dimensions()[0];
  call.max_blocks = tables.dimensions()[1];
  call.first_block = *first_block.typed_data();
  call.heads = dims[1];
  call.kv_heads = k.dimensions()[1];
  call.dim = dims[2];
  call.size = size;
  call.window = window;
  call.scale = scale;
  call.soft_cap = soft_cap;
  for (int64_t chunk = 0; chunk < call.num_chunks; chunk++)
    if (call.offsets[chunk + 1] > dims[0] || call.kv_lens[chunk] > call.max_blocks * size)
      return ffi::Error::InvalidArgument("a chunk is longer than the batch or its block table");
  Serve(pool, call);
  const int64_t used = call.offsets[call.num_chunks] * call.heads * call.dim;
  std::memset(call.out + used, 0, (out.element_count() - used) * sizeof(Q));
  return ffi::Error::Success();
}

// Args: q, k, v, query offsets, kv_lens, block tables, the layer's first block, slopes and sinks (none: an empty array),
// the pool: keys, values and, of int8, their scales. Results: out, and the pool, which must be the same memory.
// Attributes: window (none: more than any position), scale, soft_cap (none: 0).
ffi::Error RaggedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::BufferR1<ffi::S32> offsets, ffi::BufferR1<ffi::S32> kv_lens,
                           ffi::BufferR2<ffi::S32> tables, ffi::BufferR0<ffi::S32> first_block,
                           ffi::BufferR1<ffi::F32> slopes, ffi::BufferR1<ffi::F32> sinks, ffi::RemainingArgs held,
                           ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets written, int64_t window, float scale,
                           float soft_cap) {
  std::vector<void*> pools;
  for (size_t i = 0; i < held.size(); i++) {
    const auto before = held.get<ffi::AnyBuffer>(i);
    auto after = written.get<ffi::AnyBuffer>(i);
    if (!before || !after || before->untyped_data() != (*after)->untyped_data())
      return ffi::Error::Internal("the pool was moved; it is to be updated where it lies");
    pools.push_back(before->untyped_data());
  }
  const auto keys = *held.get<ffi::AnyBuffer>(0);
  const int64_t size = keys.dimensions()[3];
  const ffi::AnyBuffer result = *out;
  const auto serve = [&](auto query, auto stored) {
    return Serve<decltype(query), decltype(stored)>(pool, q, k, v, offsets, kv_lens, tables, first_block, slopes,
                                                    sinks, result, pools, size, window, scale, soft_cap);
  };
  const auto serve_from = [&](auto query) {
    switch (keys.element_type()) {
      case ffi::F32: return serve(query, float{});
      case ffi::U16: return serve(query, BFloat16{});
      case ffi::S8: return serve(query, int8_t{});
      default: return ffi::Error::InvalidArgument("the pool is of none of float32, uint16 (bfloat16) and int8");
    }
  };
  switch (q.element_type()) {
    case ffi::F32: return serve_from(float{});
    case ffi::BF16: return serve_from(BFloat16{});
    default: return ffi::Error::InvalidArgument("queries are of neither float32 nor bfloat16");
  }
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveRaggedAttention, jaxserve::RaggedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));
