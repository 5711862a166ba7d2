// A fan-out beside its dispatch (cuda/kernels/throughput/progress.cuh), told once more for the
// explorer. Its sources differ: one sends scales with its rows by bulk copies and tells how far it
// is; one, a GPU without bulk copies, sends scales after its rows and tells nothing.
#include "world.hpp"

namespace ferry::model::progress_model {
namespace {

using protocol::Flag;
using protocol::FlagLayout;
using protocol::order;

constexpr int kReceiver = 0, kSilent = 1, kTelling = 2, kSources = 2;  // ranks
constexpr int kFanOut = kReceiver + kSources;  // fiber kFanOut + s: the warps that copy rows of s
constexpr std::uint64_t kRows = 3;  // of each source, each a part; the last is told by the end

struct ProgressTraits {
  static constexpr order kTells = order::release;
  static constexpr order kPolls = order::acquire;
  static constexpr order kHearsEnd = order::acquire;
  /// Scales that come at any time are part of no row that is told of.
  static constexpr bool tells(bool scales_apart) { return !scales_apart; }
  static constexpr bool is_of(std::uint64_t word, Generation g) { return word >> 32 == g; }
  /// Rows that nobody has told of are here when the call has ended.
  static constexpr bool kEndTells = true;
  /// Sources that have delivered when the call ends.
  static constexpr int kDelivered = kSources;
  /// The fan-out that has ended when the memory is granted again.
  static constexpr Generation read_before(Generation g) { return g - 1; }
};

struct WithoutDeadline {
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() { return {}; }
};

template <class Traits = ProgressTraits>
class FollowedDispatch {
 public:
  static Report explore(Generation generations, const Bounds& bounds) {
    Explorer explorer;
    World<Sound> world(explorer, {3, generations, false, bounds}, {}, kFanOut + kSources + 1);
    FollowedDispatch scene(world);
    return world.run([&](int fiber) { return scene.body(fiber); });
  }

 private:
  explicit FollowedDispatch(World<Sound>& world) : world_(world) {
    granted_ = world.take(8, "granted");
    delivered_ = world.take_flags("delivered");
    progress_ = world.take(3 * kRows * 8, "progress");
    ended_ = world.take(8, "ended");
    left_ = world.take_flags("left");
    rows_ = world.take(3 * kRows * 8, "rows");
    scales_ = world.take(3 * kRows * 8, "scales");
  }

  Status body(int fiber) {
    for (Generation g = 1; g <= world_.what().generations; ++g) {
      world_.explorer().checkpoint(g);
      if (fiber == kReceiver) receive(g);
      if (fiber == kSilent || fiber == kTelling) send(fiber, g);
      if (fiber > kFanOut) copy(fiber - kFanOut, g);
    }
    return {};
  }

  void send(int rank, Generation g) {
    const bool apart = rank == kSilent;
    await(word(rank, granted_), g);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      write(rows_, rank, row, g);
      if (!apart) write(scales_, rank, row, g);
      if (row + 1 == kRows || !Traits::tells(apart)) continue;
      told(rank, row).store(g << 32 | (row + 1), Traits::kTells);
    }
    for (std::uint64_t row = 0; apart && row < kRows; ++row) write(scales_, rank, row, g);
    word(kReceiver, delivered_.place(rank)).store(g, order::release);
  }

  /// The receiver's dispatch: behind the call before in its stream, then the grant and the end.
  void receive(Generation g) {
    for (int source : {kSilent, kTelling}) {
      await(word(kReceiver, left_.place(source)), Traits::read_before(g));
      word(source, granted_).store(g, order::release);
    }
    for (int source = kSilent; source < kSilent + Traits::kDelivered; ++source) {
      await(word(kReceiver, delivered_.place(source)), g);
    }
    word(kReceiver, ended_).store(g, order::release);
  }

  void copy(int source, Generation g) {
    for (std::uint64_t row = 0; row < kRows; ++row) {
      await_row(source, row, g);
      expect_payload(at(rows_, source, row), payload(source, static_cast<int>(row), g), 1);
      expect_payload(at(scales_, source, row), payload(source, static_cast<int>(row), g), 1);
    }
    word(kReceiver, left_.place(source)).store(g, order::release);
  }

