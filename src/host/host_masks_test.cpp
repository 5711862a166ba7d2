// Latency mode with masks: who is left out, what the others get, and how ranks come back.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

constexpr std::int64_t kTokens = 5, kHidden = 16;
constexpr int kRanks = 4;  // two experts each

LatencyConfig masked_config() {
  LatencyConfig config{kTokens, kHidden, 2, Dtype::f32};
  config.masks = true;
  return config;
}

GroupConfig with_deadline(std::chrono::nanoseconds deadline) {
  GroupConfig config;
  config.deadline = deadline;
  return config;
}

/// What one rank does again and again: token t goes to expert t with weight 1 and to expert t + 2
/// (the next rank's) with weight 2. Values are whole numbers that tell rank, round and token.
class Load {
 public:
  Load(Group& group, LatencyExchange& latency) : rank_(group.rank()), latency_(latency) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      routes_.insert(routes_.end(), {t, t + 2});
      weights_.insert(weights_.end(), {1.0F, 2.0F});
    }
  }

  ConstTensorView ids() const { return {routes_.data(), Dtype::i64, {kTokens, 2}}; }
  ConstTensorView weights() const { return {weights_.data(), Dtype::f32, {kTokens, 2}}; }
  ConstTensorView x(int round) {
    rows_.clear();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      rows_.insert(rows_.end(), kHidden, value(rank_, round, t));
    }
    return {rows_.data(), Dtype::f32, {kTokens, kHidden}};
  }

  /// One dispatch and combine. `absent`: whom this rank is to go without.
  void round(int number, const std::vector<int>& absent) {
    LatencyDispatchOptions options;
    const bool ahead = number % 2 == 1;
    if (ahead) options.topk_weights = weights();
    const LatencyReceived received = latency_.dispatch(x(number), ids(), options);
    expect_received(received, number, absent);
    expect_sums(combine(received, ahead).x, number, absent);
  }

  /// `ahead`: the weights came with the dispatch.
  LatencyCombined combine(const LatencyReceived& received, bool ahead = false) const {
    LatencyCombineOptions options;
    options.path = CombinePath::per_rank;
    if (ahead) return latency_.combine(received.x, received, options);
    return latency_.combine(received.x, received, weights(), options);
  }

  void expect_received(const LatencyReceived& received, int round,
                       const std::vector<int>& absent) const {
    const auto is_absent = [&](int r) {
      return std::find(absent.begin(), absent.end(), r) != absent.end();
    };
    for (std::int64_t e = 0; e < 2; ++e) {
      const std::int64_t expert = rank_ * 2 + e;
      std::int64_t row = 0;
      for (int source = 0; source < kRanks; ++source) {
        if (is_absent(source)) continue;
        for (std::int64_t t : {expert - 2, expert}) {  // its tokens ascend
          if (t < 0 || t >= kTokens) continue;
          EXPECT_EQ(received.x.as<float>()[(e * kRanks * kTokens + row) * kHidden],
                    value(source, round, t))
              << "rank " << rank_ << " round " << round << " expert " << expert << " row " << row;
          ++row;
        }
      }
      EXPECT_EQ(received.counts.as<std::int32_t>()[e], row) << "rank " << rank_;
    }
  }

  void expect_sums(const Tensor& sums, int round, const std::vector<int>& absent) const {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      float factor = 0;
      for (const int k : {0, 1}) {
        const auto owner = static_cast<int>((t + 2 * k) / 2);
        if (std::find(absent.begin(), absent.end(), owner) == absent.end()) {
          factor += static_cast<float>(k + 1);
        }
      }
      for (std::int64_t h = 0; h < kHidden; ++h) {
        EXPECT_EQ(sums.as<float>()[t * kHidden + h], factor * value(rank_, round, t))
            << "rank " << rank_ << " round " << round << " token " << t;
      }
    }
  }

 private:
  static float value(int rank, int round, std::int64_t token) {
    return static_cast<float>(rank * 10000 + round * 10 + token + 1);
  }

  int rank_;
  LatencyExchange& latency_;
  std::vector<std::int64_t> routes_{};
  std::vector<float> weights_{}, rows_{};
};

