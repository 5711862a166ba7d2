// Sums of rows by TMA (Hopper and later): every warp is on its own. It pulls the pieces of rows
// that it will add, from wherever they lie (a peer's memory, its own), into a ring of stages in
// shared memory, as many stages ahead as the ring has, across the borders of items; all lanes add
// up what has come, in the order of the entries.
#pragma once
#include "cuda/kernels/base/accumulate.cuh"
#include "cuda/kernels/base/ring_sm90.cuh"
#include "cuda/kernels/throughput/sum_work.cuh"

namespace ferry::cuda::device {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// The next 32 entries of a warp's items, one a lane; several entries belong to one item, and an
/// item may begin in one batch and end in the next.
template <class Source>
struct EntryCursor {
  const Source& source;
  const SumWork& work;
  Item stride;  // to this warp's next item
  Item step;    // 32 entries further: so many items, or one more
  int advance;  // and so many entries
  Item item;
  int entry;

  __device__ EntryCursor(const Source& from, const SumWork& what) : source(from), work(what) {
    const int entries = source.entries(), lane = threadIdx.x % 32;
    stride = Item::at(work.stride, work.pieces);
    step = Item::at(std::uint64_t{work.stride} * (32 / entries), work.pieces);
    advance = 32 % entries;
    item = Item::at(work.first + std::uint64_t{work.stride} * (lane / entries), work.pieces);
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
    item.step(step, work.pieces);
    if (one_more) item.step(stride, work.pieces);
  }
};

/// The first entries of a warp: loaded long before anybody knows where the rows are.
template <class Source>
struct SumStart {
  EntryCursor<Source> cursor;  // at the first batch
  typename Source::Raw first, second;

  __device__ SumStart(const Source& source, const SumWork& work) : cursor(source, work) {
    EntryCursor<Source> ahead = cursor;
    ahead.next();
    first = cursor.load();
    second = ahead.load();
  }
};

/// 32 entries with their places. `number` counts the pulls of this warp.
template <class Source>
struct Batch {
  static constexpr int kBytesBits = 13;
  static_assert(kBytesBits + kDueBits <= 32);
  const std::byte* from = nullptr;
  float weight = 0.0f;
  std::uint32_t bytes = 0;  // and above kBytesBits what the entry waits for
  std::uint32_t number = 0;
  std::uint32_t valid = 0;  // a bit for each lane, the same in all lanes

  __device__ void fill(const EntryCursor<Source>& cursor, const typename Source::Raw& raw,
                       std::uint32_t& numbers) {
    Entry entry{nullptr, 0.0f};
    if (cursor.valid()) entry = cursor.source.resolve(raw, cursor.item.token, cursor.entry);
    valid = __ballot_sync(0xffffffffu, entry.row != nullptr);
    from = entry.row + cursor.work.offset_of(cursor.item.piece);
    weight = entry.weight;
    bytes = cursor.work.bytes_of(cursor.item.piece);
    if constexpr (Source::kWaits) {
      if (entry.row != nullptr) bytes |= cursor.source.due(raw, cursor.entry) << kBytesBits;
    }
    const std::uint32_t lane = threadIdx.x % 32;
    number = numbers + __popc(valid & ((1u << lane) - 1u));
    if constexpr (Source::kWaits) fence_proxy_async();  // what `due` has seen, before TMA reads
    if ((valid >> lane & 1u) == 0) from = nullptr;
    numbers += __popc(valid);
  }
};

/// Where a warp's consumption stands.
struct RingPosition {
  std::uint32_t used = 0;
  int stage = 0;
  std::uint32_t parity = 0;
  bool failed = false;  // of this lane: what it pulled is not there

