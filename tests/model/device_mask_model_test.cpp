// Masks as the kernels of latency mode keep them (cuda/kernels/latency_*.cuh), told once more for
// the explorer, one block a rank: words that carry their generation, credits that a later call
// gives, weights that come late, masks that are taken back, by a regroup, too.
#include "hash.hpp"
#include "protocol/rejoin.hpp"
#include "world.hpp"

namespace ferry::model::device_mask_model {
namespace {

using protocol::Flag;
using protocol::FlagLayout;
using protocol::order;

/// What the kernels stand on.
struct DeviceTraits {
  static constexpr order kTell = order::release;    ///< a row's tag, behind its data
  static constexpr order kListen = order::acquire;  ///< and how it is waited for
  /// A slot may hold what a rank sent before it was masked.
  static constexpr bool is_of(std::uint64_t seen, Generation g) { return seen == g; }
  static constexpr bool kAwaitsCredit = true;
  /// A dispatch gives back what the one before has read.
  static constexpr Generation given_back(Generation g) { return g - 1; }
  /// Who is masked on the way of a dispatch takes no part in its combine, masked still or not.
  static constexpr bool kForgetsLost = true;
  /// Rows whose rank is masked on the way are not read.
  static constexpr bool kLeavesLost = true;
  /// Where the sums of a source lie at their owner.
  static constexpr int place(int source) { return source; }
  /// What ranks said of their masks in an earlier epoch is over when a rank comes to the next one.
  static constexpr bool is_over(std::uint64_t said_in, std::uint64_t epoch) {
    return said_in != epoch;
  }
};

struct DeviceTrial {
  bool takes_back = false;  ///< masks, between a dispatch and its combine
  bool late_weights = false;
  bool two_alive = false;  ///< two dispatches, then their combines
  bool rejoins = false;    ///< after the generations, or where it was evicted; then one more
  bool regroups = false;   ///< the same, of the group
};

/// [of, by]: who goes on without a rank in the epoch after the regroup; what the ranks cannot see.
using DeviceTold = std::array<std::array<bool, kMaxRanks>, kMaxRanks>;

struct DevicePlaces {
  FlagLayout released, gone, stopped;
  protocol::RejoinLayout rejoin;
  std::array<FlagLayout, 2> headers, row_tags, weights, sum_tags;
  Place rows, sums;
};

/// The memory of a rank that its own kernels alone touch, from one call to the next.
struct DeviceHandle {
  Generation generation = 0;
  std::array<bool, kMaxRanks> sent{}, sends{};
  std::array<bool, kMaxRanks> lost{};  ///< the source's rows are zeros
};

template <class Traits, class Base>
class DeviceRank {
 public:
  static constexpr std::uint64_t kBytes = sizeof(std::uint64_t);

  DeviceRank(World<Base>& world, const DevicePlaces& at, int rank, const DeviceTrial& trial,
             DeviceTold& told)
      : world_(world),
        at_(at),
        rank_(rank),
        ranks_(world.what().ranks),
        trial_(trial),
        told_(told) {}

  Status run() {
    for (int peer = 0; peer < ranks_; ++peer) told_[index(peer)][index(rank_)] = false;
    const bool good = exchanges(1, world_.what().generations);
    if (trial_.regroups) return regroup();
    if (!trial_.rejoins) return good ? Status{} : evicted();
    protocol::Rejoin<> rejoin(at_.rejoin, rank_, world_.address(rank_, at_.rejoin.offers.flags),
                              world_.address(rank_, at_.rejoin.answers.flags));
    std::array<std::uint8_t, kMaxRanks> absent{};
    Generation agreed = 0;
    auto reach = world_.reach(rank_);
    const Status status =
        rejoin.agree(reach, generation_, {absent.data(), index(ranks_)}, *this, agreed);
    if (!status.ok()) return status;
    go_on_after(agreed);
    return exchanges(agreed + 1, agreed + 2) ? Status{} : evicted();
  }

  // The watch of every wait: its deadline may be over at any check, and a peer that goes on without
  // this rank is not waited for.
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 0; }
  void awaits(int) {}
  Status check() { return {Status::Code::kDeadline, -1, 0, 0}; }

