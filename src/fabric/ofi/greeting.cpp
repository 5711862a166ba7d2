#include "fabric/ofi/greeting.hpp"

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>

#include "core/text.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/ofi/provider.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint64_t kMagic = 0x314946424f524546;  // "FEROBFI1"
constexpr std::size_t kMaxText = 1000;
constexpr std::size_t kMostShown = 80;

void append(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + count);
}

void append_counted(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto length = static_cast<std::uint32_t>(count);
  append(bytes, &length, sizeof length);
  append(bytes, data, count);
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
};

std::string rank_text(std::size_t rank) {
  return "rank " + std::to_string(rank);
}

[[noreturn]] void refuse(ErrorKind kind, const std::string& what, int rank, std::size_t peer) {
  throw Error(kind, what, {.rank = rank, .peer = static_cast<int>(peer)});
}

/// Each rank must reach each other one.
void check_addresses(const std::vector<Greeting>& greetings, int rank) {
  const Greeting& first = greetings.front();
  for (std::size_t r = 0; r < greetings.size(); ++r) {
    const Greeting& other = greetings[r];
    for (std::size_t lane = 0; lane < other.names.size(); ++lane) {
      const std::size_t bytes = other.names[lane].size();
      if (bytes > 0 && bytes == first.names[lane].size()) continue;
      refuse(ErrorKind::mismatch,
             rank_text(r) + " listens at " + printable(other.address, kMostShown) +
                 " (an endpoint's name of " + std::to_string(bytes) + " bytes), rank 0 at " +
                 printable(first.address, kMostShown) + " (" +
                 std::to_string(first.names[lane].size()) +
                 "); give all ranks a FERRY_HOST of one kind, IPv4 or IPv6",
             rank, r);
    }
  }
  const auto apart = std::find_if(greetings.begin(), greetings.end(), [&](const Greeting& other) {
    return other.boot_id != first.boot_id;
  });
  if (apart == greetings.end()) return;
  for (std::size_t r = 0; r < greetings.size(); ++r) {
    if (!is_loopback(greetings[r].address)) continue;
    refuse(ErrorKind::invalid_argument,
           "ranks 0 and " + std::to_string(apart - greetings.begin()) +
               " run on different hosts, but " + rank_text(r) + " listens at " +
               greetings[r].address +
               ", where only its own host reaches it; set FERRY_HOST there to an address or "
               "interface of its network",
           rank, r);
  }
}

}  // namespace

std::vector<std::byte> to_bytes(const Greeting& greeting) {
  std::vector<std::byte> bytes;
  append(bytes, &kMagic, sizeof kMagic);
  append(bytes, &greeting.key, sizeof greeting.key);
  for (const std::string* text :
       {&greeting.problem, &greeting.provider, &greeting.boot_id, &greeting.address}) {
    append_counted(bytes, text->data(), std::min(text->size(), kMaxText));
  }
  const auto names = static_cast<std::uint32_t>(greeting.names.size());
  append(bytes, &names, sizeof names);
  for (const auto& name : greeting.names) append_counted(bytes, name.data(), name.size());
  return bytes;
}

Greeting greeting_from(std::span<const std::byte> bytes, int rank, int peer) {
  Reader reader{bytes};
  std::uint64_t magic = 0;
  Greeting greeting;
  reader.read(&magic, sizeof magic);
  reader.ok = reader.ok && magic == kMagic;
  reader.read(&greeting.key, sizeof greeting.key);
  for (std::string* text :
       {&greeting.problem, &greeting.provider, &greeting.boot_id, &greeting.address}) {
    *text = reader.text(kMaxText);
  }
  std::uint32_t names = 0;
  reader.read(&names, sizeof names);
  reader.ok = reader.ok && names <= static_cast<std::uint32_t>(kMaxOfiEndpoints);
  for (std::uint32_t i = 0; reader.ok && i < names; ++i) {
    const auto name = reader.counted(kMaxEndpointName);
    greeting.names.emplace_back(name.begin(), name.end());
  }
  if (reader.ok && reader.left.empty()) return greeting;
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(rank) + ": what rank " + std::to_string(peer) +
                  " says about its network (" + std::to_string(bytes.size()) +
                  " bytes) cannot be read; use the same version of Ferry, built with libfabric, on "
                  "all ranks, and give all the same fabric",
              {.rank = rank, .peer = peer});
}

void check_greetings(const std::vector<Greeting>& greetings, int rank) {
  const Greeting& first = greetings.front();
  for (std::size_t r = 0; r < greetings.size(); ++r) {
    const Greeting& other = greetings[r];
    if (!other.problem.empty()) {
      refuse(ErrorKind::peer_failed,
             rank_text(r) + " cannot use the network: " + printable(other.problem, kMaxText), rank,
             r);
    }
    if (other.provider != first.provider) {
      refuse(ErrorKind::mismatch,
             rank_text(r) + " uses libfabric's provider " + printable(other.provider, kMostShown) +
                 ", rank 0 " + printable(first.provider, kMostShown) +
                 "; name one that all have (FERRY_OFI_PROVIDER)",
             rank, r);
    }
    if (other.names.size() != first.names.size()) {
      refuse(ErrorKind::mismatch,
             rank_text(r) + " has " + std::to_string(other.names.size()) + " endpoints, rank 0 " +
                 std::to_string(first.names.size()) +
                 "; give all ranks the same number (FERRY_OFI_ENDPOINTS)",
             rank, r);
    }
  }
  check_addresses(greetings, rank);
}

}  // namespace ferry::fabric::ofi
