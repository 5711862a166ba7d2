#include "fabric/ofi/handshake.hpp"

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>

#include "base/text.hpp"
#include "fabric/ofi/card.hpp"
#include "fabric/ofi/fi_endpoint.hpp"
#include "fabric/ofi/nics/address.hpp"
#include "fabric/segment_table.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint64_t kOfferMagic = 0x324946424f524546;       // "FEROBFI2"
constexpr std::uint64_t kMagic = 0x334946424f524546;            // "FEROBFI3"
constexpr std::uint64_t kInvitationMagic = 0x314946424f524546;  // "FEROBFI1"
constexpr std::size_t kMostHandshakeBytes = 8192;
constexpr std::uint32_t kMostNics = 256;        // of a machine
constexpr std::uint32_t kMostLocal = 1u << 16;  // ranks of a machine
constexpr std::size_t kMaxText = 1000;
constexpr std::size_t kMostOfHandshakeShown = 80;

void append(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + count);
}

void append_counted(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto length = static_cast<std::uint32_t>(count);
  append(bytes, &length, sizeof length);
  append(bytes, data, count);
}

void append_texts(std::vector<std::byte>& bytes, const std::vector<std::string>& texts,
                  std::size_t most) {
  const auto count = static_cast<std::uint32_t>(std::min(texts.size(), most));
  append(bytes, &count, sizeof count);
  for (std::uint32_t i = 0; i < count; ++i) {
    append_counted(bytes, texts[i].data(), std::min(texts[i].size(), kMaxText));
  }
}

/// Reads from the front; `ok` turns false at what cannot be.
struct Reader {
  std::span<const std::byte> left;
  bool ok = true;

  void read(void* to, std::size_t count) {
    if (!ok || left.size() < count) {
      ok = false;
      return;
    }
    std::memcpy(to, left.data(), count);
    left = left.subspan(count);
  }
  std::span<const std::byte> counted(std::size_t most) {
    std::uint32_t length = 0;
    read(&length, sizeof length);
    ok = ok && length <= most && length <= left.size();
    if (!ok) return {};
    const auto taken = left.first(length);
    left = left.subspan(length);
    return taken;
  }
  std::string text(std::size_t most) {
    const auto taken = counted(most);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::uint32_t count(std::uint32_t most) {
    std::uint32_t number = 0;
    read(&number, sizeof number);
    ok = ok && number <= most;
    return ok ? number : 0;
  }
  std::vector<std::string> texts(std::uint32_t most) {
    std::vector<std::string> all;
    const std::uint32_t number = count(most);
    for (std::uint32_t i = 0; ok && i < number; ++i) all.push_back(text(kMaxText));
    return all;
  }
};

[[noreturn]] void throw_unreadable(std::size_t bytes, int rank, int peer) {
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(rank) + ": what rank " + std::to_string(peer) +
                  " says about its network (" + std::to_string(bytes) +
                  " bytes) cannot be read; use the same version of Ferry, built with libfabric, on "
                  "all ranks, and give all the same fabric",
              {.rank = rank, .peer = peer});
}

std::string rank_text(std::size_t rank) {
  return "rank " + std::to_string(rank);
}

[[noreturn]] void refuse_handshake(ErrorKind kind, const std::string& what, int rank,
                                   std::size_t peer) {
  throw Error(kind, what, {.rank = rank, .peer = static_cast<int>(peer)});
}

void check_problem(const std::string& problem, int rank, std::size_t peer) {
  if (problem.empty()) return;
  refuse_handshake(ErrorKind::peer_failed,
                   rank_text(peer) + " cannot use the network: " + printable(problem, kMaxText),
                   rank, peer);
}

/// Each rank must reach each other one.
void check_addresses(const std::vector<Handshake>& handshakes, int rank) {
  const Handshake& first = handshakes.front();
  for (std::size_t r = 0; r < handshakes.size(); ++r) {
    const Handshake& other = handshakes[r];
    for (const auto& name : other.names) {
      const std::size_t bytes = name.size();
      if (bytes > 0 && bytes == first.names.front().size()) continue;
      if (bytes > 0 && bytes != other.names.front().size()) {
        refuse_handshake(
            ErrorKind::mismatch,
            rank_text(r) + " has NICs whose addresses are of two kinds (endpoints' names of " +
                std::to_string(other.names.front().size()) + " and " + std::to_string(bytes) +
                " bytes); name NICs of one kind there, IPv4 or IPv6 (FERRY_OFI_NICS)",
            rank, r);
      }
      refuse_handshake(ErrorKind::mismatch,
                       rank_text(r) + " listens at " +
                           printable(other.address, kMostOfHandshakeShown) +
                           " (an endpoint's name of " + std::to_string(bytes) +
                           " bytes), rank 0 at " + printable(first.address, kMostOfHandshakeShown) +
                           " (" + std::to_string(first.names.front().size()) +
                           "); give all ranks a FERRY_HOST of one kind, IPv4 or IPv6",
                       rank, r);
    }
  }
  const auto apart =
      std::find_if(handshakes.begin(), handshakes.end(),
                   [&](const Handshake& other) { return other.boot_id != first.boot_id; });
  if (apart == handshakes.end()) return;
  for (std::size_t r = 0; r < handshakes.size(); ++r) {
    if (!is_loopback(handshakes[r].address)) continue;
    refuse_handshake(
        ErrorKind::invalid_argument,
        "ranks 0 and " + std::to_string(apart - handshakes.begin()) +
            " run on different hosts, but " + rank_text(r) + " listens at " +
            handshakes[r].address +
            ", where only its own host reaches it; set FERRY_HOST there to an address or "
            "interface of its network",
        rank, r);
  }
}

}  // namespace

