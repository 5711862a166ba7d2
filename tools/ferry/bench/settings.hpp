// What `ferry bench` is asked to measure.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/nccl.hpp"
#include "ferry/dtype.hpp"
#include "ferry/group.hpp"

namespace ferry::cli {

enum class BenchMode : std::uint8_t { all, throughput, latency };
enum class RouteShape : std::uint8_t {
  uniform,  ///< every expert is as likely
  zipf,     ///< expert e is chosen in proportion to 1 / (e + 1)
};

struct BenchSettings {
  int ranks = 4;
  std::int64_t tokens = 1024;         ///< of each rank, throughput mode
  std::int64_t latency_tokens = 128;  ///< of each rank, latency mode
  std::int64_t hidden = 4096;
  int topk = 8;
  std::int64_t experts = 64;
  Dtype dtype = Dtype::bf16;  ///< of dispatched rows; with e4m3 combine carries bf16
  BenchMode mode = BenchMode::all;
  Backend backend = Backend::host;
  RouteShape routes = RouteShape::uniform;
  FabricKind fabric = FabricKind::automatic;
  int domain_size = 0;  ///< 0: one domain, or the hosts
  FabricKind network = FabricKind::automatic;
  Crossing crossing = Crossing::automatic;
  std::string tune{};  ///< where tuned settings go; empty: as they are
  int oracle = 0;      ///< how often all settings are measured, to judge the tuned ones
  bool processes = true;
  int iterations = 30;
  int warmup = 5;
  int chain = 4;  ///< calls or, in latency mode, pairs that are timed together
  std::uint64_t seed = 1;

  // Throughput mode on GPUs; its runs have several configurations.
  std::vector<std::int64_t> token_sweep{};
  std::vector<Dtype> dtypes{};
  std::vector<int> num_sms{16};
  std::int64_t alignment = 128;  ///< of expert-major blocks
  std::uint64_t data_seed = 1;   ///< of rows; routes follow the seed
  Nccl nccl{};                   ///< measured beside Ferry if there is a library

  bool on_gpus() const { return backend == Backend::cuda; }
  /// A run of throughput mode on GPUs.
  bool sweeps() const { return on_gpus() && mode == BenchMode::throughput; }
  BenchSettings with(std::int64_t tokens_of, Dtype dtype_of) const {
    BenchSettings one = *this;
    one.tokens = tokens_of;
    one.dtype = dtype_of;
    return one;
  }

