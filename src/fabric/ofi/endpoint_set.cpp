#include "fabric/ofi/endpoint_set.hpp"

#include <algorithm>
#include <utility>

namespace ferry::fabric::ofi {

Bundle::Bundle(const Library& library, int index, std::span<const Info> infos,
               const LaneSetting& setting)
    : rank_(setting.rank),
      index_(index),
      arrivals_(setting.size),
      targets_(static_cast<std::size_t>(setting.size)) {
  for (const Info& info : infos) {
    lanes_.push_back(std::make_unique<Lane>(library, info, setting, arrivals_));
  }
}

std::vector<std::vector<std::byte>> Bundle::names() const {
  std::vector<std::vector<std::byte>> names;
  for (const auto& lane : lanes_) names.push_back(lane->name());
  return names;
}

void Bundle::start(const JobKey& job, std::vector<std::vector<Partner>> partners,
                   std::chrono::nanoseconds spin) {
  const int size = static_cast<int>(partners.size());
  std::vector<std::vector<Link>> links(lanes_.size(), std::vector<Link>(partners.size()));
  for (int peer = 0; peer < size; ++peer) {
    auto& list = partners[static_cast<std::size_t>(peer)];
    for (std::size_t way = 0; way < list.size(); ++way) {
      const int place = index_ * kMaxOfiEndpoints + static_cast<int>(way);
      const std::size_t mine = list[way].mine;
      links[mine][static_cast<std::size_t>(peer)] = {
          list[way].name, way_token(job, rank_, peer, place), way_token(job, peer, rank_, place)};
      target_of(peer).lanes.push_back(lanes_[mine].get());
      target_of(peer).theirs.push_back(list[way].theirs);
    }
  }
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) lanes_[lane]->start(links[lane], spin);
}

void Bundle::leave() {
  for (const auto& lane : lanes_) lane->leave();
}

std::uint64_t Bundle::expose(SegmentId segment, std::byte* data, std::size_t bytes,
                             std::span<std::uint64_t> keys) {
  arrivals_.expose(segment, data, bytes);
  std::uint64_t base = 0;  // the same on all lanes: an address or nothing
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const Remote remote = lanes_[lane]->expose(segment, data, bytes);
    base = remote.base;
    keys[lane] = remote.key;
  }
  return base;
}

void Bundle::withdraw(SegmentId segment) {
  for (const auto& lane : lanes_) lane->withdraw(segment);
  arrivals_.expose(segment, nullptr, 0);
}

void Bundle::attach(int peer, SegmentId segment, std::uint64_t base,
                    std::span<const std::uint64_t> keys) {
  const Target& target = target_of(peer);
  for (std::size_t way = 0; way < target.lanes.size(); ++way) {
    target.lanes[way]->attach(peer, segment, {base, keys[target.theirs[way]]});
  }
}

void Bundle::help() noexcept {
  for (const auto& lane : lanes_) lane->help();
}

void Bundle::hand_over() noexcept {
  for (const auto& lane : lanes_) lane->hand_over();
}

void Bundle::rest() noexcept {
  for (const auto& lane : lanes_) lane->rest();
}

bool Bundle::lost(int peer) const noexcept {
  const auto& lanes = target_of(peer).lanes;
  return !left(peer) && std::any_of(lanes.begin(), lanes.end(),
                                    [peer](const Lane* lane) { return lane->lost(peer); });
}

bool Bundle::left(int peer) const noexcept {
  const auto& lanes = target_of(peer).lanes;
  return std::any_of(lanes.begin(), lanes.end(),
                     [peer](const Lane* lane) { return lane->left(peer); });
}

bool Bundle::gone(int rank) const noexcept {
  const auto& lanes = target_of(rank).lanes;
  return std::any_of(lanes.begin(), lanes.end(),
                     [rank](const Lane* lane) { return lane->lost(rank) || lane->left(rank); });
}

std::chrono::nanoseconds Bundle::silent_for(int peer) const noexcept {
  std::chrono::nanoseconds silent{};
  const bool cut = cut_off();
  for (const Lane* lane : target_of(peer).lanes) {
    if (!cut || !lane->deaf()) silent = std::max(silent, lane->silent_for(peer));
  }
  return silent;
}

bool Bundle::cut_off() const noexcept {
  if (lanes_.size() == 1) return false;
  const auto deaf =
      std::count_if(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->deaf(); });
  return deaf > 0 && deaf < static_cast<std::ptrdiff_t>(lanes_.size());
}

}  // namespace ferry::fabric::ofi