 private:
  /// False: a peer goes on without this rank, whose CPU makes no more calls.
  bool exchanges(Generation first, Generation last) {
    const Generation step = trial_.two_alive ? 2 : 1;
    for (Generation g = first; g <= last; g += step) {
      for (Generation i = 0; i < step; ++i) {
        if (!dispatch(handles_[(g + i) % 2])) return false;
        if (trial_.takes_back) take_back();
      }
      for (Generation i = 0; i < step; ++i) {
        if (!combine(handles_[(g + i) % 2])) return false;
      }
    }
    return true;
  }
  /// The CPUs agree, when all kernels have ended; each rank goes on as soon as it knows.
  Status regroup() {
    for (int peer = 0; peer < ranks_; ++peer) {
      word(peer, at_.stopped, rank_).store(generation_ + 1, order::release);
    }
    Generation agreed = 0;
    for (int peer = 0; peer < ranks_; ++peer) {
      const Flag said = word(rank_, at_.stopped, peer);
      const Status status = said.wait_until([](std::uint64_t seen) { return seen != 0; }, *this);
      if (!status.ok()) return status;
      agreed = std::max(agreed, said.load(order::relaxed));
    }
    ++epoch_;
    go_on_after(agreed);
    return exchanges(agreed + 1, agreed + 2) ? Status{} : evicted();
  }
  void go_on_after(Generation agreed) {
    for (int peer = 0; peer < ranks_; ++peer) {
      const Flag gone = word(rank_, at_.gone, peer);
      std::uint64_t told = gone.load(order::relaxed);
      const bool over = trial_.rejoins || Traits::is_over(told >> 1, epoch_);
      if (told != 0 && over) gone.compare_exchange(told, 0, order::relaxed);
      heard_[index(peer)] = epoch_ > 0 && told >> 1 == epoch_;
      masked_[index(peer)] = 0;
      word(peer, at_.released, rank_).store(agreed, order::release);
    }
    generation_ = released_ = agreed;
    behind_ = false;
  }

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  Status evicted() const { return {Status::Code::kOvertaken, -1, 0, 0}; }
  Flag word(int owner, const FlagLayout& layout, int writer) {
    return Flag{reinterpret_cast<std::uint64_t*>(world_.address(owner, layout.place(writer)))};
  }
  std::byte* slot(int owner, Place place, Generation g, int source) {
    return world_.address(
        owner, place.at(kBytes * (g % 2 * static_cast<Generation>(ranks_) + index(source))));
  }