/// Keeps a rank in the exchange until all are done, or have failed.
struct StayForAll {
  std::barrier<>& all;
  ~StayForAll() { all.arrive_and_wait(); }
};

std::vector<bool> only(int rank) {
  std::vector<bool> masks(kRanks, false);
  masks[static_cast<std::size_t>(rank)] = true;
  return masks;
}

/// Rank 2 stops coming, is masked, learns it, and comes back.
void late_rank(FabricKind fabric) {
  constexpr int kLate = 2;
  GroupConfig config = with_deadline(1s);
  config.fabric = fabric;
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    int round = 1;
    for (; round <= 3; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      all.arrive_and_wait();  // the others have gone on
      expect_error(ErrorKind::left_behind, {"rank 2", "masked", "rejoin"},
                   [&] { load.round(round, {}); });
      all.arrive_and_wait();
    } else {
      const auto start = Clock::now();
      for (; round <= 8; ++round) load.round(round, {kLate});
      EXPECT_LT(Clock::now() - start, 3s) << "one deadline, not one for each call";
      EXPECT_EQ(latency.masked(), only(kLate));
      EXPECT_EQ(*latency.mask_count(), 1u);
      all.arrive_and_wait();
      all.arrive_and_wait();
      for (; round <= 10; ++round) load.round(round, {kLate});  // it has disturbed nobody
    }
    latency.rejoin();
    EXPECT_EQ(latency.masked(), std::vector<bool>(kRanks, false));
    for (round = 11; round <= 15; ++round) load.round(round, {});
    EXPECT_EQ(*latency.mask_count(), group.rank() == kLate ? 0u : 1u);
    group.barrier();  // throughput mode has noticed nothing
  });
}

TEST(HostMasks, ALateRankIsMaskedAndComesBack) {
  late_rank(FabricKind::local);
}

TEST(HostMasks, ALateRankIsMaskedAndComesBackOverANetwork) {
  late_rank(FabricKind::sim);
}

TEST(HostMasks, ARankThatIsLateWithinACallSpoilsNothing) {
  // It sends its rows of a generation, and the rest of that call comes when the others are far on.
  constexpr int kLate = 1;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 2; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      LatencyDispatchOptions hook;
      hook.hook = true;
      LatencyReceived received = latency.dispatch(load.x(3), load.ids(), hook);
      all.arrive_and_wait();
      EXPECT_THROW(received.receive(), Error);
    } else {
      {
        const LatencyReceived received = latency.dispatch(load.x(3), load.ids());
        load.expect_received(received, 3, {});  // its rows came
        const LatencyCombined sums = load.combine(received);
        load.expect_sums(sums.x, 3, {kLate});  // nothing came back
      }
      for (int round = 4; round <= 6; ++round) load.round(round, {kLate});
      all.arrive_and_wait();
      for (int round = 7; round <= 9; ++round) load.round(round, {kLate});
    }
    latency.rejoin();
    for (int round = 10; round <= 12; ++round) load.round(round, {});
  });
}

TEST(HostMasks, MasksAreSetAndCleared) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const int rank = group.rank();
    const std::vector<int> others = rank < 2 ? std::vector{2, 3} : std::vector{0, 1};
    load.round(1, {});
    all.arrive_and_wait();  // whoever is in a call when another masks it was left behind
    for (const int other : others) latency.set_mask(other, true);
    all.arrive_and_wait();
    for (int round = 2; round <= 4; ++round) load.round(round, others);  // two halves
    EXPECT_EQ(latency.masked()[static_cast<std::size_t>(others[0])], true);
    EXPECT_EQ(*latency.mask_count(), 0u) << "the caller's own masks are not counted";
    all.arrive_and_wait();
    latency.clear_masks();
    all.arrive_and_wait();
    for (int round = 5; round <= 7; ++round) load.round(round, {});
    expect_error(ErrorKind::invalid_argument, {"rank", "peer"},
                 [&] { latency.set_mask(rank, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "-1"}, [&] { latency.set_mask(-1, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "4"}, [&] { latency.set_mask(4, false); });
  });
}

