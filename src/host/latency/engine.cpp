// Latency mode: the buffers, and how they are given back; who takes part in an exchange, and how
// ranks come back: by a rejoin, or with the next epoch of the group.
#include "host/latency/engine.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "core/check.hpp"

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
    if (!engine.channel().has(peer)) {
      near.push_back(LatencyHeartbeat::silence());
      continue;
    }
    const fabric::SegmentId segment = segments.ids[static_cast<std::size_t>(peer)];
    near.push_back(engine.channel().pointer(peer, {segment, layout.place(peer).offset}));
  }
  return {layout, engine.rank(), segments.mine.data + lines, std::move(near),
          engine.config().deadline};
}

}  // namespace

HostLatency::HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
                         const AddedSegments& segments, const LatencyLayout& layout,
                         std::uint64_t number)
    : engine_(std::move(engine)),
      number_(static_cast<std::uint32_t>(number)),
      here_(engine_->channel().live(), engine_->channel().live() + engine_->size()),
      memory_{*engine_, config, segments.mine, layout,
              FabricReach(*engine_->shared_memory()->fabric, number_, segments.ids, here_.data())},
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
                std::vector<std::byte>(memory_.plain_bytes())} {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (!here(peer)) masks_.leave_out(peer);
  }
}

HostLatency::~HostLatency() {
  engine_->latency_pool().dropped(number_, memory_.segment);
}

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
  if (upto <= released_ || engine_->destroyed()) return;
  released_ = upto;
  // Until the ranks have agreed anew, places may change hands; then they are told.
  if (!masks_.must_rejoin()) credit_.release(memory_.reach, upto);
}

RankBytes HostLatency::unmasked() const {
  RankBytes all(static_cast<std::size_t>(ranks()), 1);
  for (int peer = 0; peer < ranks() && masks_.on(); ++peer) {
    all[static_cast<std::size_t>(peer)] = masks_.masked(peer) ? 0 : 1;
  }
  return all;
}

void HostLatency::check_complete(const char* call) {
  if (masks_.on() || engine_->epoch() == epoch_) return;
  std::scoped_lock lock(mutex_);
  std::vector<int> lost;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (!here(peer)) lost.push_back(peer);
  }
  check_nobody_lost_since(call, epoch_, lost);
}

void HostLatency::check_still_joined(const char* call, Generation generation) const {
  masks_.check_evicted(call);
  if (generation > masks_.base()) return;
  throw Error(
      ErrorKind::evicted,
      "rank " + std::to_string(engine_->rank()) + ": " + call +
          ": this result is of a dispatch before the last rejoin or regroup; its rows may still "
          "be read, but neither received nor combined",
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
    if (!here(rank)) {
      if (masked) return;
      refuse("set_mask", "rank", std::to_string(rank) + ", which was lost", "a rank that is here");
    }
    now = generation_;
    masks_.set(rank, masked, now);
  }
  if (logs(LogLevel::info)) {
    log(LogLevel::info, engine_->rank(), masked ? "mask" : "unmask",
        {{"peer", rank}, {"generation", now}, {"why", "set_mask"}});
  }
}

void HostLatency::clear_masks() {
  require_masks();
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != engine_->rank() && masks_.masked(peer) && is_here(peer)) set_mask(peer, false);
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
        RankBytes gone = absent();
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

Generation HostLatency::leave_epoch() {
  std::scoped_lock lock(mutex_);
  masks_.require_rejoin();
  return std::max(generation_, masks_.newest_told());
}

void HostLatency::begin_epoch(const engine::Epoch& next,
                              const std::function<std::uint64_t(int)>& since) {
  {
    std::scoped_lock lock(mutex_);
    for (int peer = 0; peer < ranks(); ++peer) {
      const bool in_view = std::binary_search(next.ranks.begin(), next.ranks.end(), peer);
      if (in_view && since(peer) <= epoch_) continue;
      here_[static_cast<std::size_t>(peer)] = 0;
      masks_.forget(peer);
    }
  }
  start_from(next.first, absent());
}

RankBytes HostLatency::absent() const {
  RankBytes all;
  for (int peer = 0; peer < ranks(); ++peer) all.push_back(here(peer) ? 0 : 1);
  return all;
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

}  // namespace ferry::host
