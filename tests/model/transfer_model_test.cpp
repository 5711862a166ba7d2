// send and recv between two GPUs (cuda/kernels/collectives/transfer.hpp), told once more for the
// explorer. Two streams of the sender, each with a tag of its own, share one place for offers; the
// kernel that receives tag 0 has two blocks.
#include "world.hpp"

namespace ferry::model::transfer_model {
namespace {

using protocol::Flag;
using protocol::order;

constexpr int kSender = 0, kReceiver = 1;  // ranks
constexpr int kBlocks[] = {2, 1};          // of the kernel that receives each tag
constexpr int kReceiving = 2;              // fibers from here on; before: a send stream each
constexpr int kFibers = kReceiving + 3;

struct TransferTraits {
  /// Of the words before the number, which lie behind a fence: who sees one of a new offer sees
  /// that the place was cleared.
  static constexpr order kDescribes = order::release;
  static constexpr order kOffers = order::release;
  static constexpr order kPolls = order::acquire;
  static constexpr order kAnswers = order::release;
  static constexpr order kHears = order::acquire;
  static constexpr order kArrives = order::release;
  static constexpr bool kAwaitsPlace = true;
  static constexpr bool kReadsTwice = true;
  static constexpr bool kClears = true;
  static constexpr bool kAnswersFirst = false;  ///< before the place is cleared
  static constexpr bool kLastAnswers = true;    ///< else the first block
};

struct WithoutDeadline {
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() { return {}; }
};

template <class Traits = TransferTraits>
class Transfers {
 public:
  /// `rounds` transfers of each tag; those of tag t have the numbers 2 i + t + 1.
  static Report explore(Generation rounds, const Bounds& bounds) {
    Explorer explorer;
    World<Sound> world(explorer, {2, rounds, false, bounds}, {}, kFibers);
    Transfers scene(world);
    return world.run([&](int fiber) { return scene.body(fiber); });
  }

 private:
  explicit Transfers(World<Sound>& world) : world_(world) {
    number_ = world.take(8, "number");
    tag_ = world.take(8, "tag");
    which_ = world.take(8, "which");
    answer_ = world.take(8, "answer");
    arrived_ = world.take(8, "arrived");
    ended_ = world.take(2 * 8, "ended");
    data_ = world.take(2 * 8, "data");
  }

  Status body(int fiber) {
    for (Generation g = 1; g <= world_.what().generations; ++g) {
      world_.explorer().checkpoint(g);
      if (fiber < kReceiving) {
        send(fiber, g);
      } else {
        const int tag = fiber == kFibers - 1 ? 1 : 0;
        receive(tag, g);
      }
    }
    return {};
  }

  static std::uint64_t number_of(int tag, Generation g) {
    return 2 * g + static_cast<std::uint64_t>(tag) - 1;
  }
  std::byte* data(int tag) {
    return world_.address(kSender, data_.at(static_cast<std::uint64_t>(tag) * 8));
  }

  void send(int tag, Generation g) {
    const std::uint64_t number = number_of(tag, g);
    protocol::write_bytes(data(tag), payload(tag, 0, g).data(), 8);
    if (Traits::kAwaitsPlace) await(word(kSender, answer_), number - 1, order::acquire);
    word(kReceiver, tag_).store(static_cast<std::uint64_t>(tag), Traits::kDescribes);
    word(kReceiver, which_).store(g, Traits::kDescribes);
    word(kReceiver, number_).store(number, Traits::kOffers);
    await(word(kSender, answer_), number, Traits::kHears);
  }

  /// One block of the kernel.
  void receive(int tag, Generation g) {
    const std::uint64_t number = find(tag);
    expect_payload(data(tag), payload(tag, 0, g), 1);
    const int blocks = kBlocks[tag];
    const std::uint64_t before = word(kReceiver, arrived_).fetch_add(1, Traits::kArrives);
    const std::uint64_t answers = Traits::kLastAnswers ? static_cast<std::uint64_t>(blocks) - 1 : 0;
    if (before == answers) {
      (void)word(kReceiver, arrived_).load(order::acquire);
      word(kReceiver, arrived_).store(0, order::relaxed);
      if (Traits::kAnswersFirst) word(kSender, answer_).store(number, Traits::kAnswers);
      if (Traits::kClears) word(kReceiver, number_).store(0, order::relaxed);
      if (!Traits::kAnswersFirst) word(kSender, answer_).store(number, Traits::kAnswers);
    }
    // The next kernel of the stream comes after all blocks of this one.
    const Flag ended = word(kReceiver, ended_.at(static_cast<std::uint64_t>(tag) * 8));
    ended.fetch_add(1, order::release);
    await(ended, static_cast<std::uint64_t>(blocks) * g, order::acquire);
  }

