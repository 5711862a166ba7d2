// Latency mode with masks: exchanges in which any wait may end by its deadline, masks that are
// taken back, and results held across a rejoin.
#include "protocol/mask.hpp"

#include "protocol/credit.hpp"
#include "protocol/delivery.hpp"
#include "protocol/rejoin.hpp"
#include "world.hpp"

namespace ferry::model::mask_model {
namespace {

using protocol::AwaitTraits;
using protocol::Channel;
using protocol::Credit;
using protocol::CreditLayout;
using protocol::Delivery;
using protocol::kAnyAhead;
using protocol::Rejoin;
using protocol::RejoinLayout;
using protocol::ToldMasks;

using Ranks = std::array<std::uint8_t, kMaxRanks>;

/// What the engine does around the protocols, as parameters.
struct MaskTraits {
  using Await = AwaitTraits;
  static constexpr bool kAwaitsCredit = true;
  /// The rows of a generation say which it is: a rank whose mask was taken back sends again, but
  /// not what it has missed, and the flag of the next generation passes for this one's.
  static constexpr bool kReadsHeaders = true;
  /// A rank answers only those whose rows came, and to whom its own went.
  static constexpr bool kAnswersWhatCame = true;
  /// Where the sums of a source lie at their owner.
  static constexpr int place(int source) { return source; }
  /// After a rejoin the buffer of a result that is alive is not free.
  static constexpr bool kKeepsAlive = true;
};

struct Trial {
  bool takes_back = false;  ///< masks are cleared between a dispatch and its combine
  bool rejoins = false;     ///< after the generations, then one more
  bool holds = false;       ///< rank 0 holds its first result across the rejoin
};

/// Every place of one rank's memory.
struct Places {
  CreditLayout credit;
  std::array<protocol::FlagLayout, 2> combined;
  protocol::FlagLayout told;
  RejoinLayout rejoin;
  Place rows, sums;
};

template <class Traits, class Base>
class MaskedRank {
 public:
  static constexpr std::uint64_t kBytes = sizeof(std::uint64_t), kRowBytes = 2 * kBytes;

  MaskedRank(World<Base>& world, const Places& at, int rank, const Trial& trial)
      : world_(world),
        at_(at),
        rank_(rank),
        ranks_(world.what().ranks),
        trial_(trial),
        reach_(world.reach(rank)),
        credit_(at.credit, rank, mine(at.credit.arrived.flags), mine(at.credit.released.flags)),
        told_(at.told, rank, mine(at.told.flags)),
        rejoin_(at.rejoin, rank, mine(at.rejoin.offers.flags), mine(at.rejoin.answers.flags)) {}

  Status run() {
    Status status;
    for (int i = 0; static_cast<Generation>(i) < world_.what().generations; ++i) {
      status = exchange(!(trial_.holds && rank_ == 0 && i == 0));
      if (!status.ok()) break;
    }
    if (!trial_.rejoins) return status;
    Ranks gone{};
    Generation agreed = 0;
    status = rejoin_.agree(reach_, used(), set(gone), *this, agreed);
    if (!status.ok()) return status;
    masked_ = {};
    base_ = generation_ = agreed;
    const bool alive = trial_.holds && rank_ == 0 && Traits::kKeepsAlive;
    credit_.release(reach_, alive ? agreed - 1 : agreed);
    if (!trial_.holds) return exchange(true);
    status = exchange(false);
    if (!status.ok()) return status;
    for (int source = 0; rank_ == 0 && source < ranks_; ++source) check_row(source, 1);
    credit_.release(reach_, generation_);
    return exchange(true);
  }

