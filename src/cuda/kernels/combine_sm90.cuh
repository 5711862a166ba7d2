// Sums of rows by TMA (Hopper and later): every warp is on its own. It pulls the pieces of rows
// that it will add, from wherever they lie (a peer's memory, its own), into a ring of stages in
// shared memory, as many stages ahead as the ring has, across the borders of items; all lanes add
// up what has come, in the order of the entries.
#pragma once
#include "cuda/kernels/accumulate.cuh"
#include "cuda/kernels/ring_sm90.cuh"
#include "cuda/kernels/sum_work.cuh"

namespace ferry::cuda::device {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// The next 32 entries of a warp's items, one a lane; several entries belong to one item, and an
/// item may begin in one chunk and end in the next.
template <class Source>
struct EntryCursor {
  const Source& source;
  const SumWork& work;
  Item step, step_and_one;  // 32 entries further: so many items, or one more
  int advance;              // and so many entries
  Item item;
  int entry;

  __device__ EntryCursor(const Source& from, const SumWork& what) : source(from), work(what) {
    const int entries = source.entries(), lane = threadIdx.x % 32;
    const std::uint64_t stride = work.stride;
    step = Item::at(stride * (32 / entries), work.pieces);
    step_and_one = Item::at(stride * (32 / entries + 1), work.pieces);
    advance = 32 % entries;
    item = Item::at(work.first + stride * (lane / entries), work.pieces);
    entry = lane % entries;
  }
  __device__ bool valid() const { return item.token < work.rows; }
  __device__ typename Source::Raw load() const {
    return valid() ? source.load(item.token, entry) : typename Source::Raw{};
  }
  __device__ void next() {
    entry += advance;
    const bool one_more = entry >= source.entries();
    if (one_more) entry -= source.entries();
    item.step(one_more ? step_and_one : step, work.pieces);
  }
};

/// The first entries of a warp: loaded long before anybody knows where the rows are.
template <class Source>
struct SumStart {
  EntryCursor<Source> cursor;  // at the first chunk
  typename Source::Raw first, second;

  __device__ SumStart(const Source& source, const SumWork& work) : cursor(source, work) {
    EntryCursor<Source> ahead = cursor;
    ahead.next();
    first = cursor.load();
    second = ahead.load();
  }
};

/// 32 entries with their places, ready to be pulled. `number` counts the pulls of this warp.
struct Chunk {
  const std::byte* from = nullptr;
  float weight = 0.0f;
  std::uint32_t bytes = 0;
  std::uint32_t number = 0;
  std::uint32_t valid = 0;  // a bit for each lane, the same in all lanes

  template <class Source>
  __device__ void fill(const EntryCursor<Source>& cursor, const typename Source::Raw& raw,
                       std::uint32_t& numbers) {
    Entry entry{nullptr, 0.0f};
    if (cursor.valid()) entry = cursor.source.resolve(raw, cursor.item.token, cursor.entry);
    valid = __ballot_sync(0xffffffffu, entry.row != nullptr);
    from = entry.row + cursor.work.offset_of(cursor.item.piece);
    weight = entry.weight;
    bytes = cursor.work.bytes_of(cursor.item.piece);
    const std::uint32_t lane = threadIdx.x % 32;
    number = numbers + __popc(valid & ((1u << lane) - 1u));
    if ((valid >> lane & 1u) == 0) from = nullptr;
    numbers += __popc(valid);
  }
};

__device__ __forceinline__ void pull(const std::byte* from, std::uint32_t bytes, const Ring& ring,
                                     int stage) {
  std::uint64_t* barrier = ring.barriers + stage;
  barrier_expect(barrier, bytes);
  bulk_load(ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes, from, bytes, barrier);
}

/// Pulls of a new chunk that the ring has room for already.
__device__ inline void pull_first(const Chunk& chunk, const Ring& ring, std::uint32_t used) {
  if (chunk.from != nullptr && chunk.number - used < static_cast<std::uint32_t>(ring.stages)) {
    pull(chunk.from, chunk.bytes, ring,
         static_cast<int>(chunk.number % static_cast<std::uint32_t>(ring.stages)));
  }
}

/// Where a warp's consumption stands.
struct RingPosition {
  std::uint32_t used = 0;
  int stage = 0;
  std::uint32_t parity = 0;
  bool failed = false;  // of this lane: what is summed from here on is never used
};

/// Waits for the next stage, adds it, and has the stage pulled anew: by the lane that holds the
/// entry whose turn it is.
template <class T, int kVectors, bool kWeighted>
__device__ __forceinline__ void add_stage(float* acc, float weight, const Ring& ring,
                                          RingPosition& at, const Chunk& now, const Chunk& next) {
  if (!await_stage(ring, at.stage, at.parity)) at.failed = true;
  const auto* vectors = reinterpret_cast<const uint4*>(
      ring.data + static_cast<std::uint32_t>(at.stage) * ring.piece_bytes);
  // Past the end of a short piece lies what an earlier one left: added, never stored.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    add_vector<T, kWeighted>(acc + v * kPerVector<T>, vectors[threadIdx.x % 32 + 32 * v], weight);
  }
  __syncwarp();  // all lanes have read the stage
  const std::uint32_t turn = at.used + static_cast<std::uint32_t>(ring.stages);
  const bool from_now = now.from != nullptr && now.number == turn;
  const bool from_next = next.from != nullptr && next.number == turn;
  if (from_now || from_next) {
    fence_proxy_async_shared();  // those reads before the write by TMA
    // By value: a choice between the chunks themselves would put them into local memory.
    pull(from_now ? now.from : next.from, from_now ? now.bytes : next.bytes, ring, at.stage);
  }
  ++at.used;
  if (++at.stage == ring.stages) {
    at.stage = 0;
    at.parity ^= 1u;
  }
}

