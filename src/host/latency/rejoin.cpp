// Latency mode with masks: who takes part in an exchange, and how ranks come back.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

#include "core/check.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

namespace {

bool any(const RankBytes& ranks) {
  return std::any_of(ranks.begin(), ranks.end(), [](auto r) { return r != 0; });
}

}  // namespace

RankBytes HostLatency::unmasked() const {
  RankBytes all(static_cast<std::size_t>(ranks()), 1);
  for (int peer = 0; peer < ranks() && masks_.on(); ++peer) {
    all[static_cast<std::size_t>(peer)] = masks_.masked(peer) ? 0 : 1;
  }
  return all;
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

void HostLatency::send_as_credits_come(Exchange& exchange, const ConstTensorView& x) {
  const Generation g = exchange.generation;
  exchange.sent = unmasked();
  sent_[buffer(g)] = exchange.sent;
  if (!masks_.on() || g <= 2) {
    await_credits(g);
    send_rows(exchange, x, exchange.sent);
    return;
  }
  // Whoever gives credit is served at once: a rank that is late must not make this one late for the
  // others.
  const RankBytes pending = std::move(exchange.sent);
  exchange.sent.assign(pending.size(), 0);
  // A peer that throws away results unread gives credit far ahead.
  masks_.await({"latency dispatch: credit", flag_row(layout_.released), g - 2, protocol::kAnyAhead},
               pending, g, [&](const RankBytes& given) {
                 send_rows(exchange, x, given);
                 for (std::size_t r = 0; r < given.size(); ++r) exchange.sent[r] |= given[r];
               });
}

RankBytes HostLatency::await_sources(const SourceWait& wait, const RankBytes& pending,
                                     const std::optional<TensorView>& waits) {
  RankBytes came(pending.size(), 0);
  if (!any(pending)) return came;
  const SourceClock clock(waits);
  const auto note = [&](const RankBytes& newcomers) {
    for (std::size_t r = 0; r < newcomers.size(); ++r) {
      if (newcomers[r] == 0) continue;
      came[r] = 1;
      clock.charge(r);
    }
  };
  if (masks_.on()) {
    masks_.await(wait, pending, wait.wanted, note,
                 [&](int peer) { clock.charge(static_cast<std::size_t>(peer)); });
    return came;
  }
  if (!waits) {
    engine_->channel().await(wait.stage, {wait.row, wait.wanted}, [&](GroupWatch& watch) {
      return protocol::await_all(wait.row, wait.wanted, wait.depth, watch);
    });
    return pending;
  }
  RankBytes left = pending;
  engine_->channel().await(wait.stage, {wait.row, wait.wanted}, [&](GroupWatch& watch) {
    protocol::Status status;
    while (any(left) && status.ok()) {
      RankBytes newcomers(left.size(), 0);
      status = protocol::await_some(wait.row, wait.wanted, wait.depth, left, newcomers, watch);
      note(newcomers);
    }
    return status;
  });
  return came;
}

void HostLatency::leave_out_unsent(Exchange& exchange) const {
  for (int source = 0; source < ranks(); ++source) {
    const SourceHeader& header = header_from(exchange, source);
    std::uint8_t& came = exchange.came[static_cast<std::size_t>(source)];
    if (came != 0 && header.generation != exchange.generation) came = 0;
  }
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
  if (config_.masks) return;
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
        const protocol::Status status = rejoin_.agree(reach_, used, gone, watch, agreed);
        if (!status.ok()) throw_not_rejoined(status);
        start_from(agreed, gone);
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
    if (!alive_[buffer(before)]) released_ = drops_.drop(before);
  }
  credit_.release(reach_, released_);
}

}  // namespace ferry::host
