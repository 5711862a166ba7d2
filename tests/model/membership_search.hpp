// A search through all that may happen to ranks that run protocol/membership.hpp: orders of events,
// as explorer.hpp takes orders of loads. Random walks have no bound on what is late.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "membership_world.hpp"

namespace ferry::model {

struct MembershipReport {
  std::string failure;  ///< empty: none
  std::vector<std::string> events;
  std::uint64_t states = 0;
  bool complete = false;
};

template <class Traits = SmallTraits>
class MembershipSearch {
 public:
  explicit MembershipSearch(const MembershipCase& what) : case_(what), world_(what) {}

  MembershipReport run() {
    const State first = world_.start();
    if (case_.walks > 0) {
      for (std::uint64_t seed = 1; seed <= case_.walks && !failed(); ++seed) walk(first, seed);
      report_.complete = true;
    } else {
      report_.complete = search(first) || failed();
    }
    report_.failure = world_.failure();
    return report_;
  }

 private:
  using World = MembershipWorld<Traits>;
  using State = typename World::State;

  static std::uint64_t hash(const State& s) {
    static_assert(sizeof(State) % 8 == 0);
    std::uint64_t h = 0x9e3779b97f4a7c15ull;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&s);
    for (std::size_t i = 0; i < sizeof(State); i += 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      h = (std::rotl(h, 5) ^ word) * 0xbf58476d1ce4e5b9ull;
      h ^= h >> 31;
    }
    return h;
  }

  bool failed() const { return !world_.failure().empty(); }
  bool reached(const State& s, std::uint64_t h) {
    world_.check(s, h % kProgressEvery == 0);
    return !failed();
  }

  /// Every state that can be reached, each once.
  bool search(const State& first) {
    struct Frame {
      State state;
      int next = 0;
      int event = -1;
    };
    std::unordered_set<std::uint64_t> visited;
    std::vector<Frame> stack;
    stack.push_back({first, 0, -1});
    while (!stack.empty()) {
      const std::size_t top = stack.size() - 1;
      if (stack[top].next == world_.events()) {
        stack.pop_back();
        continue;
      }
      const int event = stack[top].next++;
      if (!world_.may(stack[top].state, event)) continue;
      State s = stack[top].state;
      if (!world_.apply(s, event) && !failed()) continue;
      const std::uint64_t h = hash(s);
      const bool fresh = visited.insert(h).second;
      if (failed() || (fresh && !reached(s, h))) {
        for (const Frame& frame : stack) {
          if (frame.event >= 0) report_.events.push_back(world_.name(frame.event));
        }
        report_.events.push_back(world_.name(event));
        return true;
      }
      if (!fresh) continue;
      report_.states = visited.size();
      if (report_.states > case_.most) return false;
      stack.push_back({s, 0, event});
    }
    return true;
  }

  void walk(const State& first, std::uint64_t seed) {
    std::uint64_t random = seed * 0x9e3779b97f4a7c15ull;
    State s = first;
    std::vector<std::string> events_so_far;
    for (int length = 0; length < 150; ++length) {
      int tries = 0;
      for (;; ++tries) {
        if (tries == 100 * world_.events()) return;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        const int event = static_cast<int>(random % static_cast<std::uint64_t>(world_.events()));
        // Rare events: most of a walk is statements that arrive.
        const int kind = event / (World::kProcesses * World::kProcesses);
        if (!world_.may(s, event)) continue;
        if (kind != 0 && kind != 4 && kind < 11 && random >> 32 & 7) continue;
        State next = s;
        if (!world_.apply(next, event)) continue;
        events_so_far.push_back(world_.name(event));
        s = next;
        break;
      }
      constexpr int kRoom = 4;  // for what the check of progress adds
      if (world_.newest_epoch(s) + kRoom > World::kEpochs) return;
      ++report_.states;
      if (failed() || !reached(s, length == 149 || length % 37 == 36 ? 0 : 1)) {
        report_.events = events_so_far;
        return;
      }
    }
  }

  static constexpr std::uint64_t kProgressEvery = 8;
  MembershipCase case_;
  World world_;
  MembershipReport report_{};
};

}  // namespace ferry::model