template <class T, int kVectors>
__device__ __forceinline__ void store_piece(const SumWork& work, const Item& item, float* acc) {
  std::byte* out = work.out + static_cast<std::int64_t>(item.token) * work.row_bytes +
                   work.offset_of(item.piece);
  const int count = static_cast<int>(work.bytes_of(item.piece) / 16);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = static_cast<int>(threadIdx.x % 32) + 32 * v;
    if (at < count) reinterpret_cast<uint4*>(out)[at] = round_vector<T>(acc + v * kPerVector<T>);
  }
#pragma unroll
  for (int i = 0; i < kVectors * kPerVector<T>; ++i) acc[i] = 0.0f;
}

/// All items of this warp, once the rows may be read. False: the group has failed.
template <class T, int kVectors, bool kWeighted, class Source>
__device__ bool sum_rows(const SumStart<Source>& start, const Ring& ring) {
  EntryCursor<Source> cursor = start.cursor;
  const SumWork& work = cursor.work;
  std::uint32_t numbers = 0;
  RingPosition at;
  Chunk now, next;
  fence_proxy_async();  // the peers' flags, seen by ordinary loads, before what TMA reads of them
  now.fill(cursor, start.first, numbers);
  pull_first(now, ring, 0);
  cursor.next();
  next.fill(cursor, start.second, numbers);
  pull_first(next, ring, 0);
  cursor.next();
  typename Source::Raw raw = cursor.load();
  Item item = Item::at(work.first, work.pieces);
  const Item stride = Item::at(work.stride, work.pieces);
  const int entries = cursor.source.entries();
  int entry = 0;
  float acc[kVectors * kPerVector<T>] = {};
  while (item.token < work.rows) {
    for (int x = 0; x < 32 && item.token < work.rows;) {
      const int count = min(entries - entry, 32 - x);
      for (std::uint32_t left = now.valid >> x & (0xffffffffu >> (32 - count)); left != 0;
           left &= left - 1) {
        const float weight =
            kWeighted ? __shfl_sync(0xffffffffu, now.weight, x + __ffs(left) - 1) : 0.0f;
        add_stage<T, kVectors, kWeighted>(acc, weight, ring, at, now, next);
      }
      x += count;
      entry += count;
      if (entry == entries) {
        if (__any_sync(0xffffffffu, at.failed)) return false;
        store_piece<T, kVectors>(work, item, acc);
        entry = 0;
        item.step(stride, work.pieces);
      }
    }
    now = next;
    next.fill(cursor, raw, numbers);
    pull_first(next, ring, at.used);
    cursor.next();
    raw = cursor.load();  // a whole chunk before it is needed
  }
  return true;
}

#endif

}  // namespace ferry::cuda::device