  __device__ void step(const Ring& ring) {
    ++used;
    if (++stage == ring.stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

/// One lane: fills a stage with its entry's piece, once that may be read. In a group that has
/// failed the stage ends its phase with what it held.
template <class Source>
__device__ __forceinline__ void pull(const Source& source, const std::byte* from,
                                     std::uint32_t bytes, const Ring& ring, int stage,
                                     RingPosition& at) {
  std::uint64_t* barrier = ring.barriers + stage;
  bool there = true;
  if constexpr (Source::kWaits) {
    const std::uint32_t due = bytes >> Batch<Source>::kBytesBits;
    bytes &= (1u << Batch<Source>::kBytesBits) - 1u;
    if (due != 0) {
      there = source.await(due);
      fence_proxy_async();  // what it has seen, before TMA reads the row
    }
  }
  barrier_expect(barrier, there ? bytes : 0);
  if (there) {
    bulk_load(ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes, from, bytes,
              barrier);
  } else {
    at.failed = true;
  }
}

/// Whole warp: no lane waits for a stage while another still waits for the row it is to pull.
template <class Source>
__device__ __forceinline__ void meet() {
  if constexpr (Source::kWaits) __syncwarp();
}

/// Pulls of a new batch that the ring has room for already.
template <class Source>
__device__ __forceinline__ void pull_first(const Source& source, const Batch<Source>& batch,
                                           const Ring& ring, RingPosition& at) {
  if (batch.from != nullptr && batch.number - at.used < static_cast<std::uint32_t>(ring.stages)) {
    pull(source, batch.from, batch.bytes, ring,
         static_cast<int>(batch.number % static_cast<std::uint32_t>(ring.stages)), at);
  }
  meet<Source>();
}

/// After a failure: no block may end while the copy engine still writes to its shared memory.
/// `numbers`: pulls that the warp has known of; those that the ring had room for have begun. A peer
/// that is gone may never send its bytes, so this, too, ends.
__device__ inline void drain(const Ring& ring, RingPosition at, std::uint32_t numbers) {
  constexpr std::uint64_t kMostNs = 200'000'000;
  const std::uint32_t begun = min(numbers, at.used + static_cast<std::uint32_t>(ring.stages));
  const std::uint64_t start = now_ns();
  for (; at.used != begun; at.step(ring)) {
    while (!barrier_try_wait(ring.barriers + at.stage, at.parity)) {
      if (now_ns() - start > kMostNs) return;
    }
  }
}

/// Waits for the next stage, adds it, and has the stage pulled anew: by the lane that holds the
/// entry whose turn it is. False: the group has failed, and nothing was pulled.
template <class T, int kVectors, bool kWeighted, class Source>
__device__ __forceinline__ bool add_stage(const Source& source, float* acc, float weight,
                                          const Ring& ring, RingPosition& at,
                                          const Batch<Source>& now, const Batch<Source>& next) {
  const bool came = await_stage(ring, at.stage, at.parity);
  if (__any_sync(0xffffffffu, at.failed || !came)) return false;
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
    // By value: a choice between the batches themselves would put them into local memory.
    pull(source, from_now ? now.from : next.from, from_now ? now.bytes : next.bytes, ring, at.stage,
         at);
  }
  meet<Source>();
  at.step(ring);
  return true;
}

template <class T, int kVectors>
__device__ __forceinline__ void store_piece(const SumWork& work, std::uint32_t row,
                                            const Item& item, float* acc) {
  std::byte* out =
      work.out + static_cast<std::int64_t>(row) * work.row_bytes + work.offset_of(item.piece);
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
template <class T, int kVectors, bool kWeighted, class Source, class Count>
__device__ bool sum_rows(const SumStart<Source>& start, const Ring& ring, Count& done) {
  EntryCursor<Source> cursor = start.cursor;
  const Source& source = cursor.source;
  const SumWork& work = cursor.work;
  std::uint32_t numbers = 0;
  RingPosition at;
  Batch<Source> now, next;
  fence_proxy_async();  // the peers' flags, seen by ordinary loads, before what TMA reads of them
  now.fill(cursor, start.first, numbers);
  pull_first(source, now, ring, at);
  cursor.next();
  next.fill(cursor, start.second, numbers);
  pull_first(source, next, ring, at);
  cursor.next();
  typename Source::Raw raw = cursor.load();
  Item item = Item::at(work.first, work.pieces);
  const int entries = source.entries();
  int entry = 0;
  float acc[kVectors * kPerVector<T>] = {};
  while (item.token < work.rows) {
    for (int x = 0; x < 32 && item.token < work.rows;) {
      const int count = min(entries - entry, 32 - x);
      for (std::uint32_t left = now.valid >> x & (0xffffffffu >> (32 - count)); left != 0;
           left &= left - 1) {
        const float weight =
            kWeighted ? __shfl_sync(0xffffffffu, now.weight, x + __ffs(left) - 1) : 0.0f;
        if (!add_stage<T, kVectors, kWeighted>(source, acc, weight, ring, at, now, next)) {
          drain(ring, at, numbers);
          return false;
        }
      }
      x += count;
      entry += count;
      if (entry == entries) {
        store_piece<T, kVectors>(work, source.row_of(item.token), item, acc);
        entry = 0;
        item.step(cursor.stride, work.pieces);
        done.reached(item.token);
      }
    }
    now = next;
    next.fill(cursor, raw, numbers);
    pull_first(source, next, ring, at);
    cursor.next();
    raw = cursor.load();  // a whole batch before it is needed
  }
  done.reached(work.rows);
  return true;
}

#endif

}  // namespace ferry::cuda::device