  bool is_masked(int peer) const { return masked_[index(peer)] != 0; }
  /// A mask counts for the calls after the one that it was set in.
  bool masked_before(int peer) const { return is_masked(peer) && masked_[index(peer)] != call_; }
  void mask_late(int peer) {
    if (is_masked(peer)) return;
    masked_[index(peer)] = call_;
    if (epoch_ > 0) told_[index(peer)][index(rank_)] = true;
    word(peer, at_.gone, rank_).store(epoch_ << 1 | 1, order::relaxed);
    behind_ |= word(rank_, at_.gone, peer).load(order::relaxed) != 0;
    if (heard_[index(peer)] && !behind_) Explorer::current().fail("forgot the mask of a peer");
  }
  void check_told() const {
    const auto& by = told_[index(rank_)];
    if (epoch_ == 0 || std::find(by.begin(), by.end(), true) != by.end()) return;
    Explorer::current().fail("evicted by nobody");
  }
  void take_back() {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!is_masked(peer)) continue;
      masked_[index(peer)] = 0;
      word(peer, at_.gone, rank_).store(0, order::relaxed);
    }
    if (!behind_) return;
    behind_ = false;
    for (int peer = 0; peer < ranks_; ++peer) {
      behind_ |= word(rank_, at_.gone, peer).load(order::relaxed) != 0;
    }
  }

  /// Waits for a word of `peer` in this rank's memory. False: the peer is masked.
  template <class Reached>
  bool await(const FlagLayout& layout, int peer, order o, Reached reached) {
    if (is_masked(peer)) return false;
    if (word(rank_, layout, peer).wait_until(reached, *this, o).ok()) return true;
    mask_late(peer);
    return false;
  }
  bool await_tag(const FlagLayout& layout, int peer, Generation g) {
    return await(layout, peer, Traits::kListen,
                 [g](std::uint64_t seen) { return Traits::is_of(seen, g); });
  }

  /// False: this rank was evicted.
  bool begin_call() {
    if (behind_) {
      check_told();
      return false;
    }
    ++call_;
    std::uint64_t known = mix(call_ << 16 | generation_ << 8 | epoch_, released_);
    for (int peer = 0; peer < ranks_; ++peer) {
      known = mix(known, masked_[index(peer)] << 1 | (heard_[index(peer)] ? 1 : 0));
      for (const DeviceHandle& handle : handles_) {
        known = mix(known, (handle.sent[index(peer)] ? 4u : 0u) |
                               (handle.sends[index(peer)] ? 2u : 0u) |
                               (handle.lost[index(peer)] ? 1u : 0u));
      }
    }
    world_.explorer().checkpoint(known);
    return true;
  }
  /// The end of the kernels that have read fences on the GPU; here the store does.
  void release(Generation upto) {
    if (upto <= released_) return;
    released_ = upto;
    for (int peer = 0; peer < ranks_; ++peer) {
      word(peer, at_.released, rank_).store(upto, order::release);
    }
  }

  bool dispatch(DeviceHandle& handle) {
    if (!begin_call()) return false;
    const Generation g = generation_ + 1;
    std::array<bool, kMaxRanks> open{};
    if (g > 2) release(g - 2);
    for (int peer = 0; peer < ranks_; ++peer) {
      open[index(peer)] =
          !masked_before(peer) && (g <= 2 || !Traits::kAwaitsCredit ||
                                   await(at_.released, peer, order::acquire,
                                         [g](std::uint64_t seen) { return seen >= g - 2; }));
    }
    generation_ = g;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (open[index(peer)]) send_row(peer, g);
    }
    handle.generation = g;
    handle.sent = open;
    for (int source = 0; source < ranks_; ++source) {
      handle.sends[index(source)] = !masked_before(source) && await_header(source, g);
      if (!handle.sends[index(source)]) handle.sent[index(source)] = false;
    }
    release(Traits::given_back(g));  // behind the headers, for nobody waits for it so soon
    for (int source = 0; source < ranks_; ++source) {
      if (!handle.sends[index(source)]) continue;
      const bool here = await_tag(at_.row_tags[g % 2], source, g);
      if (here || !Traits::kLeavesLost) {
        expect_payload(slot(rank_, at_.rows, g, source), payload(source, rank_, g), 1);
      }
      handle.lost[index(source)] = !here;
      if (here || !Traits::kForgetsLost) continue;
      handle.sends[index(source)] = handle.sent[index(source)] = false;
    }
    return true;
  }
  void send_row(int peer, Generation g) {
    word(peer, at_.headers[g % 2], rank_).store(g, order::relaxed);
    protocol::write_bytes(slot(peer, at_.rows, g, rank_), payload(rank_, peer, g).data(), kBytes);
    word(peer, at_.row_tags[g % 2], rank_).store(g, Traits::kTell);
  }
  /// The word is all that is waited for.
  bool await_header(int source, Generation g) {
    return await(at_.headers[g % 2], source, order::relaxed,
                 [g](std::uint64_t seen) { return Traits::is_of(seen, g); });
  }

  bool combine(const DeviceHandle& handle) {
    if (!begin_call()) return false;
    const Generation g = handle.generation;
    std::array<bool, kMaxRanks> open{};
    for (int peer = 0; peer < ranks_; ++peer) {
      open[index(peer)] = !masked_before(peer) && handle.sent[index(peer)];
      if (open[index(peer)] && trial_.late_weights) {
        word(peer, at_.weights[g % 2], rank_).store(g, order::relaxed);
      }
    }
    for (int source = 0; source < ranks_; ++source) {
      if (!open[index(source)] || !handle.sends[index(source)]) continue;
      if (trial_.late_weights && !await_weight(source, g)) continue;
      const Payload sum = handle.lost[index(source)] ? Payload{} : payload(rank_ + 50, source, g);
      protocol::write_bytes(slot(source, at_.sums, g, Traits::place(rank_)), sum.data(), kBytes);
      word(source, at_.sum_tags[g % 2], rank_).store(g, Traits::kTell);
    }
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!open[index(peer)] || !await_tag(at_.sum_tags[g % 2], peer, g)) continue;
      expect_payload(slot(rank_, at_.sums, g, Traits::place(peer)), payload(peer + 50, rank_, g),
                     1);
    }
    return true;
  }
  bool await_weight(int source, Generation g) {
    return await(at_.weights[g % 2], source, order::relaxed,
                 [g](std::uint64_t seen) { return Traits::is_of(seen, g); });
  }

  World<Base>& world_;
  const DevicePlaces& at_;
  int rank_, ranks_;
  DeviceTrial trial_;
  std::array<DeviceHandle, 2> handles_{};
  std::array<std::uint64_t, kMaxRanks> masked_{};  ///< the call in which the rank was; 0: it is not
  std::uint64_t call_ = 0;
  Generation generation_ = 0, released_ = 0;
  bool behind_ = false;
  DeviceTold& told_;
  std::uint64_t epoch_ = 0;
  std::array<bool, kMaxRanks> heard_{};  ///< of a mask in this epoch, when this rank came to it
};

