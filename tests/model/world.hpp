// What the model tests of all protocols share: ranks with symmetric memory in the arena, a reach to
// each other by memory or by network, a watch whose deadline the explorer sets off, and the checks.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "explorer.hpp"
#include "network.hpp"
#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::model {

using protocol::Generation;
using protocol::Place;
using protocol::Status;

inline constexpr int kMaxRanks = 16;

/// The explorer decides when a time slice ends; here that is the deadline.
struct DeadlineAnywhere {
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() {
    Status status;
    status.code = Status::Code::kDeadline;
    return status;
  }
};

/// What a test explores.
struct Case {
  int ranks = 2;
  Generation generations = 3;
  bool network = false;
  Bounds bounds{};
  std::uint64_t words = 2;  ///< of a message: a network carries each on its own
  int domain_size = 0;      ///< > 0: of a network: so many neighbours reach each other by memory
};

/// Weakened traits of everything that every protocol stands on. `Publish`: how memory publishes;
/// `Counted`: the network's bookkeeping.
struct Sound {
  using Publish = protocol::PublishTraits;
  using Counted = protocol::CountedTraits;
};
struct RelaxedPublish : Sound {
  struct Publish {
    static constexpr protocol::order kPublish = protocol::order::relaxed;
  };
};

/// The ranks' memory and outcomes. `Base`: Sound, or a mutant of it.
template <class Base>
class World {
 public:
  using Net = Network<typename Base::Counted>;

  World(Explorer& explorer, const Case& what, std::vector<protocol::Channel> channels,
        int fibers = 0)
      : explorer_(explorer),
        case_(what),
        fibers_(fibers > 0 ? fibers : what.ranks),
        net_(what.ranks, fibers_, std::move(channels)) {}

  class Reach {
   public:
    Reach(World& world, int self) : world_(&world), self_(self) {}
    void write(int peer, Place to, const void* from, std::size_t bytes, std::uint64_t tag) {
      std::byte* const at = world_->address(peer, to);
      if (by_network(peer)) {
        world_->net_.write(self_, peer, at, from, bytes, tag);
      } else {
        protocol::write_bytes(at, from, bytes);
      }
    }
    void publish(int peer, const protocol::Signal& signal) {
      auto* const word = reinterpret_cast<std::uint64_t*>(world_->address(peer, signal.flag));
      if (by_network(peer)) {
        world_->net_.publish(self_, peer, word, signal);
      } else {
        protocol::publish_in_memory<typename Base::Publish>(protocol::Flag{word}, signal.value);
      }
    }
    void notify(int peer, Place flag, std::uint64_t value) {
      auto* const word = reinterpret_cast<std::uint64_t*>(world_->address(peer, flag));
      protocol::publish_in_memory<typename Base::Publish>(protocol::Flag{word}, value);
    }

   private:
    bool by_network(int peer) const {
      const int size = world_->case_.domain_size;
      const bool together = size > 0 ? peer / size == self_ / size : peer == self_;
      return world_->case_.network && !together;
    }
    World* world_;
    int self_;
  };

  Reach reach(int self) { return Reach(*this, self); }

  /// Takes memory at the same place in every rank and names it.
  Place take(std::uint64_t bytes, const char* what) {
    const Place place{0, taken_};
    taken_ += (bytes + 7) / 8 * 8;
    named_.push_back({place, bytes, what, false});
    return place;
  }
  protocol::FlagLayout take_flags(const char* what) {
    protocol::FlagLayout layout;
    layout.ranks = case_.ranks;
    layout.stride = 8;
    layout.flags = take(layout.bytes(), what);
    named_.back().flags = true;
    return layout;
  }
  std::byte* address(int rank, Place place) {
    return explorer_.arena() + static_cast<std::size_t>(rank) * kArenaBytes / kMaxRanks +
           place.offset;
  }
  const Case& what() const { return case_; }
  Explorer& explorer() { return explorer_; }

  /// Explores `body(fiber)`, which returns its last status. Checks that nobody gives up unless a
  /// slice ended early. With a seed: random executions instead of all.
  template <class Body>
  Report run(Body body, std::uint64_t seed = 0) {
    Scenario scenario = scenario_for(body);
    return seed == 0 ? explorer_.explore(scenario, case_.bounds)
                     : explorer_.sample(scenario, case_.bounds, seed);
  }

  /// The same with a rank that never comes; `finish` looks at the outcomes.
  template <class Body, class Finish>
  Report run_without_one(Body body, Finish finish) {
    Scenario scenario = scenario_for(body);
    scenario.silent_rank = true;
    scenario.finish = [&] { finish(outcomes_); };
    return explorer_.explore(scenario, case_.bounds);
  }

