#include "fabric/ofi/handshake.hpp"

#include <algorithm>
#include <ferry/error.hpp>

#include "base/text.hpp"
#include "fabric/ofi/fi_endpoint.hpp"
#include "fabric/ofi/handshake_bytes.hpp"
#include "fabric/ofi/nics/address.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint64_t kOfferMagic = 0x324946424f524546;  // "FEROBFI2"
constexpr std::uint64_t kMagic = 0x334946424f524546;       // "FEROBFI3"
constexpr std::uint32_t kMostNics = 256;                   // of a machine
constexpr std::size_t kMostOfHandshakeShown = 80;

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
  for (const std::string* text : {&handshake.problem, &handshake.provider, &handshake.boot_id,
                                  &handshake.processes, &handshake.address}) {
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
  for (std::string* text : {&handshake.problem, &handshake.provider, &handshake.boot_id,
                            &handshake.processes, &handshake.address}) {
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

}  // namespace ferry::fabric::ofi
