#include "fabric/ofi/endpoint_set.hpp"

#include <algorithm>
#include <utility>

namespace ferry::fabric::ofi {

EndpointSet::EndpointSet(const Library& library, int index, std::span<const Info> infos,
                         const EndpointSetting& setting)
    : rank_(setting.rank),
      index_(index),
      arrivals_(setting.size),
      targets_(static_cast<std::size_t>(setting.size)) {
  for (const Info& info : infos) {
    endpoints_.push_back(std::make_unique<Endpoint>(library, info, setting, arrivals_));
  }
}

std::vector<std::vector<std::byte>> EndpointSet::names() const {
  std::vector<std::vector<std::byte>> names;
  for (const auto& endpoint : endpoints_) names.push_back(endpoint->name());
  return names;
}

void EndpointSet::start(const JobKey& job, std::vector<std::vector<Partner>> partners,
                        std::chrono::nanoseconds spin) {
  const int size = static_cast<int>(partners.size());
  std::vector<std::vector<Link>> links(endpoints_.size(), std::vector<Link>(partners.size()));
  for (int peer = 0; peer < size; ++peer) {
    auto& list = partners[static_cast<std::size_t>(peer)];
    for (std::size_t way = 0; way < list.size(); ++way) {
      const int place = index_ * kMaxOfiEndpoints + static_cast<int>(way);
      const std::size_t mine = list[way].mine;
      links[mine][static_cast<std::size_t>(peer)] = {
          list[way].name, way_token(job, rank_, peer, place), way_token(job, peer, rank_, place)};
      target_of(peer).endpoints.push_back(endpoints_[mine].get());
      target_of(peer).theirs.push_back(list[way].theirs);
    }
  }
  for (std::size_t i = 0; i < endpoints_.size(); ++i) endpoints_[i]->start(links[i], spin);
}

void EndpointSet::leave() {
  for (const auto& endpoint : endpoints_) endpoint->leave();
}

std::uint64_t EndpointSet::expose(SegmentId segment, std::byte* data, std::size_t bytes,
                                  std::span<std::uint64_t> keys) {
  arrivals_.expose(segment, data, bytes);
  std::uint64_t base = 0;  // the same on all endpoints: an address or nothing
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const Remote remote = endpoints_[i]->expose(segment, data, bytes);
    base = remote.base;
    keys[i] = remote.key;
  }
  return base;
}

void EndpointSet::withdraw(SegmentId segment) {
  for (const auto& endpoint : endpoints_) endpoint->withdraw(segment);
  arrivals_.expose(segment, nullptr, 0);
}

void EndpointSet::attach(int peer, SegmentId segment, std::uint64_t base,
                         std::span<const std::uint64_t> keys) {
  const Target& target = target_of(peer);
  for (std::size_t way = 0; way < target.endpoints.size(); ++way) {
    target.endpoints[way]->attach(peer, segment, {base, keys[target.theirs[way]]});
  }
}

void EndpointSet::help() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->help();
}

void EndpointSet::hand_over() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->hand_over();
}

void EndpointSet::rest() noexcept {
  for (const auto& endpoint : endpoints_) endpoint->rest();
}

bool EndpointSet::lost(int peer) const noexcept {
  const auto& endpoints = target_of(peer).endpoints;
  return !left(peer) &&
         std::any_of(endpoints.begin(), endpoints.end(),
                     [peer](const Endpoint* endpoint) { return endpoint->lost(peer); });
}

bool EndpointSet::left(int peer) const noexcept {
  const auto& endpoints = target_of(peer).endpoints;
  return std::any_of(endpoints.begin(), endpoints.end(),
                     [peer](const Endpoint* endpoint) { return endpoint->left(peer); });
}

bool EndpointSet::gone(int rank) const noexcept {
  const auto& endpoints = target_of(rank).endpoints;
  return std::any_of(endpoints.begin(), endpoints.end(), [rank](const Endpoint* endpoint) {
    return endpoint->lost(rank) || endpoint->left(rank);
  });
}

std::chrono::nanoseconds EndpointSet::silent_for(int peer) const noexcept {
  std::chrono::nanoseconds silent{};
  const bool cut = cut_off();
  for (const Endpoint* endpoint : target_of(peer).endpoints) {
    if (!cut || !endpoint->isolated()) silent = std::max(silent, endpoint->silent_for(peer));
  }
  return silent;
}

bool EndpointSet::cut_off() const noexcept {
  if (endpoints_.size() == 1) return false;
  const auto isolated = std::count_if(endpoints_.begin(), endpoints_.end(),
                                      [](const auto& endpoint) { return endpoint->isolated(); });
  return isolated > 0 && isolated < static_cast<std::ptrdiff_t>(endpoints_.size());
}

}  // namespace ferry::fabric::ofi
