// Copies of experts (docs/balance.md): rank 0 owns two experts, of two parameters each, of which
// every other rank copies one, another one in each batch. Parameters are read where they lie,
// between two meetings; gradients of copies go the other way; then the owner changes its experts. A
// deadline anywhere leaves some ranks with a part of a copy.
#include "core/experts/copy_slots.hpp"
#include "protocol/chunks.hpp"
#include "world.hpp"

namespace ferry::model::copies_model {
namespace {

using protocol::Channel;
using protocol::Chunks;
using protocol::ChunkTraits;
using protocol::FlagLayout;

constexpr std::uint64_t kParameters = 2, kCopiedExperts = 2;
constexpr std::uint64_t kCopyWord = sizeof(std::uint64_t);

/// What the steps around copies rely on, as parameters.
struct CopyTraits {
  static constexpr bool kMeetsBeforeReading = true;
  static constexpr bool kMeetsBeforeChanging = true;
  static constexpr bool kAwaitsBeforeUse = true;
  static constexpr bool kMeetsBeforeSumming = true;
  static constexpr bool kMeetsAfterSumming = true;
};

enum class Kind {
  trains,   // gradients go back, and the experts change
  changes,  // the experts change by themselves
  serves,   // nothing changes: copies of the last batch are valid
};

/// Of a parameter of an expert.
constexpr std::uint64_t weight(std::uint64_t expert, std::uint64_t parameter, Generation batch) {
  return batch * 100 + expert * 10 + parameter + 1;
}

template <class Steps, class Slots, class Base>
class CopiedExperts {
 public:
  static Report explore(const Case& what, Kind kind) {
    Explorer explorer;
    World<Base> world(explorer, what, {Channel::kChunk});
    CopiedExperts scene(world, kind);
    return world.run([&](int rank) { return scene.body(rank); });
  }

 private:
  CopiedExperts(World<Base>& world, Kind kind)
      : world_(world),
        kind_(kind),
        chunks_(world.take_flags("chunks")),
        experts_(world.take(kCopiedExperts * kParameters * kCopyWord, "experts")),
        slot_(world.take(kParameters * kCopyWord, "slot")),
        grads_(world.take(kParameters * kCopyWord, "gradients")) {}

  struct Rank {
    int self;
    Chunks<ChunkTraits> chunks;
    typename World<Base>::Reach reach;
    CopySlots<Slots> slots{1};
    std::uint64_t met = 0;
  };

  Status body(int self) {
    Rank rank{self, Chunks<ChunkTraits>(chunks_, self, world_.address(self, chunks_.flags)),
              world_.reach(self)};
    Status status;
    for (Generation batch = 1; status.ok() && batch <= world_.what().generations; ++batch) {
      world_.explorer().checkpoint(batch);
      status = compute(rank, batch);
    }
    return status;
  }

  Status compute(Rank& rank, Generation batch) {
    const std::uint64_t expert = batch % kCopiedExperts;
    const Generation version = kind_ == Kind::serves ? 1 : batch;
    if (version == batch) {
      if (rank.self == 0) change(batch);
      rank.slots.forget([](std::int32_t) { return true; });
    }
    const Status status = fetch(rank, expert);
    if (status.ok()) rank.slots.fetched();
    if (rank.self != 0 && (status.ok() || !Steps::kAwaitsBeforeUse)) use(rank, expert, version);
    // A rank that goes on by itself plans from what it believes its slot to hold.
    if (!status.ok() && rank.self != 0 && rank.slots.held()[0] >= 0) {
      use(rank, static_cast<std::uint64_t>(rank.slots.held()[0]), version);
    }
    return status.ok() && kind_ == Kind::trains ? sum(rank, batch) : status;
  }

  void change(Generation batch) {
    for (std::uint64_t e = 0; e < kCopiedExperts; ++e) {
      for (std::uint64_t p = 0; p < kParameters; ++p) {
        store(0, experts_, at(e, p), weight(e, p, batch));
      }
    }
  }

  Status fetch(Rank& rank, std::uint64_t expert) {
    const auto wanted = static_cast<std::int32_t>(expert);
    rank.slots.plan({&wanted, 1});
    rank.slots.fetching();
    Status status;
    for (std::uint64_t p = 0; status.ok() && p < kParameters; ++p) {
      if (Steps::kMeetsBeforeReading) status = meet(rank);
      if (!status.ok()) return status;
      if (rank.self != 0) store(rank.self, slot_, p, load(0, experts_, at(expert, p)));
      if (Steps::kMeetsBeforeChanging) status = meet(rank);
    }
    return status;
  }

  /// The copy is whole and of this version.
  void use(Rank& rank, std::uint64_t expert, Generation version) {
    for (std::uint64_t p = 0; p < kParameters; ++p) {
      if (load(rank.self, slot_, p) != weight(expert, p, version)) {
        world_.explorer().fail("wrong copy on ", world_.address(rank.self, slot_));
      }
    }
  }

