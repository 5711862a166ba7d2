#include "host/throughput/latency_pool.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>

#include "host/throughput/engine.hpp"

namespace ferry::host {

LatencyPool::Offer LatencyPool::offer(std::size_t bytes) const {
  std::scoped_lock lock(mutex_);
  Offer offer{newest_, first_, 0, 0};
  for (const Free& each : free_) {
    if (each.segment.bytes < bytes || each.exchange < offer.free) continue;
    offer.free = each.exchange;
    offer.segment = each.segment.id;
  }
  return offer;
}

std::optional<fabric::Segment> LatencyPool::take(std::uint64_t exchange) {
  std::scoped_lock lock(mutex_);
  const auto at = std::find_if(free_.begin(), free_.end(),
                               [=](const Free& each) { return each.exchange == exchange; });
  if (at == free_.end()) return std::nullopt;
  const fabric::Segment segment = at->segment;
  free_.erase(at);
  return segment;
}

void LatencyPool::made(std::uint64_t exchange, const fabric::Segment& segment, bool added) {
  std::scoped_lock lock(mutex_);
  newest_ = exchange;
  if (first_ == 0) first_ = exchange;
  if (added) all_.push_back(segment);
}

void LatencyPool::dropped(std::uint64_t exchange, const fabric::Segment& segment) {
  std::scoped_lock lock(mutex_);
  free_.push_back({exchange, segment});
}

std::size_t LatencyPool::bytes() const {
  std::scoped_lock lock(mutex_);
  std::size_t sum = 0;
  for (const fabric::Segment& segment : all_) sum += segment.bytes;
  return sum;
}

bool LatencyPool::contains(const void* pointer) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  std::scoped_lock lock(mutex_);
  return std::any_of(all_.begin(), all_.end(), [&](const fabric::Segment& segment) {
    return std::less_equal<>{}(segment.data, at) && std::less<>{}(at, segment.data + segment.bytes);
  });
}

AgreedExchange agree_on_exchange(HostEngine& engine, const char* stage, std::size_t bytes) {
  LatencyPool::Offer mine = engine.latency_pool().offer(bytes);
  // What a rank has put into another domain may still be on its way.
  if (engine.domains() > 1 || engine.lost_may_write()) mine.free = 0;
  Channel& channel = engine.channel();
  StepMessage head;
  head.call.kind = CallKind::latency;
  channel.swap(stage, head, std::as_bytes(std::span(&mine, 1)));
  engine::check_same_call(channel, stage, head.call);
  AgreedExchange agreed{.offers = std::vector<LatencyPool::Offer>(index(engine.size()))};
  for (const int peer : channel.ranks()) {
    LatencyPool::Offer& offer = agreed.offers[index(peer)];
    std::memcpy(&offer, channel.body(peer), sizeof(offer));
    agreed.number = std::max(agreed.number, offer.newest + 1);
    agreed.takes = std::max(agreed.takes, offer.free);
  }
  for (const int peer : channel.ranks()) {
    if (!agreed.offers[index(peer)].allows(agreed.takes)) agreed.takes = 0;
  }
  return agreed;
}

}  // namespace ferry::host
