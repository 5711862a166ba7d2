#include "protocol/board.hpp"

#include "world.hpp"

namespace ferry::model::board_model {
namespace {

using protocol::Board;
using protocol::BoardTraits;
using protocol::order;

constexpr std::size_t kWords = 2;

/// Rank 0 publishes texts; the others read twice. What they read is whole, and never older than
/// what they have read.
template <class Traits = BoardTraits>
Report board(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {});
  const Place place = world.take(Board<Traits>::bytes(kWords), "board");
  return world.run([&](int rank) {
    const Board<Traits> texts(world.address(0, place), kWords);
    if (rank == 0) {
      for (std::uint64_t n = 1; n <= what.generations; ++n) {
        const std::array<std::uint64_t, kWords> text{n, n};
        texts.publish(text.data());
      }
      return Status{};
    }
    std::uint64_t last = 0;
    for (int i = 0; i < 2; ++i) {
      std::array<std::uint64_t, kWords> text{};
      const std::uint64_t number = texts.read(text.data());
      if (text[0] != number || text[1] != number) explorer.fail("not a whole text");
      if (number < last) explorer.fail("an older text");
      last = number;
    }
    return Status{};
  });
}

TEST(BoardModel, IsSound) {
  expect_sound("board, 1 reader, 4 texts, 4 preemptions", board({2, 4, false, {4, 0}}));
  expect_sound("board, 2 readers, 3 texts", board({3, 3, false, {2, 0}}));
}

struct OneEntry : BoardTraits {
  static constexpr std::uint64_t kEntries = 1;
};
struct RelaxedWords : BoardTraits {
  static constexpr order kWord = order::relaxed;
};
struct RelaxedNumber : BoardTraits {
  static constexpr order kPublish = order::relaxed;
};
struct ReadOnce : BoardTraits {
  static constexpr bool kReadsAgain = false;
};

TEST(BoardModel, MutantsAreCaught) {
  const Case what{2, 4, false, {3, 0}};
  expect_caught("board: one entry", board<OneEntry>(what));
  expect_caught("board: relaxed words", board<RelaxedWords>(what));
  expect_caught("board: relaxed number", board<RelaxedNumber>(what));
  expect_caught("board: read once", board<ReadOnce>(what));
}

}  // namespace
}  // namespace ferry::model::board_model
