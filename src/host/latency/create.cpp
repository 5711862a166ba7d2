// How a latency exchange is made: by all ranks of the epoch, in memory that an earlier one left if
// all have it to give.
#include "host/latency/create.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "fabric/segment_table.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

LatencyLayout latency_layout(const LatencyConfig& config, std::int64_t experts, int ranks,
                             int domains) {
  check_size(config, Placement{experts, ranks}.local_experts(0), ranks);
  LatencyShape shape;
  shape.ranks = ranks;
  shape.local_experts = Placement{experts, ranks}.local_experts(0);  // rank 0 has the most
  shape.capacity = config.capacity;
  shape.hidden = config.hidden;
  shape.topk = config.topk;
  shape.element_bytes = size_of(config.dtype);
  shape.masks = config.masks;
  shape.fans_out = config.order == RowOrder::expert_major;
  shape.crosses = domains > 1;
  return make_latency_layout(shape);
}

std::size_t latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                int domains) {
  return segment_bytes(latency_layout(config, experts, ranks, domains).bytes);
}

namespace {

constexpr const char* kMake = "LatencyExchange";
constexpr const char* kConfiguration = "LatencyExchange: configuration";
constexpr const char* kBuffers = "LatencyExchange: buffers";

/// `mine`: taken up by this rank, or none.
AddedSegments register_rest(HostEngine& engine, const AgreedExchange& agreed,
                            const std::optional<fabric::Segment>& mine, std::size_t bytes) {
  AddedSegments segments =
      engine.add_segments({kBuffers, "capacity, hidden, topk and experts", mine ? 0 : bytes, 0});
  if (mine) segments.mine = *mine;
  for (const int peer : engine.channel().ranks()) {
    const LatencyPool::Offer& offer = agreed.offers[index(peer)];
    if (agreed.takes != 0 && offer.free == agreed.takes) {
      // What cannot be a segment has no bytes.
      segments.ids[index(peer)] = static_cast<fabric::SegmentId>(
          std::min<std::uint64_t>(offer.segment, fabric::kMaxSegments));
      segments.bytes[index(peer)] =
          engine.shared_memory()->fabric->bytes(peer, segments.ids[index(peer)]);
    }
    if (segments.bytes[index(peer)] >= bytes) continue;
    engine.channel().throw_violation(kBuffers, peer,
                                     "registered " + std::to_string(segments.bytes[index(peer)]) +
                                         " bytes, expected at least " + std::to_string(bytes));
  }
  return segments;
}

std::shared_ptr<HostLatency> make(const std::shared_ptr<HostEngine>& engine,
                                  const LatencyConfig& config, const LatencyLayout& layout) {
  const AgreedExchange agreed = agree_on_exchange(*engine, kBuffers, layout.bytes);
  LatencyPool& pool = engine->latency_pool();
  const auto mine = agreed.takes == 0 ? std::nullopt : pool.take(agreed.takes);
  try {
    // Nobody writes there before all have done so: the ranks swap messages below.
    if (mine) std::memset(mine->data, 0, layout.bytes);
    const AddedSegments segments = register_rest(*engine, agreed, mine, layout.bytes);
    pool.made(agreed.number, segments.mine, !mine);
    return std::make_shared<HostLatency>(engine, config, segments, layout, agreed.number);
  } catch (const Error&) {
    if (mine) pool.dropped(agreed.takes, *mine);
    throw;
  }
}

}  // namespace

std::shared_ptr<LatencyEngine> make_host_latency(std::shared_ptr<HostEngine> engine,
                                                 const LatencyConfig& config) {
  LatencyLayout layout{};
  std::optional<Error> invalid;
  std::shared_ptr<HostLatency> made;
  engine->enter(kMake, nullptr, [&] {
    try {
      check_config(config);
      check_nobody_lost(config, engine->group_view().lost);
      layout =
          latency_layout(config, engine->placement().experts, engine->size(), engine->domains());
    } catch (const Error& error) {
      invalid = error;
    }
    StepMessage head;
    head.call = latency_signature(config);
    engine::agree_on_validity(engine->channel(), kConfiguration, head, invalid);
    made = make(engine, config, layout);
    engine->outlives_epochs(made);
  });
  if (logs(LogLevel::info)) {
    log(LogLevel::info, engine->rank(), "latency_exchange",
        {{"capacity", config.capacity},
         {"hidden", config.hidden},
         {"topk", config.topk},
         {"dtype", std::string(name_of(config.dtype))},
         {"masks", config.masks ? "true" : "false"},
         {"bytes", layout.bytes}});
  }
  return made;
}

std::shared_ptr<LatencyEngine> HostEngine::make_latency(const LatencyConfig& config) {
  return make_host_latency(shared_from_this(), config);
}

}  // namespace ferry::host