std::vector<std::byte> to_bytes(const Offer& offer) {
  std::vector<std::byte> bytes;
  append(bytes, &kOfferMagic, sizeof kOfferMagic);
  append(bytes, &offer.key, sizeof offer.key);
  for (const std::string* text : {&offer.problem, &offer.boot_id}) {
    append_counted(bytes, text->data(), std::min(text->size(), kMaxText));
  }
  append_texts(bytes, offer.nearest, kMostNics);
  return bytes;
}

Offer offer_from(std::span<const std::byte> bytes, int rank, int peer) {
  Reader reader{bytes};
  std::uint64_t magic = 0;
  Offer offer;
  reader.read(&magic, sizeof magic);
  reader.ok = reader.ok && magic == kOfferMagic;
  reader.read(&offer.key, sizeof offer.key);
  for (std::string* text : {&offer.problem, &offer.boot_id}) *text = reader.text(kMaxText);
  offer.nearest = reader.texts(kMostNics);
  if (!reader.ok || !reader.left.empty()) throw_unreadable(bytes.size(), rank, peer);
  return offer;
}

void check_offers(const std::vector<Offer>& offers, int rank) {
  for (std::size_t r = 0; r < offers.size(); ++r) check_problem(offers[r].problem, rank, r);
}

std::vector<std::byte> to_bytes(const Handshake& handshake) {
  std::vector<std::byte> bytes;
  append(bytes, &kMagic, sizeof kMagic);
  for (const std::string* text :
       {&handshake.problem, &handshake.provider, &handshake.boot_id, &handshake.address}) {
    append_counted(bytes, text->data(), std::min(text->size(), kMaxText));
  }
  append_texts(bytes, handshake.networks, kMaxOfiEndpoints);
  const auto names = static_cast<std::uint32_t>(handshake.names.size());
  append(bytes, &names, sizeof names);
  for (const auto& name : handshake.names) append_counted(bytes, name.data(), name.size());
  return bytes;
}

Handshake handshake_from(std::span<const std::byte> bytes, int rank, int peer) {
  Reader reader{bytes};
  std::uint64_t magic = 0;
  Handshake handshake;
  reader.read(&magic, sizeof magic);
  reader.ok = reader.ok && magic == kMagic;
  for (std::string* text :
       {&handshake.problem, &handshake.provider, &handshake.boot_id, &handshake.address}) {
    *text = reader.text(kMaxText);
  }
  handshake.networks = reader.texts(kMaxOfiEndpoints);
  const std::uint32_t endpoints = reader.count(kMaxOfiEndpoints);
  for (std::uint32_t i = 0; reader.ok && i < endpoints; ++i) {
    const auto name = reader.counted(kMaxEndpointName);
    handshake.names.emplace_back(name.begin(), name.end());
  }
  const std::size_t nics = handshake.networks.size(), names = handshake.names.size();
  // As many endpoints on each NIC, or neither.
  const bool whole = nics == 0 ? names == 0 : names > 0 && names % nics == 0;
  const bool some = nics > 0 || !handshake.problem.empty();
  if (!reader.ok || !reader.left.empty() || !whole || !some) {
    throw_unreadable(bytes.size(), rank, peer);
  }
  return handshake;
}

void check_handshakes(const std::vector<Handshake>& handshakes, int rank) {
  const Handshake& first = handshakes.front();
  for (std::size_t r = 0; r < handshakes.size(); ++r) {
    const Handshake& other = handshakes[r];
    check_problem(other.problem, rank, r);
    if (other.provider != first.provider) {
      refuse_handshake(ErrorKind::mismatch,
                       rank_text(r) + " uses libfabric's provider " +
                           printable(other.provider, kMostOfHandshakeShown) + ", rank 0 " +
                           printable(first.provider, kMostOfHandshakeShown) +
                           "; name one that all have (FERRY_OFI_PROVIDER)",
                       rank, r);
    }
    if (other.names.size() / other.networks.size() != first.names.size() / first.networks.size()) {
      const auto endpoints = [](const Handshake& handshake) {
        return std::to_string(handshake.names.size() / handshake.networks.size());
      };
      refuse_handshake(ErrorKind::mismatch,
                       rank_text(r) + " has " + endpoints(other) +
                           " endpoints on each NIC, rank 0 " + endpoints(first) +
                           "; give all ranks the same number (FERRY_OFI_ENDPOINTS)",
                       rank, r);
    }
  }
  check_addresses(handshakes, rank);
}

void check_joined(const Handshake& mine, int rank, const Handshake& theirs, int peer) {
  const bool alike =
      theirs.problem.empty() && theirs.provider == mine.provider &&
      theirs.names.size() * mine.networks.size() == mine.names.size() * theirs.networks.size() &&
      theirs.names.front().size() == mine.names.front().size();
  if (alike) return;
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(rank) + " and rank " + std::to_string(peer) +
                  ", one of which joins, cannot reach each other: providers " +
                  printable(mine.provider, kMostOfHandshakeShown) + " and " +
                  printable(theirs.provider, kMostOfHandshakeShown) + ", addresses " +
                  printable(mine.address, kMostOfHandshakeShown) + " and " +
                  printable(theirs.address, kMostOfHandshakeShown) +
                  "; give all the same FERRY_OFI_* settings",
              {.rank = rank, .peer = peer});
}

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