  // The watch of every wait.
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 0; }
  void awaits(int) {}
  Status check() {
    Status status;
    status.peer = told_.find(base_, [this](int peer) { return masked_[at(peer)] == 0; });
    status.code = status.peer >= 0 ? Status::Code::kOvertaken : Status::Code::kDeadline;
    return status;
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  std::byte* mine(Place place) { return world_.address(rank_, place); }
  protocol::RankSet set(Ranks& ranks) { return {ranks.data(), at(ranks_)}; }
  protocol::FlagArray flag_array(const protocol::FlagLayout& layout) {
    return {mine(layout.flags), layout.stride, layout.ranks};
  }
  std::uint64_t slot(int source, Generation g) const { return g % 2 * at(ranks_) + at(source); }
  Place row_place(int source, Generation g) const {
    return at_.rows.at(kRowBytes * slot(source, g));
  }
  Place sum_place(int source) const {
    return at_.sums.at(kBytes * slot(Traits::place(source), generation_));
  }
  /// Of whom a sum comes: in the two generations that share a buffer, of different ranks.
  bool sums_in(int source) const {
    return source == static_cast<int>(generation_ / 2 % static_cast<Generation>(ranks_));
  }
  Generation used() const {
    Generation newest = generation_;
    for (int peer = 0; peer < ranks_; ++peer) newest = std::max(newest, words_[at(peer)] >> 1);
    return newest;
  }
  void tell(int peer, bool masked) {
    words_[at(peer)] =
        protocol::next_mask(words_[at(peer)], std::max(generation_, base_ + 1), masked);
    told_.tell(reach_, peer, words_[at(peer)]);
  }

  Ranks unmasked() const {
    Ranks ranks{};
    for (int peer = 0; peer < ranks_; ++peer) ranks[at(peer)] = masked_[at(peer)] == 0 ? 1 : 0;
    return ranks;
  }

  /// As LatencyMasks::await.
  template <class OnArrival>
  Status await(const protocol::FlagLayout& flags, Generation wanted, std::uint64_t depth,
               Ranks pending, OnArrival came) {
    const auto any = [&] {
      return std::any_of(pending.begin(), pending.end(), [](auto p) { return p != 0; });
    };
    while (any()) {
      Ranks newcomers{};
      const Status status = protocol::await_some<typename Traits::Await>(
          flag_array(flags), wanted, depth, set(pending), set(newcomers), *this);
      if (status.code == Status::Code::kOvertaken) return status;
      if (status.code == Status::Code::kDeadline) {
        for (int peer = 0; peer < ranks_; ++peer) {
          if (pending[at(peer)] == 0) continue;
          masked_[at(peer)] = 1;
          tell(peer, true);
        }
        return {};
      }
      for (int peer = 0; peer < ranks_; ++peer) {
        if (newcomers[at(peer)] != 0) came(peer);
      }
    }
    return {};
  }

  /// All that this rank knows besides the memory.
  void checkpoint(bool drops) {
    std::uint64_t known = (generation_ << 8 | base_) << 1 | (drops ? 1 : 0);
    for (int peer = 0; peer < ranks_; ++peer) {
      known = known << 8 | words_[at(peer)] << 1 | masked_[at(peer)];
    }
    world_.explorer().checkpoint(known);
  }

  /// Whether the row of `source` is here.
  std::uint8_t check_row(int source, Generation g) {
    const std::byte* row = mine(row_place(source, g));
    if (Traits::kReadsHeaders && protocol::read(reinterpret_cast<const std::uint64_t*>(row)) != g) {
      return 0;
    }
    expect_payload(row, {g, payload(source, rank_, g)[0]}, 2);
    return 1;
  }

  Status exchange(bool drops) {
    const Generation g = ++generation_;
    checkpoint(drops);
    Ranks sent{}, came{};
    const auto send = [&](int peer) {
      const Payload row{g, payload(rank_, peer, g)[0]};
      reach_.write(peer, row_place(rank_, g), row.data(), kRowBytes, Credit<>::tag(g));
      credit_.announce(reach_, peer, g, kRowBytes);
      sent[at(peer)] = 1;
    };
    if (g > 2 && Traits::kAwaitsCredit) {
      const Status status = await(at_.credit.released, g - 2, kAnyAhead, unmasked(), send);
      if (!status.ok()) return status;
    } else {
      const Ranks to = unmasked();
      for (int peer = 0; peer < ranks_; ++peer) {
        if (to[at(peer)] != 0) send(peer);
      }
    }
    Status status = await(at_.credit.arrived, g, 2, unmasked(),
                          [&](int source) { came[at(source)] = check_row(source, g); });
    if (!status.ok()) return status;
    if (trial_.takes_back) {
      for (int peer = 0; peer < ranks_; ++peer) {
        if (masked_[at(peer)] != 0) tell(peer, false);
      }
      masked_ = {};
    }
    status = combine(g, sent, came);
    if (status.ok() && drops) credit_.release(reach_, g);
    return status;
  }

  Status combine(Generation g, const Ranks& sent, const Ranks& came) {
    const Delivery<> combined(at_.combined[g % 2], rank_, mine(at_.combined[g % 2].flags));
    Ranks owners = unmasked();
    for (int peer = 0; peer < ranks_; ++peer) {
      owners[at(peer)] &= sent[at(peer)];
      if (owners[at(peer)] == 0 || (Traits::kAnswersWhatCame && came[at(peer)] == 0)) continue;
      const Payload value = payload(rank_ + 50, peer, g);
      const bool writes = sums_in(rank_) && came[at(peer)] != 0;
      if (writes) {
        reach_.write(peer, sum_place(rank_), value.data(), kBytes, Delivery<>::tag(g));
      }
      combined.deliver(reach_, peer, g, writes ? kBytes : 0);
    }
    return await(at_.combined[g % 2], g, 2, owners, [&](int source) {
      if (!sums_in(source)) return;
      expect_payload(mine(sum_place(source)), payload(source + 50, rank_, g), 1);
    });
  }

  World<Base>& world_;
  const Places& at_;
  int rank_, ranks_;
  Trial trial_;
  typename World<Base>::Reach reach_;
  Credit<> credit_;
  ToldMasks told_;
  Rejoin<> rejoin_;
  Ranks masked_{};
  std::array<std::uint64_t, kMaxRanks> words_{};
  Generation generation_ = 0, base_ = 0;
};

template <class Traits = MaskTraits, class Base = Sound>
Report masked(const Case& what, const Trial& trial = {}, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kArrival, Channel::kCredit, Channel::kDelivery});
  Places at;
  at.credit.arrived = world.take_flags("arrived");
  at.credit.released = world.take_flags("released");
  at.combined = {world.take_flags("combined even"), world.take_flags("combined odd")};
  at.told = world.take_flags("told");
  at.rejoin = {world.take_flags("offers"), world.take_flags("answers")};
  const std::uint64_t bytes = 2 * 8 * static_cast<std::uint64_t>(what.ranks);
  at.rows = world.take(2 * bytes, "rows");
  at.sums = world.take(bytes, "sums");
  return world.run([&](int rank) { return MaskedRank<Traits, Base>(world, at, rank, trial).run(); },
                   seed);
}