  /// The kernel polls all words until one says so. A poll that finds nothing changes nothing, so
  /// one of the told words at any time, then the end, is every course of that.
  void await_row(int source, std::uint64_t row, Generation g) {
    if (!Traits::kEndTells) return await(told(source, row), g << 32);
    for (std::uint64_t part = row; part + 1 < kRows; ++part) {
      if (Traits::is_of(told(source, part).load(Traits::kPolls), g)) return;
    }
    await(word(kReceiver, ended_), g, Traits::kHearsEnd);
  }

  static void await(Flag flag, std::uint64_t wanted, order o = order::acquire) {
    WithoutDeadline watch;
    (void)flag.wait_until([wanted](std::uint64_t seen) { return seen >= wanted; }, watch, o);
  }
  Flag word(int rank, Place place) {
    return Flag{reinterpret_cast<std::uint64_t*>(world_.address(rank, place))};
  }
  Flag told(int source, std::uint64_t row) {
    return Flag{reinterpret_cast<std::uint64_t*>(at(progress_, source, row))};
  }
  std::byte* at(Place place, int source, std::uint64_t row) {
    return world_.address(kReceiver,
                          place.at((static_cast<std::uint64_t>(source) * kRows + row) * 8));
  }
  void write(Place place, int source, std::uint64_t row, Generation g) {
    protocol::write_bytes(at(place, source, row), payload(source, static_cast<int>(row), g).data(),
                          8);
  }

  World<Sound>& world_;
  Place granted_{}, progress_{}, ended_{}, rows_{}, scales_{};
  FlagLayout delivered_{}, left_{};
};

TEST(ProgressModel, IsSoundWhereOneSourceTellsNothing) {
  expect_sound("progress, 2 generations, 2 preemptions",
               FollowedDispatch<>::explore(2, {.preemptions = 2}));
  expect_sound("progress, 1 generation, 3 preemptions",
               FollowedDispatch<>::explore(1, {.preemptions = 3}));
}

struct AwaitsProgressAlone : ProgressTraits {
  static constexpr bool kEndTells = false;
};
struct TellsBeforeItsScales : ProgressTraits {
  static constexpr bool tells(bool) { return true; }
};
struct EndsBeforeTheLast : ProgressTraits {
  static constexpr int kDelivered = kSources - 1;
};
struct GrantsWhileRead : ProgressTraits {
  static constexpr Generation read_before(Generation g) { return g > 1 ? g - 2 : 0; }
};
struct TakesOldWords : ProgressTraits {
  static constexpr bool is_of(std::uint64_t word, Generation) { return word != 0; }
};
struct RelaxedTelling : ProgressTraits {
  static constexpr order kTells = order::relaxed;
};
struct RelaxedPolls : ProgressTraits {
  static constexpr order kPolls = order::relaxed;
};
struct RelaxedEnd : ProgressTraits {
  static constexpr order kHearsEnd = order::relaxed;
};

template <class Traits>
Report mutant() {
  return FollowedDispatch<Traits>::explore(2, {.preemptions = 1});
}

TEST(ProgressModel, MutantsAreCaught) {
  expect_caught("progress: the end tells nothing", mutant<AwaitsProgressAlone>());
  expect_caught("progress: told before scales that come apart", mutant<TellsBeforeItsScales>());
  expect_caught("progress: ends before the last has delivered", mutant<EndsBeforeTheLast>());
  expect_caught("progress: grants what is still read", mutant<GrantsWhileRead>());
  expect_caught("progress: words of the call before", mutant<TakesOldWords>());
  expect_caught("progress: told relaxed", mutant<RelaxedTelling>());
  expect_caught("progress: polled relaxed", mutant<RelaxedPolls>());
  expect_caught("progress: end heard relaxed", mutant<RelaxedEnd>());
}

}  // namespace
}  // namespace ferry::model::progress_model
