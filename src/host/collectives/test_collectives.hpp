// What tests of collectives share: worlds of ranks, random elements, and the definition of a
// reduction.
#pragma once
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/domains.hpp"
#include "core/number.hpp"
#include "engine/test_groups.hpp"
#include "engine/test_network.hpp"

namespace ferry::host::test {

using namespace engine::test;

using Bytes = std::vector<std::byte>;

struct World {
  int ranks = 1;
  int domain_size = 0;
  FabricKind fabric = FabricKind::local;
  FabricKind network = FabricKind::automatic;
  bool brief = false;  ///< for calls of at most kBriefCount elements

  GroupConfig config(std::chrono::nanoseconds deadline = 60s) const {
    GroupConfig config;
    config.memory_bytes = 8 << 20;
    config.deadline = deadline;
    config.fabric = fabric;
    config.domain_size = domain_size;
    config.network = network;
    return config;
  }
  Domains domains() const {
    const bool alone = fabric == FabricKind::sim || fabric == FabricKind::ofi;
    return Domains::blocks(ranks, alone ? 1 : domain_size);
  }
};

inline std::string to_string(const World& world) {
  return std::to_string(world.ranks) + " ranks, " + std::string(name_of(world.fabric)) +
         ", domains of " + std::to_string(world.domain_size) + ", network " +
         std::string(name_of(world.network));
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitizer = true;  // which makes these tests twenty times as long
#else
constexpr bool kSanitizer = false;
#endif

constexpr std::int64_t kBriefCount = 25'000;

/// The rest of ranks x fabrics x domains.
inline std::vector<World> brief_worlds() {
  std::vector<FabricKind> networks{FabricKind::sim};
  if (has_network()) networks.push_back(FabricKind::ofi);
  std::vector<World> all;
  for (const int ranks : {1, 2, 3, 8}) {
    all.push_back({.ranks = ranks, .fabric = FabricKind::shm, .brief = true});
  }
  for (const FabricKind network : networks) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      all.push_back({.ranks = ranks, .fabric = network, .brief = true});
    }
    for (const auto& [ranks, size] :
         std::initializer_list<std::pair<int, int>>{{2, 1}, {3, 2}, {4, 2}, {8, 3}}) {
      all.push_back({.ranks = ranks, .domain_size = size, .network = network, .brief = true});
    }
  }
  return all;
}

/// One domain, equal and unequal ones, one for each rank.
inline std::vector<World> worlds() {
  std::vector<World> all;
  if (kSanitizer) {
    return {{.ranks = 2}, {.ranks = 3, .domain_size = 2}, {.ranks = 3, .fabric = FabricKind::sim}};
  }
  for (const int ranks : {1, 2, 3, 4, 8}) all.push_back({.ranks = ranks});
  for (const auto& [ranks, size] :
       std::initializer_list<std::pair<int, int>>{{3, 1}, {3, 2}, {4, 2}, {4, 3}, {8, 3}}) {
    all.push_back({.ranks = ranks, .domain_size = size});
  }
  all.push_back({.ranks = 4, .fabric = FabricKind::shm});
  all.push_back({.ranks = 4, .domain_size = 2, .fabric = FabricKind::shm});
  all.push_back({.ranks = 3, .fabric = FabricKind::sim});
  all.push_back({.ranks = 5, .domain_size = 2, .network = FabricKind::sim});
  const std::vector<World> more = brief_worlds();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

inline void with_collectives(const World& world, const std::function<void(Collectives&)>& body,
                             std::chrono::nanoseconds deadline = 60s) {
  SCOPED_TRACE(to_string(world));
  const auto bootstraps = thread_bootstrap(world.ranks);
  on_ranks(world.ranks, [&](int r) {
    Collectives all(bootstraps[static_cast<std::size_t>(r)], world.config(deadline));
    body(all);
  });
}

/// What a rank brings: any bits for integers; for floats also −0, NaN and infinities now and then.
inline Bytes random_elements(Dtype dtype, std::int64_t count, unsigned seed) {
  std::mt19937 random(kSeed + seed);
  Bytes bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* at = bytes.data() + static_cast<std::size_t>(i) * size_of(dtype);
    if (dtype == Dtype::i32 || dtype == Dtype::i64 || size_of(dtype) == 1) {
      const std::uint64_t bits = (std::uint64_t{random()} << 32) | random();
      std::memcpy(at, &bits, size_of(dtype));
      continue;
    }
    float value = normal(random);
    const unsigned rare = random() % 200;
    if (rare == 0) value = -0.0f;
    if (rare == 1) value = std::numeric_limits<float>::quiet_NaN();
    if (rare == 2) value = std::numeric_limits<float>::infinity();
    if (dtype == Dtype::f32) std::memcpy(at, &value, 4);
    const auto narrow = [&](auto rounded) { std::memcpy(at, &rounded, 2); };
    if (dtype == Dtype::bf16) narrow(from_float<Bf16>(value));
    if (dtype == Dtype::f16) narrow(from_float<Fp16>(value));
  }
  return bytes;
}