TEST(HostMasks, AMaskTakenBackInTheMidstOfAnExchangeVouchesForNothing) {
  // Rank 0 leaves out the rows of rank 1 and then takes the mask back. It must not tell rank 1 that
  // its part of the sums is there: what lies there is of an older generation.
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 4; ++round) load.round(round, {});  // leaves old sums everywhere
    LatencyDispatchOptions hook;
    hook.hook = true;
    LatencyReceived received = latency.dispatch(load.x(5), load.ids(), hook);
    if (group.rank() != 0) received.receive();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      latency.set_mask(1, true);
      received.receive();
      latency.clear_masks();
    }
    all.arrive_and_wait();
    load.expect_received(received, 5, group.rank() == 0 ? std::vector{1} : std::vector<int>{});
    const Tensor sums = load.combine(received).x;
    load.expect_sums(sums, 5, group.rank() == 1 ? std::vector{0} : std::vector<int>{});
    if (group.rank() == 1) {
      EXPECT_EQ(latency.masked(), only(0));
    }
  });
}

TEST(HostMasks, TheNextGenerationsRowsDoNotPassForThoseThatWereNotSent) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 4; ++round) load.round(round, {});
    LatencyDispatchOptions hook;
    hook.hook = true;
    const int rank = group.rank();
    LatencyReceived fifth;
    if (rank != 1) fifth = latency.dispatch(load.x(5), load.ids(), hook);
    all.arrive_and_wait();
    if (rank == 1) {
      latency.set_mask(0, true);
      fifth = latency.dispatch(load.x(5), load.ids(), hook);  // nothing for rank 0
      latency.clear_masks();
    }
    all.arrive_and_wait();
    LatencyReceived sixth = latency.dispatch(load.x(6), load.ids(), hook);
    all.arrive_and_wait();
    fifth.receive();
    load.expect_received(fifth, 5, rank == 0 ? std::vector{1} : std::vector<int>{});
    sixth.receive();
    load.expect_received(sixth, 6, {});
    all.arrive_and_wait();
  });
}

TEST(HostMasks, ARankThatLeavesIsMaskedAtOnce) {
  with_groups(kRanks, with_deadline(60s), [&](Group& group) {
    std::optional<LatencyExchange> latency(std::in_place, group, masked_config());
    Load load(group, *latency);
    load.round(1, {});
    if (group.rank() == 3) {
      group.destroy();
      return;
    }
    const auto start = Clock::now();
    for (int round = 2; round <= 5; ++round) load.round(round, {3});
    EXPECT_LT(Clock::now() - start, 30s);
    latency->rejoin();  // without it, and it stays masked
    EXPECT_EQ(latency->masked(), only(3));
    for (int round = 6; round <= 8; ++round) load.round(round, {3});
  });
}

TEST(HostMasks, AGroupThatFailedLeavesTheExchangeAlone) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() != 0) {
      EXPECT_THROW(group.barrier(), Error);  // rank 0 does not come
      EXPECT_THROW(group.barrier(), Error);  // and the group stays dead
    }
    all.arrive_and_wait();
    for (int round = 2; round <= 5; ++round) load.round(round, {});
    latency.rejoin();
    load.round(6, {});
  });
}

TEST(HostMasks, RejoinNamesWhoIsMissingAndMayBeRepeated) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() != 3) {
      expect_error(ErrorKind::deadline, {"rank 3", "rejoin"}, [&] { latency.rejoin(); });
      expect_error(ErrorKind::left_behind, {"rejoin again"}, [&] { load.round(2, {}); });
    }
    all.arrive_and_wait();
    latency.rejoin();
    for (int round = 2; round <= 4; ++round) load.round(round, {});
  });
}

TEST(HostMasks, ResultsFromBeforeARejoinMayBeReadButKeepTheirBuffer) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    std::optional<LatencyReceived> old = latency.dispatch(load.x(2), load.ids());
    latency.rejoin();
    load.expect_received(*old, 2, {});
    expect_error(ErrorKind::left_behind, {"before the last rejoin"}, [&] { load.combine(*old); });
    load.round(3, {});  // in the other buffer
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(load.x(4), load.ids()); });
    load.expect_received(*old, 2, {});
    old.reset();
    for (int round = 4; round <= 8; ++round) load.round(round, {});
  });
}

