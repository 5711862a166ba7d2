// Counts of the routes of a batch, and their places: those of an expert go home first, then to its
// copies in ascending rank, in ascending order. Each block has a part of the routes, one behind the
// other; what is before it is counted by a kernel before.
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/balance.hpp"

namespace ferry::cuda {
namespace {

constexpr int kUnits = BalanceStateLayout::kUnits;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAll = ~0u;

__device__ int thread() {
  return static_cast<int>(threadIdx.x);
}

template <class Id>
struct RoutesOf {
  const Id* ids;
  std::int64_t count;
  std::int64_t part;  ///< of a warp; a multiple of 32

  /// Of this warp.
  __device__ std::int64_t first() const {
    return (static_cast<std::int64_t>(blockIdx.x) * kWarps + thread() / 32) * part;
  }
  /// −1: no expert, or none is left.
  __device__ int expert(std::int64_t i, int experts) const {
    if (i >= count) return -1;
    const std::int64_t id = ids[i];
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
  }
};

template <class Id>
__global__ void __launch_bounds__(kThreads)
    counts_kernel(RoutesOf<Id> routes, int experts, std::int32_t* out) {
  extern __shared__ std::int32_t counts[];
  for (int e = thread(); e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const std::int64_t first = routes.first();
  for (std::int64_t i = first + thread() % 32; i < first + routes.part; i += 32) {
    const int expert = routes.expert(i, experts);
    const unsigned same = __match_any_sync(kAll, expert);
    if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == thread() % 32) {
      atomicAdd(&counts[expert], __popc(same));
    }
  }
  __syncthreads();
  for (int e = thread(); e < experts; e += kThreads) {
    if (counts[e] != 0) atomicAdd(&out[e], counts[e]);
  }
}

struct PlacesParameters {
  BatchPlanShape shape{};
  BalanceStateLayout at{};
  const std::byte* state = nullptr;
  std::int32_t* tallies = nullptr;  ///< [kUnits, places]
  int rank = 0;
  std::int64_t* out = nullptr;
};

/// In shared memory: what a block knows of the copies. An expert with copies is known by the first
/// place of one.
struct Copies {
  std::int32_t* first;   ///< [experts] place; −1: no copies
  std::int32_t* next;    ///< [places] of the same expert; −1: none
  std::int32_t* quota;   ///< [places] slots of this rank
  std::int32_t* home;    ///< [places], of a first one: slots that stay at home
  std::int32_t* before;  ///< [kWarps, places]: slots for the expert before those of a warp
};

std::size_t copies_bytes(const BatchPlanShape& shape) {
  const auto places = static_cast<std::size_t>(shape.places());
  return 4 * (static_cast<std::size_t>(shape.experts) + (3 + kWarps) * places);
}

__device__ Copies copies_in(std::int32_t* shared, const BatchPlanShape& shape) {
  const int places = shape.places();
  Copies copies;
  copies.first = shared;
  copies.next = copies.first + shape.experts;
  copies.quota = copies.next + places;
  copies.home = copies.quota + places;
  copies.before = copies.home + places;
  return copies;
}

__device__ const std::int32_t* entry_of(const PlacesParameters& p, std::size_t offset) {
  const auto* header = reinterpret_cast<const BalanceHeader*>(p.state + p.at.header);
  const auto entry = static_cast<std::size_t>(header->current) * p.at.entry_bytes;
  return reinterpret_cast<const std::int32_t*>(p.state + p.at.entries + entry + offset);
}

/// Whole block. Experts with copies, by their first places.
__device__ void find_first(const PlacesParameters& p, const Copies& copies) {
  const auto* table = reinterpret_cast<const std::int32_t*>(p.state + p.at.table);
  const int places = p.shape.places();
  for (int e = thread(); e < p.shape.experts; e += kThreads) copies.first[e] = INT32_MAX;
  for (int i = thread(); i < kWarps * places; i += kThreads) copies.before[i] = 0;
  __syncthreads();
  for (int place = thread(); place < places; place += kThreads) {
    if (table[place] >= 0) atomicMin(&copies.first[table[place]], place);
  }
  __syncthreads();
}

/// Whole block: counts the slots of each warp for experts with copies.
template <class Id>
__device__ void tally(const PlacesParameters& p, const RoutesOf<Id>& routes, const Copies& copies) {
  std::int32_t* counts = copies.before + thread() / 32 * p.shape.places();
  const std::int64_t first = routes.first();
  for (std::int64_t i = first + thread() % 32; i < first + routes.part; i += 32) {
    const int expert = routes.expert(i, p.shape.experts);
    const int key = expert < 0 ? INT32_MAX : copies.first[expert];
    const unsigned same = __match_any_sync(kAll, key);
    if (key != INT32_MAX && __ffs(static_cast<int>(same)) - 1 == thread() % 32) {
      counts[key] += __popc(same);
    }
    __syncwarp();
  }
  __syncthreads();
}

template <class Id>
__global__ void __launch_bounds__(kThreads)
    tally_kernel(const __grid_constant__ PlacesParameters p, RoutesOf<Id> routes) {
  extern __shared__ std::int32_t shared[];
  const Copies copies = copies_in(shared, p.shape);
  const int places = p.shape.places();
  find_first(p, copies);
  tally(p, routes, copies);
  for (int place = thread(); place < places; place += kThreads) {
    std::int32_t sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += copies.before[warp * places + place];
    p.tallies[static_cast<int>(blockIdx.x) * places + place] = sum;
  }
}

/// Whole block: where the slots of each expert with copies go.
__device__ void find_quotas(const PlacesParameters& p, const Copies& copies) {
  const auto* table = reinterpret_cast<const std::int32_t*>(p.state + p.at.table);
  const std::int32_t* quota = entry_of(p, p.at.entry_quota);
  const std::int32_t* counts = entry_of(p, 0) + p.rank * p.shape.experts;
  const int places = p.shape.places();
  for (int place = thread(); place < places; place += kThreads) {
    copies.quota[place] = quota[place * p.shape.ranks + p.rank];
    int next = -1;
    for (int other = places - 1; other > place; --other) {
      if (table[other] == table[place]) next = other;
    }
    copies.next[place] = table[place] < 0 ? -1 : next;
  }
  __syncthreads();
  for (int place = thread(); place < places; place += kThreads) {
    if (table[place] < 0 || copies.first[table[place]] != place) continue;
    std::int32_t home = counts[table[place]];
    for (int copy = place; copy >= 0; copy = copies.next[copy]) home -= copies.quota[copy];
    copies.home[place] = home;
  }
}

/// Whole block: from counts of its warps to sums of what is before them.
__device__ void add_up(const PlacesParameters& p, const Copies& copies) {
  const int places = p.shape.places();
  for (int place = thread(); place < places; place += kThreads) {
    std::int32_t sum = 0;
    for (int unit = 0; unit < static_cast<int>(blockIdx.x); ++unit) {
      sum += p.tallies[unit * places + place];
    }
    for (int warp = 0; warp < kWarps; ++warp) {
      const std::int32_t mine = copies.before[warp * places + place];
      copies.before[warp * places + place] = sum;
      sum += mine;
    }
  }
  __syncthreads();
}

/// Slot number `slot` of this rank for an expert with copies: −1: home, else the place.
__device__ int copy_for(const Copies& copies, int first, std::int32_t slot) {
  slot -= copies.home[first];
  if (slot < 0) return -1;
  for (int place = first; place >= 0; place = copies.next[place]) {
    if (slot < copies.quota[place]) return place;
    slot -= copies.quota[place];
  }
  return -1;
}

template <class Id>
__global__ void __launch_bounds__(kThreads)
    places_kernel(const __grid_constant__ PlacesParameters p, RoutesOf<Id> routes) {
  extern __shared__ std::int32_t shared[];
  const Copies copies = copies_in(shared, p.shape);
  const int local = p.shape.local(), slots = p.shape.slots, lane = thread() % 32;
  const bool lost = reinterpret_cast<const BalanceHeader*>(p.state + p.at.header)->plan_id <= 0;
  find_first(p, copies);
  if (!lost) find_quotas(p, copies);
  tally(p, routes, copies);
  add_up(p, copies);
  std::int32_t* before = copies.before + thread() / 32 * p.shape.places();
  const std::int64_t first = routes.first();
  for (std::int64_t i = first + lane; i < first + routes.part; i += 32) {
    const int expert = routes.expert(i, p.shape.experts);
    const int key = expert < 0 ? INT32_MAX : copies.first[expert];
    const unsigned same = __match_any_sync(kAll, key);
    std::int32_t slot = 0;
    if (key != INT32_MAX) slot = before[key] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (key != INT32_MAX && __ffs(static_cast<int>(same)) - 1 == lane) before[key] += __popc(same);
    __syncwarp();
    if (i >= routes.count) continue;
    const int copy = key == INT32_MAX || lost ? -1 : copy_for(copies, key, slot);
    std::int64_t place = expert / local * (local + slots) + expert % local;
    if (copy >= 0) place = copy / slots * (local + slots) + local + copy % slots;
    if (expert < 0) place = routes.ids[i] == -1 ? -1 : kUnknownPlace;
    p.out[i] = lost ? kUnknownPlace : place;
  }
}

struct Grid {
  unsigned blocks = 1;
  std::int64_t part = 32;
};

/// Blocks of at least so many routes that one is worth it.
Grid grid_for(std::int64_t count) {
  constexpr std::int64_t kLeast = 2 * kThreads;
  const std::int64_t useful = (count + kLeast - 1) / kLeast;
  Grid grid;
  grid.blocks = static_cast<unsigned>(useful < 1 ? 1 : useful < kUnits ? useful : kUnits);
  const std::int64_t warps = std::int64_t{grid.blocks} * kWarps;
  grid.part = ((count + warps - 1) / warps + 31) / 32 * 32;
  return grid;
}

template <class Id>
cudaError_t count(const BalanceRoutes& routes, std::int32_t experts, std::int32_t* out,
                  cudaStream_t stream) {
  const Grid grid = grid_for(routes.count);
  RoutesOf<Id> of{static_cast<const Id*>(routes.ids), routes.count, grid.part};
  void* arguments[] = {&of, &experts, &out};
  return launch(reinterpret_cast<const void*>(&counts_kernel<Id>),
                {grid.blocks, kThreads, static_cast<std::size_t>(experts) * 4}, arguments, stream,
                false);
}

template <class Id>
cudaError_t place(PlacesParameters& p, const BalanceRoutes& routes, cudaStream_t stream) {
  const Grid grid = grid_for(routes.count);
  RoutesOf<Id> of{static_cast<const Id*>(routes.ids), routes.count, grid.part};
  void* arguments[] = {&p, &of};
  const LaunchShape shape{grid.blocks, kThreads, copies_bytes(p.shape)};
  const cudaError_t error =
      launch(reinterpret_cast<const void*>(&tally_kernel<Id>), shape, arguments, stream, false);
  if (error != cudaSuccess) return error;
  return launch(reinterpret_cast<const void*>(&places_kernel<Id>), shape, arguments, stream, false);
}

}  // namespace

cudaError_t launch_balance_counts(const BalanceRoutes& routes, std::int32_t experts,
                                  std::int32_t* out, cudaStream_t stream) {
  const cudaError_t error =
      cudaMemsetAsync(out, 0, static_cast<std::size_t>(experts) * sizeof(*out), stream);
  if (error != cudaSuccess || routes.count == 0) return error;
  return routes.wide ? count<std::int64_t>(routes, experts, out, stream)
                     : count<std::int32_t>(routes, experts, out, stream);
}

cudaError_t launch_balance_places(const BatchPlanShape& shape, std::byte* state,
                                  const BalanceRoutes& routes, int rank, std::int64_t* out,
                                  cudaStream_t stream) {
  if (routes.count == 0) return cudaSuccess;
  PlacesParameters p;
  p.shape = shape;
  p.at = make_balance_state_layout(shape);
  p.state = state;
  p.tallies = reinterpret_cast<std::int32_t*>(state + p.at.tallies);
  p.rank = rank;
  p.out = out;
  return routes.wide ? place<std::int64_t>(p, routes, stream)
                     : place<std::int32_t>(p, routes, stream);
}

cudaError_t load_balance_routes(const BatchPlanShape& shape) {
  KernelLimits limits;
  cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  if (copies_bytes(shape) > static_cast<std::size_t>(limits.shared_bytes)) {
    return cudaErrorInvalidValue;
  }
  const auto pointer = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  for (const void* kernel :
       {pointer(&counts_kernel<std::int64_t>), pointer(&counts_kernel<std::int32_t>),
        pointer(&tally_kernel<std::int64_t>), pointer(&tally_kernel<std::int32_t>),
        pointer(&places_kernel<std::int64_t>), pointer(&places_kernel<std::int32_t>)}) {
    error = load_kernel(kernel, limits.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
