// How the blocks of a kernel agree on a header that may not come
// (cuda/kernels/latency/verdict.cuh), told once more for the explorer: blocks that find all words
// pass, others halt, the leading block judges.
#include "hash.hpp"
#include "world.hpp"

namespace ferry::model::device_verdict_model {
namespace {

using protocol::Flag;
using protocol::order;

constexpr int kWords = 2;  // of the header
constexpr int kHaltedShift = 32;

struct VerdictTraits {
  /// Block 0 judges when every block has passed or halted: nobody finds out by itself any more.
  static constexpr bool kAwaitsBlocks = true;
  /// All is here if some block has found all.
  static constexpr bool kTrustsPassed = true;
  /// Once judged the words are waited for, suspicion or not: who has found them may know before.
  static constexpr bool kWaitsOnceJudged = true;
  static constexpr order kJudges = order::release;
  static constexpr order kHears = order::acquire;
};

/// The memory of one rank: what its source writes, and the words of its blocks.
struct VerdictPlaces {
  std::array<std::array<Place, kWords>, 2> header;  ///< for even and odd generations
  Place counted;  ///< blocks that have passed, and above kHaltedShift those that have halted
  Place suspected, judged, left;
  Place verdict, votes;
};

/// A counter that blocks raise.
void count(Flag counter, std::uint64_t by, order o) {
  std::uint64_t seen = counter.load(order::relaxed);
  while (!counter.compare_exchange(seen, seen + by, o)) {
  }
}

template <class Traits>
class Block {
 public:
  Block(World<Sound>& world, const VerdictPlaces& at, int block, int blocks)
      : world_(world), at_(at), block_(block), blocks_(static_cast<std::uint64_t>(blocks)) {}

  Status run() {
    for (generation_ = 1; generation_ <= world_.what().generations; ++generation_) {
      judged_ = sure_ = false;
      world_.explorer().checkpoint(mix(generation_, passed_before_));
      const bool here = find_words() || hear_verdict();
      const std::uint64_t vote = generation_ << 1 | (here ? 1 : 0);
      protocol::write_bytes(vote_of(block_), &vote, sizeof vote);
      leave();
      if (block_ != 0) continue;
      for (int other = 1; other < static_cast<int>(blocks_); ++other) {
        expect_payload(vote_of(other), {vote}, 1);
      }
    }
    return {};
  }

  // The watch of a wait for a word of the header. A check may find a suspicion, and the leading
  // deadline be over; once judged, both are old.
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 0; }
  Status check() {
    if (sure_) return {};
    const Status halts{Status::Code::kInterrupted, -1, 0, 0};
    if (word(at_.suspected).load(order::relaxed) == generation_) return halts;
    if (block_ != 0) return {};
    word(at_.suspected).store(generation_, order::relaxed);
    return halts;
  }

 private:
  Flag word(Place place) {
    return Flag{reinterpret_cast<std::uint64_t*>(world_.address(0, place))};
  }
  std::byte* vote_of(int block) {
    return world_.address(
        0, at_.votes.at(8 * (generation_ % 2 * blocks_ + static_cast<std::uint64_t>(block))));
  }
  /// The end of the kernel: the next one comes after all blocks of this.
  void leave() {
    count(word(at_.left), 1, order::release);
    passed_before_ += blocks_;
    DeadlineNever never;
    const std::uint64_t all = blocks_ * generation_;
    (void)word(at_.left).wait_until([all](std::uint64_t seen) { return seen >= all; }, never);
  }

  /// False: it halts.
  bool find_words() {
    for (const Place& place : at_.header[generation_ % 2]) {
      const Generation g = generation_;
      if (!word(place)
               .wait_until([g](std::uint64_t seen) { return seen == g; }, *this, order::relaxed)
               .ok()) {
        return false;
      }
    }
    if (!judged_) count(word(at_.counted), 1, order::relaxed);
    return true;
  }
  bool hear_verdict() {
    count(word(at_.counted), std::uint64_t{1} << kHaltedShift, order::release);
    if (block_ == 0) {
      judge();
    } else {
      DeadlineNever never;
      const Generation g = generation_;
      (void)word(at_.judged)
          .wait_until([g](std::uint64_t seen) { return seen == g; }, never, Traits::kHears);
    }
    std::uint64_t verdict = 0;
    protocol::read_bytes(&verdict, world_.address(0, at_.verdict), sizeof verdict);
    if (verdict >> 1 != generation_) Explorer::current().fail("an older verdict");
    if ((verdict & 1) == 0) return false;
    judged_ = true;
    sure_ = Traits::kWaitsOnceJudged;
    return find_words();
  }
  void judge() {
    DeadlineNever never;
    const auto ended = [this](std::uint64_t seen) {
      return passed_in(seen) + (seen >> kHaltedShift) == blocks_ || !Traits::kAwaitsBlocks;
    };
    const std::uint64_t seen = word(at_.counted).wait_until(ended, never).seen;
    const std::uint64_t passed = passed_in(seen), halted = seen >> kHaltedShift;
    bool here = true;
    for (int w = 0; w < kWords && !(Traits::kTrustsPassed && passed > 0); ++w) {
      here &= word(at_.header[generation_ % 2][static_cast<std::size_t>(w)]).load(order::relaxed) ==
              generation_;
    }
    const std::uint64_t verdict = generation_ << 1 | (here ? 1 : 0);
    protocol::write_bytes(world_.address(0, at_.verdict), &verdict, sizeof verdict);
    word(at_.counted).store(passed_before_ + passed, order::relaxed);
    passed_before_ -= halted;  // they do not pass
    word(at_.judged).store(generation_, Traits::kJudges);
  }

