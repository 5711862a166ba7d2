// Latency mode: the buffers, how they are made and given back; who takes part in an exchange, and
// how ranks come back.
#include "host/latency/create.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "core/check.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

namespace {

static_assert(kFlagBlock == protocol::kFlagStride && kBesideFlag >= protocol::kFlagBytes);
static_assert(kBesideFlag + std::max(sizeof(SourceHeader), sizeof(CombineHead)) <= kFlagBlock);

/// `lines` is [R].
protocol::FlagLayout flags(int ranks, fabric::SegmentId segment, std::size_t lines) {
  return {ranks, {segment, lines}, kLineBytes};
}

protocol::FlagLayout source_flags(int ranks, fabric::SegmentId segment, std::size_t first) {
  return {ranks, {segment, first}, kSourceBytes};
}

/// One delivery for each buffer.
template <class Traits>
std::array<protocol::Delivery<Traits>, 2> deliveries(const HostEngine& engine,
                                                     const fabric::Segment& segment,
                                                     std::size_t first) {
  const auto one = [&](std::size_t at) {
    return protocol::Delivery<Traits>(source_flags(engine.size(), segment.id, at), engine.rank(),
                                      segment.data + at);
  };
  return {one(first), one(first + kFlagBlock)};
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
      number_(engine_->next_exchange()),
      memory_{*engine_, config, segments.mine, layout,
              FabricReach(*engine_->shared_memory()->fabric, number_, segments.ids)},
      credit_({source_flags(engine_->size(), segments.mine.id, layout.arrived),
               source_flags(engine_->size(), segments.mine.id, layout.released)},
              engine_->rank(), segments.mine.data + layout.arrived,
              segments.mine.data + layout.released),
      combined_(deliveries<protocol::DeliveryTraits>(*engine_, segments.mine, layout.combined)),
      announced_(deliveries<protocol::AnnounceTraits>(*engine_, segments.mine, layout.announced)),
      masks_(*engine_, memory_.reach, flags(engine_->size(), segments.mine.id, layout.masks),
             segments.mine.data + layout.masks, heartbeat(*engine_, segments, layout.heartbeat),
             config.masks),
      rejoin_({flags(engine_->size(), segments.mine.id, layout.offers),
               flags(engine_->size(), segments.mine.id, layout.answers)},
              engine_->rank(), segments.mine.data + layout.offers,
              segments.mine.data + layout.answers),
      sum_room_{std::vector<std::byte>(static_cast<std::size_t>(chunk_rows(layout.sum_slot)) *
                                       layout.sum_slot),
                std::vector<std::byte>(memory_.plain_bytes())} {}

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
  alive_[memory_.buffer(generation)] = false;
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
    credit_.release(memory_.reach, upto);
  }
}

RankBytes HostLatency::unmasked() const {
  RankBytes all(static_cast<std::size_t>(ranks()), 1);
  for (int peer = 0; peer < ranks() && masks_.on(); ++peer) {
    all[static_cast<std::size_t>(peer)] = masks_.masked(peer) ? 0 : 1;
  }
  return all;
}

void HostLatency::check_epoch(const char* call) const {
  if (masks_.on() || engine_->epoch() == epoch_) return;
  throw Error(ErrorKind::unsupported,
              std::string(call) + ": the exchange was made in epoch " + std::to_string(epoch_) +
                  " of the group, which is in epoch " + std::to_string(engine_->epoch()) +
                  " since a regroup; make a new group, or exchanges with masks",
              {engine_->rank(), -1, call, generation_, 0, 0});
}

void HostLatency::check_still_joined(const char* call, Generation generation) const {
  masks_.check_evicted(call);
  if (generation > masks_.base()) return;
  throw Error(ErrorKind::evicted,
              "rank " + std::to_string(engine_->rank()) + ": " + call +
                  ": this result is of a dispatch before the last rejoin; its rows may still be "
                  "read, but neither received nor combined",
              {engine_->rank(), engine_->rank(), call, generation, masks_.base(), generation});
}

RankBytes HostLatency::served(const Exchange& exchange) const {
  RankBytes ranks = unmasked();
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r] &= exchange.sent[r];
  return ranks;
}

RankBytes HostLatency::answered(const Exchange& exchange) const {
  RankBytes ranks = served(exchange);
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r] &= exchange.came[r];
  return ranks;
}

void HostLatency::require_masks() const {
  if (memory_.config.masks) return;
  throw Error(ErrorKind::invalid_argument,
              "latency masks: the exchange was made without masks; expected "
              "LatencyConfig::masks = true");
}

std::vector<bool> HostLatency::masked() const {
  require_masks();
  return masks_.all();
}

