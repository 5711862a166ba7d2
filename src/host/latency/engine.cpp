// Latency mode: the buffers, how they are made and given back.
#include "host/latency/create.hpp"

#include <optional>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

namespace {

protocol::FlagLayout flags(int ranks, fabric::SegmentId segment, std::size_t offset) {
  return {ranks, {segment, offset}, kLineBytes};
}

/// One delivery for each buffer: `lines` is [2, R].
template <class Traits>
std::array<protocol::Delivery<Traits>, 2> deliveries(const HostEngine& engine,
                                                     const fabric::Segment& segment,
                                                     std::size_t lines) {
  const auto one = [&](std::size_t at) {
    return protocol::Delivery<Traits>(flags(engine.size(), segment.id, at), engine.rank(),
                                      segment.data + at);
  };
  return {one(lines), one(lines + static_cast<std::size_t>(engine.size()) * kLineBytes)};
}

/// `lines` is [R].
LatencyHeartbeat heartbeat(HostEngine& engine, const AddedSegments& segments, std::size_t lines) {
  const protocol::FlagLayout layout = flags(engine.size(), segments.mine.id, lines);
  std::vector<std::byte*> near;
  for (int peer = 0; peer < engine.size(); ++peer) {
    const fabric::SegmentId segment = segments.ids[static_cast<std::size_t>(peer)];
    near.push_back(engine.channel().pointer(peer, {segment, layout.place(peer).offset}));
  }
  return {layout, engine.rank(), segments.mine.data + lines, std::move(near),
          engine.config().deadline};
}

}  // namespace

HostLatency::HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
                         const AddedSegments& segments, const LatencyLayout& layout)
    : engine_(std::move(engine)),
      config_(config),
      number_(engine_->next_exchange()),
      segment_(segments.mine),
      layout_(layout),
      reach_(*engine_->shared_memory()->fabric, number_, segments.ids),
      credit_({flags(engine_->size(), segment_.id, layout.arrived),
               flags(engine_->size(), segment_.id, layout.released)},
              engine_->rank(), segment_.data + layout.arrived, segment_.data + layout.released),
      combined_(deliveries<protocol::DeliveryTraits>(*engine_, segment_, layout.combined)),
      announced_(deliveries<protocol::AnnounceTraits>(*engine_, segment_, layout.announced)),
      masks_(*engine_, reach_, flags(engine_->size(), segment_.id, layout.masks),
             segment_.data + layout.masks, heartbeat(*engine_, segments, layout.heartbeat),
             config.masks),
      rejoin_({flags(engine_->size(), segment_.id, layout.offers),
               flags(engine_->size(), segment_.id, layout.answers)},
              engine_->rank(), segment_.data + layout.offers, segment_.data + layout.answers),
      combine_row_(make_combine_row_layout(static_cast<std::size_t>(config.hidden))),
      made_sums_(static_cast<std::size_t>(chunk_rows(layout.sum_slot)) * layout.sum_slot),
      summed_(plain_bytes()) {}

BufferLease::~BufferLease() {
  if (taken_) engine_->drop(generation_, received_.load(std::memory_order_acquire));
}

void refuse_second_receive(const char* call) {
  refuse(call, "hook", "a second receive(), or one without hook = true", "one receive()");
}

void disagree(HostEngine& engine, const char* call, int peer, const char* what,
              Generation generation) {
  const std::string text = "rank " + std::to_string(engine.rank()) + ": " + call + ": rank " +
                           std::to_string(peer) + " used another " + what + " in this call";
  engine.channel().fail(call, text, ErrorKind::mismatch);
  throw Error(ErrorKind::mismatch, text, {engine.rank(), peer, call, generation, 0, 0});
}

void HostLatency::drop(Generation generation, bool received) {
  std::scoped_lock lock(mutex_);
  alive_[buffer(generation)] = false;
  if (const Generation base = masks_.base(); generation <= base) {
    // From before a rejoin, which counts the buffers as used by the two generations before its own.
    release(base - (base - generation) % 2);
  } else if (!received) {
    unreceived_.push_back(generation);
  } else {
    release(generation);
  }
}

void HostLatency::release(Generation generation) {
  const Generation upto = drops_.drop(generation);
  if (upto > released_ && !engine_->destroyed()) {
    released_ = upto;
    credit_.release(reach_, upto);
  }
}

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

std::shared_ptr<LatencyEngine> make_host_latency(std::shared_ptr<HostEngine> engine,
                                                 const LatencyConfig& config) {
  LatencyLayout layout{};
  std::optional<Error> invalid;
  try {
    check_config(config);
    layout = latency_layout(config, engine->placement().experts, engine->size(), engine->domains());
  } catch (const Error& error) {
    invalid = error;
  }
  AddedSegments segments;
  std::shared_ptr<HostLatency>
      made;  // inside the call: its number among all is the same everywhere
  engine->enter("LatencyExchange", nullptr, [&] {
    StepMessage head;
    head.call.kind = CallKind::latency;
    head.call.dtype = static_cast<std::uint32_t>(config.dtype);
    head.call.columns = config.hidden;
    head.call.scale_columns = config.capacity;
    head.call.topk = static_cast<std::uint32_t>(config.topk);
    head.call.weights = config.masks ? 1 : 0;
    head.call.order = static_cast<std::uint32_t>(config.order);
    engine->agree_on_validity("LatencyExchange: configuration", head, invalid);
    constexpr const char* kStage = "LatencyExchange: buffers";
    segments =
        engine->add_segments({kStage, "capacity, hidden, topk and experts", layout.bytes, 0});
    for (int peer = 0; peer < engine->size(); ++peer) {
      const std::uint64_t bytes = segments.bytes[static_cast<std::size_t>(peer)];
      if (bytes < layout.bytes) {
        engine->channel().throw_violation(kStage, peer,
                                          "registered " + std::to_string(bytes) +
                                              " bytes, expected at least " +
                                              std::to_string(layout.bytes));
      }
    }
    engine->add_latency_memory(segments.mine);
    made = std::make_shared<HostLatency>(engine, config, segments, layout);
  });
  return made;
}

std::shared_ptr<LatencyEngine> HostEngine::make_latency(const LatencyConfig& config) {
  return make_host_latency(shared_from_this(), config);
}

}  // namespace ferry::host