  Status sum(Rank& rank, Generation batch) {
    if (rank.self != 0) {
      for (std::uint64_t p = 0; p < kParameters; ++p) {
        store(rank.self, grads_, p, grad(rank.self, p, batch));
      }
    }
    Status status;
    if (Steps::kMeetsBeforeSumming) status = meet(rank);
    if (!status.ok()) return status;
    for (std::uint64_t p = 0; rank.self == 0 && p < kParameters; ++p) {
      for (int r = 1; r < world_.what().ranks; ++r) {
        if (load(r, grads_, p) != grad(r, p, batch)) {
          world_.explorer().fail("wrong gradient on ", world_.address(r, grads_));
        }
      }
    }
    if (Steps::kMeetsAfterSumming) status = meet(rank);
    if (status.ok() && rank.self != 0) store(rank.self, grads_, 0, 0);  // the memory serves others
    return status;
  }

  static std::uint64_t grad(int rank, std::uint64_t parameter, Generation batch) {
    return batch * 1000 + static_cast<std::uint64_t>(rank) * 10 + parameter;
  }

  Status meet(Rank& rank) {
    ++rank.met;
    for (int r = 0; r < world_.what().ranks; ++r) {
      if (r != rank.self) rank.chunks.send(rank.reach, r, rank.met, 0);
    }
    for (int r = 0; r < world_.what().ranks; ++r) {
      DeadlineAnywhere watch;
      if (r == rank.self) continue;
      if (Status status = rank.chunks.await(r, rank.met, watch); !status.ok()) return status;
    }
    world_.explorer().checkpoint(1000 + rank.met);
    return {};
  }

  static std::uint64_t at(std::uint64_t expert, std::uint64_t parameter) {
    return expert * kParameters + parameter;
  }
  void store(int rank, Place place, std::uint64_t word, std::uint64_t value) {
    protocol::write(
        reinterpret_cast<std::uint64_t*>(world_.address(rank, place.at(word * kCopyWord))), value);
  }
  std::uint64_t load(int rank, Place place, std::uint64_t word) {
    return protocol::read(
        reinterpret_cast<const std::uint64_t*>(world_.address(rank, place.at(word * kCopyWord))));
  }

  World<Base>& world_;
  Kind kind_;
  FlagLayout chunks_;
  Place experts_;
  Place slot_;
  Place grads_;
};

template <class Steps = CopyTraits, class Slots = CopySlotsTraits, class Base = Sound>
Report copies(const Case& what, Kind kind) {
  return CopiedExperts<Steps, Slots, Base>::explore(what, kind);
}

TEST(CopiesModel, AreSound) {
  expect_sound("copies, 2 ranks, 2 batches, 1 preemption",
               copies({2, 2, false, {1, 0}}, Kind::trains));
  expect_sound("copies, 3 ranks, 1 batch", copies({3, 1, false, {0, 0}}, Kind::trains));
  expect_sound("copies, 2 ranks, 3 batches, no gradients",
               copies({2, 3, false, {1, 0}}, Kind::changes));
  expect_sound("copies, 2 ranks, 2 batches, 1 deadline",
               copies({2, 2, false, {1, 1}}, Kind::trains));
  expect_sound("copies, 2 ranks, 3 batches, nothing changes, 1 deadline",
               copies({2, 3, false, {1, 1}}, Kind::serves));
}

struct ReadsAtOnce : CopyTraits {
  static constexpr bool kMeetsBeforeReading = false;
};
struct ChangesAtOnce : CopyTraits {
  static constexpr bool kMeetsBeforeChanging = false;
};
struct UsesAtOnce : CopyTraits {
  static constexpr bool kAwaitsBeforeUse = false;
};
struct SumsAtOnce : CopyTraits {
  static constexpr bool kMeetsBeforeSumming = false;
};
struct LeavesAtOnce : CopyTraits {
  static constexpr bool kMeetsAfterSumming = false;
};
struct ForgetsLate : CopySlotsTraits {
  static constexpr bool kForgetsFirst = false;
};
struct CountsEarly : CopySlotsTraits {
  static constexpr bool kCountsWhenFetched = false;
};

TEST(CopiesModel, MutantsAreCaught) {
  const Case two{2, 2, false, {1, 0}}, late{2, 2, false, {1, 1}};
  expect_caught("copies: read at once", copies<ReadsAtOnce>(two, Kind::trains));
  expect_caught("copies: changed at once", copies<ChangesAtOnce>(two, Kind::changes));
  expect_caught("copies: used at once", copies<UsesAtOnce>(late, Kind::trains));
  expect_caught("copies: summed at once", copies<SumsAtOnce>(two, Kind::trains));
  expect_caught("copies: gradients left at once", copies<LeavesAtOnce>(two, Kind::trains));
  expect_caught("copies: counted before they came",
                copies<CopyTraits, CountsEarly>(late, Kind::trains));
  expect_caught("copies: forgotten too late", copies<CopyTraits, ForgetsLate>(late, Kind::serves));
  expect_caught("copies: relaxed publish",
                copies<CopyTraits, CopySlotsTraits, RelaxedPublish>(two, Kind::trains));
}

}  // namespace
}  // namespace ferry::model::copies_model