void HostLatency::set_mask(int rank, bool masked) {
  require_masks();
  if (rank < 0 || rank >= ranks() || rank == engine_->rank()) {
    refuse("set_mask", "rank", std::to_string(rank),
           "a peer: 0 … " + std::to_string(ranks() - 1) + ", but not this rank, " +
               std::to_string(engine_->rank()));
  }
  if (engine_->destroyed()) {
    throw Error(ErrorKind::destroyed, "set_mask: the group is destroyed");
  }
  Generation now = 0;
  {
    std::scoped_lock lock(mutex_);
    now = generation_;
  }
  masks_.set(rank, masked, now);
  if (logs(LogLevel::info)) {
    log(LogLevel::info, engine_->rank(), masked ? "mask" : "unmask",
        {{"peer", rank}, {"generation", now}, {"why", "set_mask"}});
  }
}

void HostLatency::clear_masks() {
  require_masks();
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != engine_->rank() && masks_.masked(peer)) set_mask(peer, false);
  }
}

const std::uint64_t* HostLatency::mask_count() const {
  require_masks();
  return masks_.count();
}

void HostLatency::rejoin() {
  require_masks();
  HostEngine::Call call(*engine_, kLatencyRejoin, asks());
  enter(
      kLatencyRejoin, nullptr,
      [this] {
        Generation used = masks_.newest_told(), agreed = 0;
        {
          std::scoped_lock lock(mutex_);
          used = std::max(used, generation_);
        }
        masks_.require_rejoin();
        RankBytes gone(static_cast<std::size_t>(ranks()), 0);
        MaskWatch watch(*engine_, masks_, [this](int peer) { return rejoin_.offered(peer); });
        const protocol::Status status = rejoin_.agree(memory_.reach, used, gone, watch, agreed);
        if (!status.ok()) throw_not_rejoined(status);
        start_from(agreed, gone);
        if (logs(LogLevel::info)) {
          log(LogLevel::info, engine_->rank(), "rejoin", {{"generation", agreed}});
        }
      },
      &call);
}

void HostLatency::throw_not_rejoined(const protocol::Status& status) const {
  const std::string peer = "rank " + std::to_string(status.peer);
  std::string what = "the group was destroyed meanwhile";
  ErrorKind kind = ErrorKind::destroyed;
  if (status.code == protocol::Status::Code::kDeadline) {
    kind = ErrorKind::deadline;
    what = peer + " did not come within the deadline. Call rejoin again on all ranks";
  } else if (status.code != protocol::Status::Code::kInterrupted) {
    kind = ErrorKind::mismatch;
    what = peer +
           " did not see the same ranks, for one of them ended meanwhile. Call rejoin again on all "
           "ranks";
  }
  throw Error(
      kind, "rank " + std::to_string(engine_->rank()) + ": " + kLatencyRejoin + ": " + what,
      {engine_->rank(), status.peer, kLatencyRejoin, masks_.base(), status.expected, status.seen});
}

void HostLatency::start_from(Generation agreed, const RankBytes& gone) {
  std::scoped_lock lock(mutex_);
  masks_.start_over(agreed, gone);
  generation_ = agreed;
  unreceived_.clear();
  // The buffers count as used by the last two generations: free, unless a result is alive.
  released_ = agreed < 2 ? 0 : agreed - 2;
  drops_ = protocol::DropOrder<>(released_);
  for (Generation before = released_ + 1; before <= agreed; ++before) {
    if (!alive_[memory_.buffer(before)]) released_ = drops_.drop(before);
  }
  credit_.release(memory_.reach, released_);
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
  engine->check_whole("LatencyExchange");
  check_not_elastic(engine->config(), engine->rank());
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
    head.call.elements = config.hidden;
    head.call.latency.capacity = config.capacity;
    head.call.latency.topk = static_cast<std::uint32_t>(config.topk);
    head.call.latency.has_masks = config.masks ? 1 : 0;
    head.call.latency.order = static_cast<std::uint32_t>(config.order);
    engine::agree_on_validity(engine->channel(), "LatencyExchange: configuration", head, invalid);
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
  if (logs(LogLevel::info)) {
    log(LogLevel::info, engine->rank(), "latency_exchange",
        {{"capacity", config.capacity},
         {"hidden", config.hidden},
         {"topk", config.topk},
         {"dtype", std::string(name_of(config.dtype))},
         {"masks", config.masks ? "true" : "false"},
         {"bytes", segments.mine.bytes}});
  }
  return made;
}

std::shared_ptr<LatencyEngine> HostEngine::make_latency(const LatencyConfig& config) {
  return make_host_latency(shared_from_this(), config);
}

}  // namespace ferry::host