template <class Traits = DeviceTraits, class Base = Sound>
Report device(const Case& what, const DeviceTrial& trial = {}, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {});
  DevicePlaces at;
  at.released = world.take_flags("released");
  at.gone = world.take_flags("gone");
  at.stopped = world.take_flags("stopped");
  at.rejoin = {world.take_flags("offers"), world.take_flags("answers")};
  at.headers = {world.take_flags("headers even"), world.take_flags("headers odd")};
  at.row_tags = {world.take_flags("row tags even"), world.take_flags("row tags odd")};
  at.weights = {world.take_flags("weights even"), world.take_flags("weights odd")};
  at.sum_tags = {world.take_flags("sum tags even"), world.take_flags("sum tags odd")};
  const std::uint64_t bytes = 2 * 8 * static_cast<std::uint64_t>(what.ranks);
  at.rows = world.take(bytes, "rows");
  at.sums = world.take(bytes, "sums");
  DeviceTold told;
  return world.run(
      [&](int rank) { return DeviceRank<Traits, Base>(world, at, rank, trial, told).run(); }, seed);
}

const DeviceTrial kTakesBack{.takes_back = true}, kLateWeights{.late_weights = true},
    kTwoAlive{.takes_back = true, .two_alive = true}, kRejoins{.rejoins = true},
    kRegroups{.regroups = true};

TEST(DeviceMaskModel, IsSound) {
  expect_sound("device masks, 2 ranks, 4 generations", device({2, 4, false, {2, 0}}));
  expect_sound("device masks, 2 ranks, 3 generations, 2 deadlines", device({2, 3, false, {1, 2}}));
  expect_sound("device masks, late weights, 2 deadlines",
               device({2, 2, false, {1, 2}}, kLateWeights));
  expect_sound("device masks taken back, 3 generations, 2 deadlines",
               device({2, 3, false, {1, 2}}, kTakesBack));
  expect_sound("device masks, two results alive, 2 deadlines",
               device({2, 4, false, {1, 1}}, kTwoAlive));
  expect_sound("device masks, rejoin, 1 deadline", device({2, 2, false, {1, 1}}, kRejoins));
  expect_sound("device masks, regroup, 2 deadlines", device({2, 1, false, {1, 2}}, kRegroups));
}

TEST(DeviceMaskModel, RandomSchedulesOfManyRanks) {
  Case large{5, 4, false, {}};
  large.bounds = {.preemptions = 40, .slices = 4, .executions = 300};
  for (const DeviceTrial& trial :
       {DeviceTrial{}, kTakesBack, kLateWeights, kTwoAlive, kRejoins, kRegroups}) {
    const Report report = device(large, trial, 20261122);
    EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
  }
}

struct RelaxedTag : DeviceTraits {
  static constexpr order kTell = order::relaxed;
};
struct RelaxedPoll : DeviceTraits {
  static constexpr order kListen = order::relaxed;
};
struct AnyTag : DeviceTraits {
  static constexpr bool is_of(std::uint64_t seen, Generation) { return seen != 0; }
};
struct NoCredit : DeviceTraits {
  static constexpr bool kAwaitsCredit = false;
};
struct GivesBackItself : DeviceTraits {
  static constexpr Generation given_back(Generation g) { return g; }
};
struct RemembersLost : DeviceTraits {
  static constexpr bool kForgetsLost = false;
};
struct ReadsLost : DeviceTraits {
  static constexpr bool kLeavesLost = false;
};
struct MasksOutliveEpochs : DeviceTraits {
  static constexpr bool is_over(std::uint64_t, std::uint64_t) { return false; }
};
struct NoEpochInMasks : DeviceTraits {
  static constexpr bool is_over(std::uint64_t, std::uint64_t) { return true; }
};
struct OnePlace : DeviceTraits {
  static constexpr int place(int) { return 0; }
};

TEST(DeviceMaskModel, MutantsAreCaught) {
  const Case late{2, 3, false, {2, 2}};
  expect_caught("device masks: relaxed tag", device<RelaxedTag>(late));
  expect_caught("device masks: relaxed poll of a tag", device<RelaxedPoll>(late));
  expect_caught("device masks: any generation", device<AnyTag>(late));
  expect_caught("device masks: credit not awaited", device<NoCredit>(late, kTakesBack));
  expect_caught("device masks: credit before reading", device<GivesBackItself>(late, kTakesBack));
  expect_caught("device masks: lost rows are read", device<ReadsLost>(late));
  expect_caught("device masks: answers rows that did not come",
                device<RemembersLost>(late, kTakesBack));
  expect_caught("device masks: masks outlive epochs", device<MasksOutliveEpochs>(late, kRegroups));
  expect_caught("device masks: no epoch in masks", device<NoEpochInMasks>(late, kRegroups));
  expect_caught("device masks: several writers for a place", device<OnePlace>(late));
}

}  // namespace
}  // namespace ferry::model::device_mask_model