  Dtype combine_dtype() const { return dtype == Dtype::e4m3 ? Dtype::bf16 : dtype; }
  /// One scale for each 128 channels, with e4m3.
  std::int64_t scales() const { return dtype == Dtype::e4m3 ? (hidden + 127) / 128 : 0; }
  std::size_t dispatch_row_bytes() const {
    return static_cast<std::size_t>(hidden) * size_of(dtype) +
           static_cast<std::size_t>(scales()) * size_of(Dtype::f32);
  }
  std::size_t combine_row_bytes() const {
    return static_cast<std::size_t>(hidden) * size_of(combine_dtype());
  }
};

/// Without the memory, which the modes need in different measure.
inline GroupConfig group_config(const BenchSettings& settings) {
  GroupConfig config;
  config.experts = settings.experts;
  config.fabric = settings.fabric;
  config.domain_size = settings.domain_size;
  config.network = settings.network;
  config.crossing = settings.crossing;
  if (!settings.tune.empty()) config.tune = true;
  config.sim_seed = settings.seed;
  return config;
}

/// What is measured, in the order of the table.
enum class BenchCase : std::uint8_t {
  plan,
  dispatch_full,        ///< plan and dispatch
  dispatch_full_worst,  ///< on GPUs: of worst-case size, the CPU waits for nothing
  dispatch_full_exact,  ///< on GPUs: the CPU waits for the counts
  dispatch_cached,
  dispatch_expert,     ///< expert-major, cached
  dispatch_quantized,  ///< of bf16 rows that become e4m3 on the way, cached; beside e4m3 alone
  combine_registered,
  combine_ordinary,
  combine_expert,   ///< from expert-major rows, weights applied
  nccl_all_to_all,  ///< the bytes of a dispatch, gathered before; no counts
  latency_dispatch,
  latency_combine_slots,  ///< CombinePath::per_slot
  latency_combine_ranks,  ///< CombinePath::per_rank, as what follows
  latency_pair_slots,     ///< a dispatch and its combine, one pair behind another
  latency_pair_ranks,
  latency_dispatch_send,  ///< halves, with hooks, when all that comes has come
  latency_dispatch_receive,
  latency_combine_send,
  latency_combine_receive,
  latency_events,  ///< nothing, between two events as the halves are
};

enum class BenchKind : std::uint8_t { dispatch, combine, other };

struct BenchTraits {
  BenchCase which;
  std::string_view name;
  BenchKind kind;  ///< other: moves no rows, or those of a pair
  bool latency, host, cuda;
};

inline constexpr BenchTraits kBenchCases[] = {
    {BenchCase::plan, "plan", BenchKind::other, false, true, true},
    {BenchCase::dispatch_full, "dispatch, full", BenchKind::dispatch, false, true, false},
    {BenchCase::dispatch_full_worst, "dispatch, full, worst case", BenchKind::dispatch, false,
     false, true},
    {BenchCase::dispatch_full_exact, "dispatch, full, exact", BenchKind::dispatch, false, false,
     true},
    {BenchCase::dispatch_cached, "dispatch, cached", BenchKind::dispatch, false, true, true},
    {BenchCase::dispatch_expert, "dispatch, expert-major", BenchKind::dispatch, false, false, true},
    {BenchCase::dispatch_quantized, "dispatch, bf16 to e4m3", BenchKind::dispatch, false, false,
     true},
    {BenchCase::combine_registered, "combine, registered", BenchKind::combine, false, true, true},
    {BenchCase::combine_ordinary, "combine, ordinary", BenchKind::combine, false, true, true},
    {BenchCase::combine_expert, "combine, expert-major", BenchKind::combine, false, false, true},
    {BenchCase::nccl_all_to_all, "NCCL all-to-all alone", BenchKind::dispatch, false, false, true},
    {BenchCase::latency_dispatch, "latency dispatch", BenchKind::dispatch, true, true, true},
    {BenchCase::latency_combine_slots, "latency combine, per slot", BenchKind::combine, true, true,
     true},
    {BenchCase::latency_combine_ranks, "latency combine, per rank", BenchKind::combine, true, true,
     true},
    {BenchCase::latency_pair_slots, "latency pair, per slot", BenchKind::other, true, true, true},
    {BenchCase::latency_pair_ranks, "latency pair, per rank", BenchKind::other, true, true, true},
    {BenchCase::latency_dispatch_send, "latency dispatch, send", BenchKind::dispatch, true, true,
     true},
    {BenchCase::latency_dispatch_receive, "latency dispatch, receive", BenchKind::dispatch, true,
     true, true},
    {BenchCase::latency_combine_send, "latency combine, send", BenchKind::combine, true, true,
     true},
    {BenchCase::latency_combine_receive, "latency combine, receive", BenchKind::combine, true, true,
     true},
    {BenchCase::latency_events, "latency events alone", BenchKind::other, true, false, true},
};

constexpr const BenchTraits& traits(BenchCase which) {
  return kBenchCases[static_cast<std::size_t>(which)];
}
static_assert([] {
  for (const BenchTraits& each : kBenchCases) {
    if (traits(each.which).name != each.name) return false;
  }
  return true;
}());

constexpr bool is_combine(BenchCase which) {
  return traits(which).kind == BenchKind::combine;
}

/// Runs on a number of SMs that the caller chooses.
constexpr bool has_sms(BenchCase which) {
  const BenchTraits& of = traits(which);
  return of.cuda && !of.latency && which != BenchCase::plan && which != BenchCase::nccl_all_to_all;
}

/// One line of the table.
struct BenchLine {
  std::size_t tokens_index = 0;
  std::int64_t tokens = 0;  ///< of each rank
  Dtype dtype = Dtype::bf16;
  int num_sms = 0;  ///< 0: not the caller's to choose
  BenchCase which = BenchCase::plan;
};
/// Of one run, in the order in which they are measured. Combine carries bf16 where dispatch carries
/// e4m3, so its lines are there once.
std::vector<BenchLine> lines_of(const BenchSettings& settings);

}  // namespace ferry::cli