const Trial kTakesBack{.takes_back = true}, kRejoins{.rejoins = true},
    kHolds{.rejoins = true, .holds = true};

TEST(MaskModel, IsSound) {
  expect_sound("masks, 2 ranks, 4 generations", masked({2, 4, false, {2, 0}}));
  expect_sound("masks, 2 ranks, 3 generations, 2 deadlines", masked({2, 3, false, {1, 2}}));
  expect_sound("masks taken back, 2 ranks, 3 generations, 2 deadlines",
               masked({2, 3, false, {1, 2}}, kTakesBack));
  expect_sound("masks, rejoin, 2 ranks, 2 generations, 1 deadline",
               masked({2, 2, false, {1, 1}}, kRejoins));
  expect_sound("masks, rejoin, 2 ranks, a result held, 1 deadline",
               masked({2, 1, false, {1, 1}}, kHolds));
}

TEST(MaskModel, RandomSchedulesOfManyRanks) {
  Case large{5, 4, false, {}};
  large.bounds = {.preemptions = 40, .slices = 4, .executions = 300};
  for (const Trial& trial : {Trial{}, kTakesBack, kRejoins, kHolds}) {
    const Report report = masked(large, trial, 20261121);
    EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
  }
}

struct NoCredit : MaskTraits {
  static constexpr bool kAwaitsCredit = false;
};
struct NoHeaders : MaskTraits {
  static constexpr bool kReadsHeaders = false;
};
struct AnswersAll : MaskTraits {
  static constexpr bool kAnswersWhatCame = false;
};
struct OnePlace : MaskTraits {
  static constexpr int place(int) { return 0; }
};
struct FreesAll : MaskTraits {
  static constexpr bool kKeepsAlive = false;
};
TEST(MaskModel, MutantsAreCaught) {
  const Case late{2, 3, false, {2, 2}};
  expect_caught("masks: relaxed publish", masked<MaskTraits, RelaxedPublish>(late));
  expect_caught("masks: relaxed await", masked<WithAwait<MaskTraits, RelaxedAwait>>(late));
  expect_caught("masks: ==", masked<WithAwait<MaskTraits, EqualAwait>>({2, 3, false, {2, 0}}));
  expect_caught("masks: an older generation", masked<WithAwait<MaskTraits, PreviousAwait>>(late));
  expect_caught("masks: any generation", masked<WithAwait<MaskTraits, AnyAwait>>(late));
  expect_caught("masks: credit not awaited", masked<NoCredit>(late, kTakesBack));
  expect_caught("masks: headers not read", masked<NoHeaders>(late, kTakesBack));
  expect_caught("masks: answers whose rows did not come", masked<AnswersAll>(late, kTakesBack));
  expect_caught("masks: several writers for a place", masked<OnePlace>(late));
  expect_caught("rejoin: a held buffer is given away",
                masked<FreesAll>({2, 1, false, {2, 0}}, kHolds));
}

}  // namespace
}  // namespace ferry::model::mask_model