  /// The number of an offer with this tag.
  std::uint64_t find(int tag) {
    const Flag number = word(kReceiver, number_);
    std::uint64_t passed = 0;  // of another tag, or none
    for (;;) {
      const auto another = [&](std::uint64_t seen) { return seen != 0 && seen != passed; };
      WithoutDeadline watch;
      (void)number.wait_until(another, watch, Traits::kPolls);
      const std::uint64_t seen = number.load(Traits::kPolls);
      if (seen == 0) continue;
      const std::uint64_t its = word(kReceiver, tag_).load(order::acquire);
      const std::uint64_t which = word(kReceiver, which_).load(order::acquire);
      if (Traits::kReadsTwice && number.load(order::acquire) != seen) continue;
      passed = seen;
      if (its != static_cast<std::uint64_t>(tag)) continue;
      if (seen != number_of(tag, which)) world_.explorer().fail("an offer of two halves");
      return seen;
    }
  }

  static void await(Flag flag, std::uint64_t wanted, order o) {
    WithoutDeadline watch;
    (void)flag.wait_until([wanted](std::uint64_t seen) { return seen >= wanted; }, watch, o);
  }
  Flag word(int rank, Place place) {
    return Flag{reinterpret_cast<std::uint64_t*>(world_.address(rank, place))};
  }

  World<Sound>& world_;
  Place number_{}, tag_{}, which_{}, answer_{}, arrived_{}, ended_{}, data_{};
};

TEST(TransferModel, IsSoundWhereTwoTagsShareAPlace) {
  expect_sound("transfers, 2 rounds", Transfers<>::explore(2, {.preemptions = 0}));
  expect_sound("transfers, 1 round, 2 preemptions", Transfers<>::explore(1, {.preemptions = 2}));
}

struct DescribesWithoutFence : TransferTraits {
  static constexpr order kDescribes = order::relaxed;
};
struct RelaxedOffer : TransferTraits {
  static constexpr order kOffers = order::relaxed;
};
struct RelaxedPoll : TransferTraits {
  static constexpr order kPolls = order::relaxed;
};
struct RelaxedAnswer : TransferTraits {
  static constexpr order kAnswers = order::relaxed;
};
struct RelaxedHearing : TransferTraits {
  static constexpr order kHears = order::relaxed;
};
struct RelaxedArrival : TransferTraits {
  static constexpr order kArrives = order::relaxed;
};
struct TakesThePlace : TransferTraits {
  static constexpr bool kAwaitsPlace = false;
};
struct ReadsOnce : TransferTraits {
  static constexpr bool kReadsTwice = false;
};
struct LeavesTheOffer : TransferTraits {
  static constexpr bool kClears = false;
};
struct AnswersBeforeItClears : TransferTraits {
  static constexpr bool kAnswersFirst = true;
};
struct FirstBlockAnswers : TransferTraits {
  static constexpr bool kLastAnswers = false;
};

template <class Traits>
Report mutant() {
  return Transfers<Traits>::explore(2, {.preemptions = 2});
}

TEST(TransferModel, MutantsAreCaught) {
  expect_caught("transfers: described without a fence", mutant<DescribesWithoutFence>());
  expect_caught("transfers: offered relaxed", mutant<RelaxedOffer>());
  expect_caught("transfers: polled relaxed", mutant<RelaxedPoll>());
  expect_caught("transfers: answered relaxed", mutant<RelaxedAnswer>());
  expect_caught("transfers: answer heard relaxed", mutant<RelaxedHearing>());
  expect_caught("transfers: blocks arrive relaxed", mutant<RelaxedArrival>());
  expect_caught("transfers: a place that is not answered", mutant<TakesThePlace>());
  expect_caught("transfers: read once", mutant<ReadsOnce>());
  expect_caught("transfers: an offer is not cleared", mutant<LeavesTheOffer>());
  expect_caught("transfers: answered before it is cleared", mutant<AnswersBeforeItClears>());
  expect_caught("transfers: the first block answers", mutant<FirstBlockAnswers>());
}

}  // namespace
}  // namespace ferry::model::transfer_model
