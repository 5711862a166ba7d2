#include "fabric/ofi/card.hpp"

#include <algorithm>
#include <cstdint>

#include "fabric/ofi/handshake_bytes.hpp"
#include "fabric/segment_table.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint64_t kInvitationMagic = 0x314946424f524546;  // "FEROBFI1"
constexpr std::size_t kMostHandshakeBytes = 8192;
constexpr std::uint32_t kMostLocal = 1u << 16;  // ranks of a machine

}  // namespace

std::vector<std::byte> to_bytes(const Invitation& invitation) {
  std::vector<std::byte> bytes;
  append(bytes, &kInvitationMagic, sizeof kInvitationMagic);
  append(bytes, &invitation.key, sizeof invitation.key);
  const auto local = static_cast<std::uint32_t>(invitation.local);
  append(bytes, &local, sizeof local);
  append_counted(bytes, invitation.address.data(), std::min(invitation.address.size(), kMaxText));
  return bytes;
}

Invitation invitation_from(std::span<const std::byte> bytes, int rank) {
  Reader reader{bytes};
  std::uint64_t magic = 0;
  std::uint32_t local = 0;
  Invitation invitation;
  reader.read(&magic, sizeof magic);
  reader.read(&invitation.key, sizeof invitation.key);
  reader.read(&local, sizeof local);
  invitation.address = reader.text(kMaxText);
  reader.ok = reader.ok && magic == kInvitationMagic && local > 0 && local < kMostLocal;
  if (!reader.ok || !reader.left.empty()) throw_unreadable(bytes.size(), rank, rank);
  invitation.local = static_cast<int>(local);
  return invitation;
}

std::vector<std::byte> to_bytes(const Card& card) {
  std::vector<std::byte> bytes;
  const auto handshake = to_bytes(card.handshake);
  append_counted(bytes, handshake.data(), handshake.size());
  const auto segments = static_cast<std::uint32_t>(card.segments.size());
  append(bytes, &segments, sizeof segments);
  for (const Card::Segment& segment : card.segments) {
    append(bytes, &segment.id, sizeof segment.id);
    append(bytes, &segment.bytes, sizeof segment.bytes);
    append_counted(bytes, segment.handle.data(), segment.handle.size());
  }
  return bytes;
}

Card card_from(std::span<const std::byte> bytes, int rank, int peer) {
  Reader reader{bytes};
  Card card;
  const auto handshake = reader.counted(kMostHandshakeBytes);
  if (!reader.ok) throw_unreadable(bytes.size(), rank, peer);
  card.handshake = handshake_from(handshake, rank, peer);
  const std::uint32_t segments = reader.count(kMaxSegments);
  for (std::uint32_t i = 0; reader.ok && i < segments; ++i) {
    Card::Segment segment;
    reader.read(&segment.id, sizeof segment.id);
    reader.read(&segment.bytes, sizeof segment.bytes);
    const auto handle = reader.counted(kMaxHandleBytes);
    segment.handle.assign(handle.begin(), handle.end());
    card.segments.push_back(std::move(segment));
  }
  if (!reader.ok || !reader.left.empty()) throw_unreadable(bytes.size(), rank, peer);
  return card;
}

}  // namespace ferry::fabric::ofi
