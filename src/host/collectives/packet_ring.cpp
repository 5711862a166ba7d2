#include "host/collectives/packet_ring.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace ferry::host {

PacketLayout PacketLayout::of(int ranks) {
  constexpr std::size_t kTogether = std::size_t{1} << 20;  // of all slots of a rank
  constexpr std::size_t kLeast = std::size_t{1} << 10, kMost = std::size_t{64} << 10;
  const auto r = static_cast<std::size_t>(ranks);
  constexpr std::size_t kSlots = protocol::PacketTraits::kSlots;
  PacketLayout layout;
  Carver carver;
  layout.posted = carver.take(r * kLineBytes);
  layout.taken = carver.take(r * kLineBytes);
  layout.bell = carver.take(kLineBytes);
  layout.carried = std::clamp(kTogether / (r * kSlots) / kLineBytes * kLineBytes, kLeast, kMost);
  layout.slots = carver.take(r * kSlots * layout.slot_bytes());
  layout.bytes = carver.end;
  return layout;
}

PacketRing::PacketRing(HostEngine& engine, const engine::Region& base)
    : engine_(engine),
      base_(base),
      layout_(PacketLayout::of(engine.size())),
      packets_(flags(layout_.posted), flags(layout_.taken), engine.rank(), own(layout_.posted),
               own(layout_.taken)),
      sent_(index(engine.size())),
      taken_(index(engine.size())),
      told_(index(engine.size())),
      news_(index(engine.size())) {}

protocol::FlagLayout PacketRing::flags(std::size_t offset) const {
  return {engine_.size(), {base_.address.segment, base_.address.offset + offset}, kLineBytes};
}

std::size_t PacketRing::slot(int writer, std::uint64_t number) const {
  return layout_.slots +
         (index(writer) * protocol::PacketTraits::kSlots + protocol::Packets<>::slot(number)) *
             layout_.slot_bytes();
}

void PacketRing::write(int peer, PacketHead head, const std::byte* data) {
  const std::uint64_t number = ++sent_[index(peer)];
  const protocol::Place to{base_.address.segment,
                           base_.address.offset + slot(engine_.rank(), number)};
  const std::uint64_t tag = protocol::Packets<>::tag(number);
  std::array<std::byte, kLineBytes> line{};
  std::memcpy(line.data(), &head, sizeof(head));
  engine::FabricReach& reach = engine_.channel().reach();
  if (engine_.channel().pointer(peer, base_.address) != nullptr) {
    reach.write(peer, to, line.data(), sizeof(head), tag);
    reach.write(peer, to.at(kLineBytes), data, head.carried, tag);
  } else {
    const fabric::Piece pieces[] = {{line.data(), line.size()}, {data, head.carried}};
    reach.write_pieces(peer, to, std::span(pieces, head.carried > 0 ? 2 : 1), tag);
  }
  packets_.post(reach, peer, number, kLineBytes + head.carried);
  news_[index(peer)] = true;
}

std::optional<PacketRing::Packet> PacketRing::next(int peer) const {
  const std::uint64_t number = taken_[index(peer)] + 1;
  if (!packets_.arrived(peer, number)) return std::nullopt;
  const std::byte* at = own(slot(peer, number));
  Packet packet{{}, at + kLineBytes};
  // One copy: a peer whose memory is damaged cannot change it once it was checked.
  protocol::read_bytes(&packet.head, at, sizeof(PacketHead));
  return packet;
}

void PacketRing::take(int peer) {
  ++taken_[index(peer)];
}

void PacketRing::settle(int peer) {
  const auto p = index(peer);
  if (told_[p] != taken_[p]) {
    told_[p] = taken_[p];
    packets_.take(engine_.channel().reach(), peer, taken_[p]);
    news_[p] = true;
  }
  if (!news_[p]) return;
  news_[p] = false;
  if (std::byte* theirs = engine_.channel().pointer(peer, base_.address)) {
    ring(bell_at(theirs + layout_.bell));
  }
}

protocol::Flag PacketRing::bell_at(std::byte* line) {
  return protocol::Flag{reinterpret_cast<std::uint64_t*>(line)};
}

void PacketRing::ring(protocol::Flag bell) {
  // Release: who sees it sees the flags that were raised before.
  bell.fetch_add(1, protocol::order::release);
  bell.wake();
}

std::uint64_t PacketRing::bell() const {
  return bell_at(own(layout_.bell)).load(protocol::order::acquire);
}

void PacketRing::wake() const {
  ring(bell_at(own(layout_.bell)));
}

void PacketRing::sleep(std::uint64_t seen, std::chrono::nanoseconds longest) const {
  protocol::Sleepers<>(bell_at(own(layout_.bell)))
      .sleep(seen, static_cast<std::uint64_t>(longest.count()));
}

}  // namespace ferry::host