template <class T, class Acc>
Acc element(const Bytes& bytes, std::int64_t i) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  if constexpr (std::is_integral_v<T>)
    return static_cast<Acc>(value);
  else
    return to_float(value);
}

template <class Acc>
Acc apply(ReduceOp op, Acc a, Acc b) {
  switch (op) {
    case ReduceOp::product: return a * b;
    case ReduceOp::min: return std::isnan(double(a)) || a < b ? a : b;
    case ReduceOp::max: return std::isnan(double(a)) || a > b ? a : b;
    default: return a + b;
  }
}

/// By the definition in ferry/collectives.hpp. `Acc`: float, or an integer in which nothing is
/// lost.
template <class T, class Acc>
Bytes reduced_as(ReduceOp op, const std::vector<Bytes>& inputs, const Domains& domains) {
  const auto count = static_cast<std::int64_t>(inputs[0].size() / sizeof(T));
  Bytes out(inputs[0].size());
  const bool adds = op == ReduceOp::sum || op == ReduceOp::mean;
  for (std::int64_t i = 0; i < count; ++i) {
    std::optional<Acc> all;
    for (int d = 0; d < domains.count(); ++d) {
      std::optional<Acc> own;
      for (const int rank : domains.members(d)) {
        const Acc next = element<T, Acc>(inputs[static_cast<std::size_t>(rank)], i);
        own = own ? apply(op, *own, next) : adds ? Acc{} + next : next;
      }
      all = all ? apply(op, *all, *own) : own;
    }
    T result;
    if constexpr (std::is_integral_v<T>) {
      result = static_cast<T>(*all);
    } else {
      if (op == ReduceOp::mean) *all /= static_cast<float>(domains.ranks());
      result = from_float<T>(*all);
    }
    std::memcpy(out.data() + static_cast<std::size_t>(i) * sizeof(T), &result, sizeof(T));
  }
  return out;
}

inline Bytes reduced(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                     const Domains& domains) {
  switch (dtype) {
    case Dtype::bf16: return reduced_as<Bf16, float>(op, inputs, domains);
    case Dtype::f16: return reduced_as<Fp16, float>(op, inputs, domains);
    case Dtype::i32: return reduced_as<std::int32_t, std::uint64_t>(op, inputs, domains);
    case Dtype::i64: return reduced_as<std::int64_t, std::uint64_t>(op, inputs, domains);
    case Dtype::u8: return reduced_as<std::uint8_t, std::uint64_t>(op, inputs, domains);
    default: return reduced_as<float, float>(op, inputs, domains);
  }
}

template <class T>
std::int64_t first_difference(const Bytes& a, const Bytes& b) {
  for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
    if (std::memcmp(a.data() + i * sizeof(T), b.data() + i * sizeof(T), sizeof(T)) == 0) continue;
    const auto at = static_cast<std::int64_t>(i);
    if constexpr (!std::is_integral_v<T>) {
      if (std::isnan(element<T, float>(a, at)) && std::isnan(element<T, float>(b, at))) continue;
    }
    return at;
  }
  return -1;
}

/// The first element that differs, of as many; −1: none. NaNs are equal.
inline std::int64_t first_difference(Dtype dtype, const Bytes& a, const Bytes& b) {
  if (dtype == Dtype::f32) return first_difference<float>(a, b);
  if (dtype == Dtype::bf16) return first_difference<Bf16>(a, b);
  if (dtype == Dtype::f16) return first_difference<Fp16>(a, b);
  return first_difference<std::uint8_t>(a, b);
}

inline bool same(Dtype dtype, const Bytes& a, const Bytes& b) {
  return a == b || (a.size() == b.size() && first_difference(dtype, a, b) < 0);
}

/// What each rank brings. Drawing it takes longer than most calls that carry it, and fewer elements
/// are the first ones of more, so what was drawn is kept.
inline std::vector<Bytes> inputs_of(Dtype dtype, std::int64_t count, int ranks, unsigned seed) {
  static std::mutex mutex;
  static std::map<std::pair<Dtype, unsigned>, Bytes> drawn;
  const std::scoped_lock lock(mutex);
  const auto bytes = static_cast<std::size_t>(count) * size_of(dtype);
  std::vector<Bytes> all;
  for (int r = 0; r < ranks; ++r) {
    const unsigned own = seed + static_cast<unsigned>(r);
    Bytes& kept = drawn[{dtype, own}];
    if (kept.size() < bytes) kept = random_elements(dtype, count, own);
    all.emplace_back(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(bytes));
  }
  return all;
}

inline Bytes part(const Bytes& bytes, std::size_t first, std::size_t count) {
  const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(first);
  return {at, at + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace ferry::host::test