TEST(HostMasks, AReceiveThatWasLeftBehindMayBeCalledAgain) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyDispatchOptions hook;
    hook.hook = true;
    LatencyReceived received = latency.dispatch(load.x(1), load.ids(), hook);
    all.arrive_and_wait();
    if (group.rank() == 1) latency.set_mask(0, true);
    all.arrive_and_wait();
    if (group.rank() == 0) {
      expect_error(ErrorKind::left_behind, {"rank 1"}, [&] { received.receive(); });
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.clear_masks();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      expect_error(ErrorKind::invalid_argument, {"hook", "receive()"},
                   [&] { load.combine(received); });
    }
    received.receive();
    load.expect_received(received, 1, {});
    load.expect_sums(load.combine(received).x, 1, {});
  });
}

TEST(HostMasks, AReceiveThatTheCallerBrokeOffMayBeCalledAgain) {
  static thread_local bool interrupted = false;
  GroupConfig config = with_deadline(30s);
  config.on_wait = [] {
    if (interrupted) throw std::runtime_error("interrupted");
  };
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyDispatchOptions hook;
    hook.hook = true;
    LatencyReceived received;
    if (group.rank() == 0) {
      received = latency.dispatch(load.x(1), load.ids(), hook);
      interrupted = true;
      EXPECT_THROW(received.receive(), std::runtime_error);
      interrupted = false;
      expect_error(ErrorKind::invalid_argument, {"hook", "receive()"},
                   [&] { load.combine(received); });
    }
    all.arrive_and_wait();
    if (group.rank() != 0) received = latency.dispatch(load.x(1), load.ids(), hook);
    received.receive();
    load.expect_received(received, 1, {});
    LatencyCombineOptions options;
    options.path = CombinePath::per_rank;
    options.hook = true;
    LatencyCombined sums = latency.combine(received.x, received, load.weights(), options);
    sums.receive();
    load.expect_sums(sums.x, 1, {});
    EXPECT_THROW(received.receive(), Error);
    EXPECT_THROW(sums.receive(), Error);
  });
}

TEST(HostMasks, NothingIsCombinedOfADispatchThatFailedOnItsStream) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    Stream stream;
    std::atomic<bool> masked = false;
    LatencyReceived received;
    if (group.rank() == 0) {
      stream.submit([&] { masked.wait(false); });
      LatencyDispatchOptions options;
      options.stream = &stream;
      options.topk_weights = load.weights();
      received = latency.dispatch(load.x(1), load.ids(), options);
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.set_mask(0, true);
    all.arrive_and_wait();
    if (group.rank() == 0) {
      masked = true;
      masked.notify_all();
      expect_error(ErrorKind::left_behind, {"rank 1"}, [&] { received.event.wait(); });
    }
    all.arrive_and_wait();
    if (group.rank() == 1) latency.clear_masks();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      LatencyCombineOptions options;
      options.path = CombinePath::per_rank;
      options.stream = &stream;
      const LatencyCombined sums = latency.combine(received.x, received, options);
      expect_error(ErrorKind::invalid_argument, {"received", "failed"}, [&] { sums.event.wait(); });
    }
    all.arrive_and_wait();
  });
}

/// Rank 0 stops, and holds up some ranks and not others.
void held_up(const GroupConfig& given) {
  // Rank 1 alone masks rank 0, and waits in combine for the others, which wait in dispatch for
  // rank 0 until their deadline, and then compute past that of rank 1.
  constexpr auto kDeadline = 800ms;
  GroupConfig config = given;
  config.deadline = kDeadline;
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    all.arrive_and_wait();
    const StayForAll stay{all};
    if (group.rank() == 0) return;
    if (group.rank() == 1) {
      latency.set_mask(0, true);
      std::this_thread::sleep_for(kDeadline / 2);
    }
    const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
    load.expect_received(received, 2, {0});
    if (group.rank() != 1) std::this_thread::sleep_for(kDeadline * 3 / 4);
    load.expect_sums(load.combine(received).x, 2, {0});
    EXPECT_EQ(latency.masked(), only(0));
  });
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnother) {
  held_up({});
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnotherOverANetwork) {
  GroupConfig config;
  config.fabric = FabricKind::sim;
  held_up(config);
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnotherInDomains) {
  GroupConfig config;
  config.domain_size = 2;
  config.network = FabricKind::sim;
  held_up(config);
}