 private:
  template <class Body>
  Scenario scenario_for(Body& body) {
    Scenario scenario;
    scenario.fibers = fibers_;
    scenario.setup = [this] { reset(); };
    scenario.body = [this, &body](int rank) {
      outcomes_[static_cast<std::size_t>(rank)] = body(rank);
    };
    scenario.finish = [this] {
      if (explorer_.slices_used()) return;  // then some ranks may have given up
      for (int fiber = 0; fiber < fibers_; ++fiber) {
        if (!outcomes_[static_cast<std::size_t>(fiber)].ok())
          explorer_.fail("gave up without cause");
      }
    };
    scenario.wire = case_.network ? &net_ : nullptr;
    return scenario;
  }

  void reset() {
    net_.reset();
    outcomes_.fill({});
    for (int rank = 0; rank < case_.ranks; ++rank) {
      for (const Named& it : named_) {
        explorer_.name(address(rank, it.place), it.bytes,
                       std::string(it.what) + "@" + std::to_string(rank));
        if (it.flags && fibers_ == case_.ranks) {
          explorer_.only_reader(address(rank, it.place), it.bytes, rank);
        }
      }
    }
  }

  struct Named {
    Place place;
    std::uint64_t bytes;
    const char* what;
    bool flags = false;
  };
  Explorer& explorer_;
  Case case_;
  int fibers_;
  Net net_;
  std::uint64_t taken_ = 0;
  std::vector<Named> named_;
  std::array<Status, kMaxRanks> outcomes_{};
};

/// What rank `source` sends rank `target` in a generation: up to two words, different everywhere.
using Payload = std::array<std::uint64_t, 2>;
inline Payload payload(int source, int target, Generation generation) {
  const std::uint64_t base = static_cast<std::uint64_t>(source) * 100'000 +
                             static_cast<std::uint64_t>(target) * 1'000 + generation * 10;
  return {base + 1, base + 2};
}

/// Reads a payload of `words` from shared memory; anything unexpected ends the execution.
inline void expect_payload(const std::byte* at, const Payload& expected, std::uint64_t words) {
  Payload got{};
  protocol::read_bytes(got.data(), at, words * sizeof(got[0]));
  for (std::size_t i = 0; i < words; ++i) {
    if (got[i] != expected[i]) Explorer::current().fail("wrong data on ", at);
  }
}

/// An order weakened, a comparison broken, a flag not awaited: mutants of every wait.
struct RelaxedAwait : protocol::AwaitTraits {
  static constexpr protocol::order kLoad = protocol::order::relaxed;
};
struct EqualAwait : protocol::AwaitTraits {
  static constexpr bool reached(std::uint64_t seen, std::uint64_t wanted) { return seen == wanted; }
};
struct PreviousAwait : protocol::AwaitTraits {
  static constexpr bool reached(std::uint64_t seen, std::uint64_t wanted) {
    return seen + 1 >= wanted;
  }
};
struct AnyAwait : protocol::AwaitTraits {  // "something came": forgets the generation
  static constexpr bool reached(std::uint64_t seen, std::uint64_t) { return seen > 0; }
};
struct NotTheLastAwait : protocol::AwaitTraits {
  static constexpr int awaited(int ranks) { return ranks - 1; }
};
template <class Traits, class NewAwait>
struct WithAwait : Traits {
  using Await = NewAwait;
};

/// Mutants of the network's bookkeeping.
struct CountTogether : Sound {
  struct Counted : protocol::CountedTraits {
    static constexpr std::uint64_t counter(std::uint64_t) { return 0; }
  };
};
struct CountNothing : Sound {
  struct Counted : protocol::CountedTraits {
    static constexpr bool complete(std::uint64_t, std::uint64_t) { return true; }
  };
};
struct CountFirstPiece : Sound {
  struct Counted : protocol::CountedTraits {
    static constexpr bool complete(std::uint64_t landed, std::uint64_t bytes) {
      return landed > 0 || bytes == 0;
    }
  };
};
struct AnyOrder : Sound {
  struct Counted : protocol::CountedTraits {
    static constexpr bool kInOrder = false;
  };
};

/// Everything within the bounds was explored and nothing was wrong.
inline void expect_sound(const std::string& what, const Report& report) {
  std::printf("  %-44s %8llu executions %8llu states\n", what.c_str(),
              static_cast<unsigned long long>(report.executions),
              static_cast<unsigned long long>(report.states));
  EXPECT_TRUE(report.passed) << what << ": " << report.failure << "\n" << report.schedule;
  EXPECT_TRUE(report.complete || !report.passed) << what << ": the limit was reached";
}

/// The mutant was found out.
inline void expect_caught(const std::string& what, const Report& report) {
  std::printf("  %-44s %8llu executions: %s\n", what.c_str(),
              static_cast<unsigned long long>(report.executions),
              report.passed ? "NOT CAUGHT" : report.failure.c_str());
  EXPECT_FALSE(report.passed) << what << ": the explorer did not catch this mutant";
}

}  // namespace ferry::model
