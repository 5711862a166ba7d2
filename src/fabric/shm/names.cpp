#include "fabric/shm/names.hpp"

#include <array>
#include <bit>
#include <charconv>
#include <cstdio>

#include "platform/pages.hpp"

namespace ferry::fabric {
namespace {

constexpr std::size_t kDigits = 32;

void sip_round(std::array<std::uint64_t, 4>& v) {
  v[0] += v[1];
  v[2] += v[3];
  v[1] = std::rotl(v[1], 13) ^ v[0];
  v[3] = std::rotl(v[3], 16) ^ v[2];
  v[0] = std::rotl(v[0], 32);
  v[2] += v[1];
  v[0] += v[3];
  v[1] = std::rotl(v[1], 17) ^ v[2];
  v[3] = std::rotl(v[3], 21) ^ v[0];
  v[2] = std::rotl(v[2], 32);
}

/// Takes a number that ends at `end` off the front of `text`.
bool take_number(std::string_view& text, char end, std::uint64_t& value) {
  const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || at == text.data() + text.size() || *at != end) return false;
  text.remove_prefix(static_cast<std::size_t>(at - text.data()) + 1);
  return true;
}

}  // namespace

std::uint64_t siphash(const JobKey& key, std::uint64_t first, std::uint64_t second) {
  std::array<std::uint64_t, 4> v{key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
                                 key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573};
  constexpr std::uint64_t kLength = std::uint64_t{16} << 56;
  for (const std::uint64_t word : {first, second, kLength}) {
    v[3] ^= word;
    sip_round(v);
    sip_round(v);
    v[0] ^= word;
  }
  v[2] ^= 0xff;
  for (int i = 0; i < 4; ++i) sip_round(v);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

std::string owner_prefix(const ProcessName& owner) {
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "ferry-%llu.%lld.%llu-",
                static_cast<unsigned long long>(owner.pid_namespace),
                static_cast<long long>(owner.pid),
                static_cast<unsigned long long>(owner.start_time));
  return text.data();
}

std::string object_name(const JobKey& key, const ProcessName& owner, int rank, SegmentId segment) {
  const auto source = static_cast<std::uint64_t>(rank);
  std::array<char, kDigits + 1> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx",
                static_cast<unsigned long long>(siphash(key, source, segment)),
                static_cast<unsigned long long>(siphash(key, source, ~std::uint64_t{segment})));
  return "/" + owner_prefix(owner) + text.data();
}

std::optional<ProcessName> owner_of(std::string_view name) {
  if (name.substr(0, kObjectPrefix.size()) != kObjectPrefix) return std::nullopt;
  name.remove_prefix(kObjectPrefix.size());
  ProcessName owner;
  std::uint64_t pid = 0;
  if (!take_number(name, '.', owner.pid_namespace) || !take_number(name, '.', pid) ||
      !take_number(name, '-', owner.start_time) || name.size() != kDigits ||
      name.find_first_not_of("0123456789abcdef") != std::string_view::npos || pid == 0 ||
      pid > 0x7fffffff) {
    return std::nullopt;
  }
  owner.pid = static_cast<std::int64_t>(pid);
  return owner;
}

std::size_t remove_orphans() noexcept {
  const ProcessName self = this_process();
  if (self.pid_namespace == 0) return 0;
  int error = 0;
  const auto names = list_sections(std::string(kObjectPrefix), error);
  std::size_t removed = 0;
  for (std::size_t i = 0; names && i < names->size(); ++i) {
    const auto owner = owner_of((*names)[i]);
    if (!owner || owner->pid_namespace != self.pid_namespace || owner->start_time == 0) continue;
    if (!runs_no_more(*owner)) continue;
    remove_section("/" + (*names)[i]);
    ++removed;
  }
  return removed;
}

}  // namespace ferry::fabric