TEST(HostMasks, UnreceivedResultsMayBeDropped) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyDispatchOptions hook;
    hook.hook = true;
    for (int round = 1; round <= 20; round += 2) {
      latency.dispatch(load.x(round), load.ids(), hook);
      load.round(round + 1, {});
      if (round % 7 == 0) latency.rejoin();
    }
    group.barrier();
  });
}

TEST(HostMasks, RanksAgreeOnMasks) {
  with_groups(2, {}, [](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = group.rank() == 0;
    expect_error(ErrorKind::mismatch, {"masks"}, [&] { LatencyExchange(group, config); });
    config.masks = false;
    LatencyExchange latency(group, config);
    expect_error(ErrorKind::invalid_argument, {"masks"}, [&] { latency.masked(); });
    expect_error(ErrorKind::invalid_argument, {"masks"}, [&] { latency.rejoin(); });
  });
}

/// What one exchange gives: valid rows, scales, and sums, as bytes.
std::vector<std::uint8_t> bytes_of_round(LatencyExchange& latency, const Load& load,
                                         const ConstTensorView& x, RowOrder order,
                                         WireFormat format, CombineFormat back) {
  std::vector<std::uint8_t> bytes;
  const auto keep = [&](const void* from, std::size_t count) {
    const auto* first = static_cast<const std::uint8_t*>(from);
    bytes.insert(bytes.end(), first, first + count);
  };
  LatencyDispatchOptions options;
  options.order = order;
  options.format = format;
  options.topk_weights = load.weights();
  const LatencyReceived received = latency.dispatch(x, load.ids(), options);
  const TensorView& rows = received.x.view();
  std::vector<float> sums(static_cast<std::size_t>(rows.shape.product()), 0.0F);
  for (std::int64_t block = 0; block < rows.shape[0]; ++block) {
    for (std::int64_t row = 0; row < received.counts.as<std::int32_t>()[block]; ++row) {
      const std::int64_t at = block * rows.strides[0] + row * rows.strides[1];
      keep(received.x.as<std::uint8_t>() + at * static_cast<std::int64_t>(size_of(rows.dtype)),
           static_cast<std::size_t>(kHidden) * size_of(rows.dtype));
      if (format == WireFormat::e4m3) {
        const Extents& strides = received.scales.view().strides;
        keep(received.scales.as<float>() + block * strides[0] + row * strides[1], sizeof(float));
      }
      float* sum = sums.data() + (block * rows.shape[1] + row) * kHidden;
      for (std::int64_t h = 0; h < kHidden; ++h) sum[h] = static_cast<float>(row + h);
    }
  }
  LatencyCombineOptions combine;
  combine.path = CombinePath::per_rank;
  combine.format = back;
  const Tensor out = latency.combine({sums.data(), Dtype::f32, rows.shape}, received, combine).x;
  keep(out.data(), static_cast<std::size_t>(kTokens * kHidden) * sizeof(float));
  return bytes;
}

TEST(HostMasks, FormatsAndOrdersAreThoseWithoutMasks) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    LatencyExchange with(group, config);
    config.masks = false;
    LatencyExchange without(group, config);
    Load load(group, with);
    int round = 1;
    for (const RowOrder order : {RowOrder::expert_major, RowOrder::rank_major}) {
      for (const WireFormat format : {WireFormat::as_is, WireFormat::e4m3}) {
        for (const auto back :
             {CombineFormat::as_is, CombineFormat::e4m3, CombineFormat::logfmt10}) {
          const ConstTensorView x = load.x(++round);
          EXPECT_EQ(bytes_of_round(with, load, x, order, format, back),
                    bytes_of_round(without, load, x, order, format, back));
        }
      }
    }
  });
}