  struct DeadlineNever {
    std::uint64_t spin_ns() const { return 0; }
    std::uint64_t slice_ns() const { return 0; }
    Status check() { return {}; }
  };
  /// Of this call.
  std::uint64_t passed_in(std::uint64_t seen) const {
    return (seen & ((std::uint64_t{1} << kHaltedShift) - 1)) - passed_before_;
  }

  World<Sound>& world_;
  const VerdictPlaces& at_;
  int block_;
  std::uint64_t blocks_;
  std::uint64_t passed_before_ = 0;  ///< as in the words: the leading block's
  Generation generation_ = 0;
  bool judged_ = false, sure_ = false;
};

/// `blocks` of one rank, and its source, which writes its words at any time.
template <class Traits = VerdictTraits>
Report verdict(int blocks, Generation generations, const Bounds& bounds, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Sound> world(explorer, {1, generations, false, bounds}, {}, blocks + 1);
  VerdictPlaces at;
  for (auto& words : at.header) {
    for (Place& place : words) place = world.take(8, "header");
  }
  at.counted = world.take(8, "counted");
  at.suspected = world.take(8, "suspected");
  at.judged = world.take(8, "judged");
  at.left = world.take(8, "left");
  at.verdict = world.take(8, "verdict");
  at.votes = world.take(2 * 8 * static_cast<std::uint64_t>(blocks), "votes");
  return world.run(
      [&](int fiber) {
        if (fiber < blocks) return Block<Traits>(world, at, fiber, blocks).run();
        for (Generation g = 1; g <= generations; ++g) {
          for (const Place& place : at.header[g % 2]) {
            Flag{reinterpret_cast<std::uint64_t*>(world.address(0, place))}.store(g,
                                                                                  order::relaxed);
          }
        }
        return Status{};
      },
      seed);
}

const Bounds kLate{.preemptions = 2, .slices = 2};

TEST(DeviceVerdictModel, IsSound) {
  expect_sound("verdict, 2 blocks", verdict(2, 1, {.preemptions = 3, .slices = 3}));
  expect_sound("verdict, 2 blocks, 2 generations", verdict(2, 2, kLate));
  expect_sound("verdict, 3 blocks", verdict(3, 1, {.preemptions = 1, .slices = 2}));
}

TEST(DeviceVerdictModel, RandomSchedulesOfManyBlocks) {
  const Report report =
      verdict(6, 2, {.preemptions = 40, .slices = 6, .executions = 2000}, 20261122);
  EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
}

struct JudgesAlone : VerdictTraits {
  static constexpr bool kAwaitsBlocks = false;
};
struct PollsForItself : VerdictTraits {
  static constexpr bool kTrustsPassed = false;
};
struct HaltsOnceJudged : VerdictTraits {
  static constexpr bool kWaitsOnceJudged = false;
};
struct RelaxedVerdict : VerdictTraits {
  static constexpr order kJudges = order::relaxed;
};
struct RelaxedHearing : VerdictTraits {
  static constexpr order kHears = order::relaxed;
};

TEST(DeviceVerdictModel, MutantsAreCaught) {
  expect_caught("verdict: judges alone", verdict<JudgesAlone>(2, 1, kLate));
  expect_caught("verdict: does not ask who has passed", verdict<PollsForItself>(2, 1, kLate));
  expect_caught("verdict: halts once judged", verdict<HaltsOnceJudged>(2, 1, kLate));
  expect_caught("verdict: relaxed", verdict<RelaxedVerdict>(2, 1, kLate));
  expect_caught("verdict: heard relaxed", verdict<RelaxedHearing>(2, 1, kLate));
}

}  // namespace
}  // namespace ferry::model::device_verdict_model
