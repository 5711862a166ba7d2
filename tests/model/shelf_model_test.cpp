#include "protocol/shelf.hpp"

#include "world.hpp"

namespace ferry::model::shelf_model {
namespace {

using protocol::Flag;
using protocol::order;
using protocol::Shelf;
using protocol::ShelfTraits;

constexpr std::size_t kWords = 2;

/// Rank 0 puts versions into the memory of rank 1, each once rank 1 has committed it, and goes on
/// when it is already given up. Rank 1 commits two of them and reads the newest: whole, and not
/// older than the one before the last that it committed.
template <class Traits = ShelfTraits>
Report shelf(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {});
  const Place place = world.take(Shelf<Traits>::bytes(kWords * 8), "shelf");
  const Place put = world.take(8, "put");
  const Place committed = world.take(8, "committed");
  return world.run([&](int rank) {
    const Shelf<Traits> there(world.address(1, place), kWords * 8);
    const Flag puts{reinterpret_cast<std::uint64_t*>(world.address(1, put))};
    const Flag commits{reinterpret_cast<std::uint64_t*>(world.address(0, committed))};
    DeadlineAnywhere watch;
    for (std::uint64_t n = 1; n <= what.generations; ++n) {
      if (rank == 1) {
        commits.store(n, order::release);
        if (n == what.generations) break;  // from here on rank 0 is late
        const Status status = puts.wait_until([n](std::uint64_t seen) { return seen >= n; }, watch);
        if (!status.ok()) return status;
        continue;
      }
      const Status status =
          commits.wait_until([n](std::uint64_t seen) { return seen >= n; }, watch);
      if (!status.ok()) return status;
      auto* words = reinterpret_cast<std::uint64_t*>(there.begin());
      for (std::size_t i = 0; i < kWords; ++i) protocol::write(words + i, n);
      there.publish(n);
      puts.store(n, order::release);
    }
    if (rank == 0) return Status{};
    const std::uint64_t newest = there.newest();
    if (newest + 1 < what.generations) explorer.fail("an older version");
    const auto* words = reinterpret_cast<const std::uint64_t*>(there.find(newest));
    if (newest == 0) return Status{};
    if (words == nullptr) {
      explorer.fail("no version");
      return Status{};
    }
    for (std::size_t i = 0; i < kWords; ++i) {
      if (protocol::read(words + i) != newest) explorer.fail("not a whole version");
    }
    return Status{};
  });
}

TEST(ShelfModel, IsSound) {
  expect_sound("shelf, 3 versions", shelf({2, 3, false, {3, 0}}));
  expect_sound("shelf, 4 versions", shelf({2, 4, false, {3, 0}}));
}

struct OneEntry : ShelfTraits {
  static constexpr std::uint64_t kEntries = 1;
};
struct RelaxedNumber : ShelfTraits {
  static constexpr order kPublish = order::relaxed;
};

TEST(ShelfModel, MutantsAreCaught) {
  const Case what{2, 3, false, {3, 0}};
  expect_caught("shelf: one entry", shelf<OneEntry>(what));
  expect_caught("shelf: relaxed number", shelf<RelaxedNumber>(what));
}

}  // namespace
}  // namespace ferry::model::shelf_model
