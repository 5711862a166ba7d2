// Pre-announced signals, at their source and at their target, over a network that keeps no order.
#include "protocol/pre_announced.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "protocol/counted_signal.hpp"

namespace ferry::protocol {
namespace {

constexpr std::uint64_t kSeed = 20261122;

struct Few : PreAnnouncedTraits {
  static constexpr std::uint64_t kCount = 5;
  static constexpr std::uint64_t kRegular = 2;
};

/// One source, one target, one flag. What is under way arrives in any order.
template <class Ahead, class Counted>
class Exchange {
 public:
  explicit Exchange(std::uint64_t seed) : random_(seed) {}

  /// What went wrong; empty: nothing.
  std::string run(int signals) {
    for (int i = 0; i < signals && wrong_.empty(); ++i) {
      send();
      while (random_() % 3 != 0) deliver();
    }
    while (!under_way_.empty() && wrong_.empty()) deliver();
    if (wrong_.empty() && released_ != sent_.size()) wrong_ = "the flag waits for ever";
    if (wrong_.empty() && target_.noted(0) != 0) wrong_ = "the target keeps what it has counted";
    return wrong_;
  }
  int by_piece_alone() const { return by_piece_alone_; }

 private:
  using Target = CountedSignals<int, Counted>;
  using Signal = typename Target::Arrived;
  struct Sent {
    std::uint64_t value = 0;
    int pieces = 0;
    int landed = 0;
  };
  struct Item {
    bool is_piece = false;
    std::size_t of = 0;  // of a piece: which of `sent_`
    std::uint64_t tag = 0;
    std::vector<Signal> signals{};
  };

  void send() {
    value_ += random_() % 8 == 0 ? 1 + random_() % 3 : 1;
    const int pieces = random_() % 10 == 0 ? static_cast<int>(random_() % 3) : 1;
    const std::size_t number = sent_.size();
    sent_.push_back({value_, pieces});
    const SignalNumber next = source_.next(value_, pieces == 1);
    const std::uint64_t tag = next.tag ? *next.tag : tags_++;
    for (int i = 0; i < pieces; ++i) under_way_.push_back({true, number, tag});
    if (next.tag) {
      ++by_piece_alone_;
      return;
    }
    under_way_.push_back({.signals = {{.sequence = next.sequence,
                                       .value = value_,
                                       .tag = tag,
                                       .bytes = static_cast<std::uint64_t>(pieces)}}});
    if (source_.ready()) tell();
  }

  void tell() {
    const PreAnnouncement told = source_.tell(tags_);
    tags_ += Ahead::kCount;
    Item item;
    for (std::uint64_t i = 0; i < Ahead::kCount; ++i) {
      item.signals.push_back({.sequence = told.sequence + i,
                              .value = told.value + i * told.step,
                              .tag = told.tag + i,
                              .bytes = 1,
                              .pre_announced = true});
    }
    under_way_.push_back(item);
  }

  void deliver() {
    if (under_way_.empty()) return;
    const auto at = under_way_.begin() + static_cast<long>(random_() % under_way_.size());
    const Item item = *at;
    under_way_.erase(at);
    const auto release = [this](int, const Signal& signal) {
      if (released_ == sent_.size() || sent_[released_].value != signal.value) {
        wrong_ = "a value that was not said, or not yet";
      } else if (sent_[released_].landed < sent_[released_].pieces) {
        wrong_ = "a value before its pieces";
      }
      ++released_;
    };
    if (item.is_piece) {
      ++sent_[item.of].landed;
      target_.piece(0, item.tag, 1, release);
    }
    for (const Signal& signal : item.signals) target_.signal(0, signal, release);
  }

  std::mt19937_64 random_;
  PreAnnouncedSignals<Ahead> source_;
  Target target_{1};
  std::vector<Item> under_way_;
  std::vector<Sent> sent_;
  std::size_t released_ = 0;
  std::uint64_t value_ = 0;
  std::uint64_t tags_ = 1;
  int by_piece_alone_ = 0;
  std::string wrong_;
};

/// What goes wrong first in many exchanges.
template <class Ahead, class Counted = CountedTraits>
std::string wrong_in_many() {
  for (std::uint64_t seed = kSeed; seed < kSeed + 300; ++seed) {
    Exchange<Ahead, Counted> exchange(seed);
    const std::string wrong = exchange.run(200);
    if (!wrong.empty()) return wrong + ", seed " + std::to_string(seed);
  }
  return "";
}

TEST(PreAnnouncedSignals, AnyOrderGivesTheValuesBehindTheirPieces) {
  EXPECT_EQ(wrong_in_many<Few>(), "");
  EXPECT_EQ(wrong_in_many<PreAnnouncedTraits>(), "");
}

TEST(PreAnnouncedSignals, MostOfARegularFlagNeedNoSignal) {
  PreAnnouncedSignals<> source;
  int told = 0, alone = 0;
  for (std::uint64_t value = 1; value <= 1000; ++value) {
    if (source.next(value, true).tag) {
      ++alone;
    } else if (source.ready()) {
      source.tell(value * 1000);
      ++told;
    }
  }
  EXPECT_GT(alone, 960);
  EXPECT_LE(told, 16);
}

TEST(PreAnnouncedSignals, StepsTooLargeForAMessageAreNotTold) {
  PreAnnouncedSignals<> source;
  for (std::uint64_t i = 1; i <= 100; ++i) {
    EXPECT_FALSE(source.next(i << 33, true).tag);
    EXPECT_FALSE(source.ready());
  }
}

struct AnyValue : Few {
  static constexpr bool foreseen(std::uint64_t, std::uint64_t) { return true; }
};
struct ToldTwice : Few {
  static constexpr bool may_tell(std::uint64_t, std::uint64_t) { return true; }
};
struct FirstComes : CountedTraits {
  static constexpr bool replaces(bool, bool) { return false; }
};
struct LastComes : CountedTraits {
  static constexpr bool replaces(bool, bool) { return true; }
};

TEST(PreAnnouncedSignals, MutantsAreCaught) {
  EXPECT_NE((wrong_in_many<AnyValue>()), "");
  EXPECT_NE((wrong_in_many<ToldTwice>()), "");
  EXPECT_NE((wrong_in_many<Few, FirstComes>()), "");
  EXPECT_NE((wrong_in_many<Few, LastComes>()), "");
}

}  // namespace
}  // namespace ferry::protocol
