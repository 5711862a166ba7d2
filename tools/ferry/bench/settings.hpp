// What `ferry bench` is asked to measure.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

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
  bool processes = true;
  int iterations = 30;
  int warmup = 5;
  int chain = 4;  ///< pairs of latency mode that are timed together
  std::uint64_t seed = 1;

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
  config.sim_seed = settings.seed;
  return config;
}

/// What is measured, in the order of the table.
enum class BenchCase : std::uint8_t {
  plan,
  dispatch_full,
  dispatch_cached,
  combine_registered,
  combine_ordinary,
  latency_dispatch,
  latency_combine_slots,  ///< CombinePath::per_slot
  latency_combine_ranks,  ///< CombinePath::per_rank, as what follows
  latency_pair_slots,     ///< a dispatch and its combine, one pair behind another
  latency_pair_ranks,
  latency_dispatch_send,  ///< halves, with hooks, when all that comes has come
  latency_dispatch_receive,
  latency_combine_send,
  latency_combine_receive,
  latency_events,  ///< on GPUs: nothing, between two events as the halves are
};
inline constexpr int kBenchCases = 15;

constexpr std::string_view name_of(BenchCase which) {
  switch (which) {
    case BenchCase::plan: return "plan";
    case BenchCase::dispatch_full: return "dispatch, full";
    case BenchCase::dispatch_cached: return "dispatch, cached";
    case BenchCase::combine_registered: return "combine, registered";
    case BenchCase::combine_ordinary: return "combine, ordinary";
    case BenchCase::latency_dispatch: return "latency dispatch";
    case BenchCase::latency_combine_slots: return "latency combine, per slot";
    case BenchCase::latency_combine_ranks: return "latency combine, per rank";
    case BenchCase::latency_pair_slots: return "latency pair, per slot";
    case BenchCase::latency_pair_ranks: return "latency pair, per rank";
    case BenchCase::latency_dispatch_send: return "latency dispatch, send";
    case BenchCase::latency_dispatch_receive: return "latency dispatch, receive";
    case BenchCase::latency_combine_send: return "latency combine, send";
    case BenchCase::latency_combine_receive: return "latency combine, receive";
    case BenchCase::latency_events: return "latency events alone";
  }
  return "";
}

constexpr bool is_latency(BenchCase which) {
  return which >= BenchCase::latency_dispatch;
}

constexpr bool is_latency_combine(BenchCase which) {
  return which == BenchCase::latency_combine_slots || which == BenchCase::latency_combine_ranks ||
         which == BenchCase::latency_combine_send || which == BenchCase::latency_combine_receive;
}

/// Whether rows move in it whose bytes over its time say something.
constexpr bool moves_rows(BenchCase which) {
  return which != BenchCase::plan && which != BenchCase::latency_pair_slots &&
         which != BenchCase::latency_pair_ranks && which != BenchCase::latency_events;
}

constexpr bool is_measured(BenchCase which, BenchMode mode, Backend backend) {
  if (which == BenchCase::latency_events && backend != Backend::cuda) return false;
  return mode == BenchMode::all || is_latency(which) == (mode == BenchMode::latency);
}

}  // namespace ferry::cli