TEST(HostMasks, CombinesTakeOnePlaceForEachRank) {
  with_groups(2, {}, [](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const LatencyReceived received = latency.dispatch(load.x(1), load.ids());
    expect_error(ErrorKind::invalid_argument, {"path", "per_rank"},
                 [&] { latency.combine(received.x, received, load.weights()); });
  });
}

TEST(HostMasks, TheHintIsTheAllocation) {
  with_groups(3, {}, [](Group& group) {
    const std::size_t before = group.memory().latency_bytes;
    LatencyExchange latency(group, masked_config());
    EXPECT_EQ(group.memory().latency_bytes - before,
              LatencyExchange::memory_hint(masked_config(), 8, 3));
  });
}

void slow_rank(bool masks) {
  constexpr int kSlow = 2;
  constexpr auto kPause = 30ms;
  constexpr int kRounds = 5;
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = masks;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    std::vector<std::int64_t> waits(kRanks, 0), sums(kRanks, 0);
    LatencyDispatchOptions dispatch;
    dispatch.waits = TensorView(waits.data(), Dtype::i64, {kRanks});
    LatencyCombineOptions combine;
    combine.path = CombinePath::per_rank;
    combine.waits = TensorView(sums.data(), Dtype::i64, {kRanks});
    for (int round = 0; round < kRounds; ++round) {
      if (group.rank() == kSlow) std::this_thread::sleep_for(kPause);
      const LatencyReceived received = latency.dispatch(load.x(round), load.ids(), dispatch);
      latency.combine(received.x, received, load.weights(), combine);
    }
    // Whoever else was on time, this rank waited for the slow one longest.
    if (group.rank() != kSlow) {
      EXPECT_EQ(std::max_element(waits.begin(), waits.end()) - waits.begin(), kSlow);
      EXPECT_GT(waits[kSlow], kPause.count() * kRounds * 1'000'000 / 2);
    }
    EXPECT_GE(*std::min_element(sums.begin(), sums.end()), 0);
    EXPECT_GT(*std::max_element(sums.begin(), sums.end()), 0);
    waits.resize(1);
    dispatch.waits = TensorView(waits.data(), Dtype::i64, {1});
    expect_error(ErrorKind::invalid_argument, {"waits", "[4]"},
                 [&] { latency.dispatch(load.x(0), load.ids(), dispatch); });
  });
}

TEST(HostWaits, SayForWhomTheReceiveWaited) {
  slow_rank(false);
  slow_rank(true);
}

/// Rank 2 comes late to combine: the others waited for it, not for one another.
void late_to_combine(bool masks) {
  constexpr int kLate = 2;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = masks;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    std::vector<std::int64_t> waits(kRanks, 0);
    LatencyDispatchOptions ahead;
    ahead.topk_weights = load.weights();
    const LatencyReceived received = latency.dispatch(load.x(1), load.ids(), ahead);
    LatencyCombineOptions options;
    options.path = CombinePath::per_rank;
    options.waits = TensorView(waits.data(), Dtype::i64, {kRanks});
    all.arrive_and_wait();
    if (group.rank() == kLate) std::this_thread::sleep_for(200ms);
    load.expect_sums(latency.combine(received.x, received, options).x, 1, {});
    if (group.rank() != kLate) {
      EXPECT_LT(2 * waits[static_cast<std::size_t>(group.rank())], waits[kLate]);
    }
  });
}

TEST(HostWaits, OfACombineAreOfEachSourceItsOwn) {
  late_to_combine(false);
  late_to_combine(true);
}

TEST(HostWaits, EndWhenTheSourceIsMasked) {
  constexpr int kAbsent = 3;
  constexpr std::chrono::nanoseconds kDeadline = 400ms;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(kDeadline), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    std::vector<std::int64_t> waits(kRanks, 0);
    LatencyDispatchOptions options;
    options.waits = TensorView(waits.data(), Dtype::i64, {kRanks});
    if (group.rank() != kAbsent) {
      const LatencyReceived received = latency.dispatch(load.x(2), load.ids(), options);
      load.expect_received(received, 2, {kAbsent});
      EXPECT_GT(waits[kAbsent], kDeadline.count() / 2);
      EXPECT_EQ(std::max_element(waits.begin(), waits.end()) - waits.begin(), kAbsent);
    }
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace ferry::host::test
