// What a group says when its ranks do not fit together: who, in which call, with which words.
#include <future>
#include <map>
#include <mutex>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

/// The first error of each rank.
class Errors {
 public:
  void run(Group& group, const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& e) {
      add(group.rank(), e);
      return;
    }
    ADD_FAILURE() << "rank " << group.rank() << ": no error";
  }
  void add(int rank, const Error& error) {
    const std::scoped_lock lock(mutex_);
    errors_.emplace(rank, error);
  }
  const Error& of(int rank) const { return errors_.at(rank); }
  std::string text(int rank) const { return errors_.at(rank).what(); }

 private:
  std::mutex mutex_;
  std::map<int, Error> errors_;
};

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "\"" << text << "\" does not say " << word;
  }
}

std::size_t times(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

GroupConfig with_deadline(std::chrono::nanoseconds deadline) {
  GroupConfig config;
  config.memory_bytes = 4096;
  config.deadline = deadline;
  return config;
}

constexpr LatencyConfig kLatency{4, 16, 1, Dtype::f32};

TEST(HostErrors, RanksThatWaitForEachOtherSayInWhichCalls) {
  Errors errors;
  with_groups(2, with_deadline(600ms), [&](Group& group) {
    LatencyExchange latency(group, kLatency);
    const Batch batch(group.rank(), 4, 16, 5);
    errors.run(group, [&] {
      if (group.rank() == 0) {
        latency.dispatch(batch.x(), batch.ids());
      } else {
        group.barrier();
      }
    });
  });
  expect_words(errors.text(0), {"latency dispatch of exchange 1", "rank 1", "in barrier"});
  expect_words(errors.text(1), {"in barrier", "rank 0", "latency dispatch of exchange 1"});
}

TEST(HostErrors, RanksInDifferentLatencyExchangesSayInWhich) {
  Errors errors;
  with_groups(3, with_deadline(600ms), [&](Group& group) {
    LatencyExchange first(group, kLatency), second(group, kLatency);
    const Batch batch(group.rank(), 4, 16, 5);
    errors.run(group,
               [&] { (group.rank() == 1 ? second : first).dispatch(batch.x(), batch.ids()); });
  });
  for (int rank = 0; rank < 3; ++rank) {
    expect_words(errors.text(rank),
                 {"latency dispatch of exchange 1", "latency dispatch of exchange 2", "rank 1"});
  }
}

TEST(HostErrors, ARankInNoCallIsSaidToBeInNone) {
  Errors errors;
  with_groups(2, with_deadline(300ms), [&](Group& group) {
    group.barrier();
    if (group.rank() == 0) {
      errors.run(group, [&] { group.barrier(); });
    } else {
      std::this_thread::sleep_for(800ms);
    }
  });
  expect_words(errors.text(0),
               {"rank 1 is in no call of this group", "this rank waits in barrier"});
}

TEST(HostErrors, AnInvalidLatencyConfigurationOnOneRankIsToldToAll) {
  Errors errors;
  const auto start = Clock::now();
  with_groups(3, with_deadline(20s), [&](Group& group) {
    LatencyConfig config = kLatency;
    if (group.rank() == 2) config.hidden = 0;
    errors.run(group, [&] { LatencyExchange(group, config); });
    if (group.rank() == 1) config.capacity = std::int64_t{1} << 40;
    if (group.rank() == 2) config.hidden = 16;
    expect_error(group.rank() == 1 ? ErrorKind::invalid_argument : ErrorKind::mismatch,
                 {"capacity"}, [&] { LatencyExchange(group, config); });
    config.capacity = 4;  // the group goes on
    LatencyExchange good(group, config);
    group.barrier();
  });
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_EQ(errors.of(2).kind(), ErrorKind::invalid_argument);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(errors.of(rank).kind(), ErrorKind::mismatch);
    EXPECT_EQ(errors.of(rank).peer(), 2);
    expect_words(errors.text(rank), {"rank 2", "hidden", "got 0", "1 … 16777216"});
  }
}

/// Makes groups whose rank 2 has another configuration.
void make_groups(Errors& errors, const std::function<void(GroupConfig&)>& change) {
  const auto bootstraps = thread_bootstrap(3);
  const auto start = Clock::now();
  on_ranks(3, [&](int r) {
    GroupConfig config = with_deadline(20s);
    config.experts = 4;
    if (r == 2) change(config);
    try {
      Group group(bootstraps[static_cast<std::size_t>(r)], config);
      ADD_FAILURE() << "rank " << r << ": no error";
    } catch (const Error& e) {
      errors.add(r, e);
    }
  });
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(HostErrors, AnInvalidGroupConfigurationOnOneRankIsToldToAll) {
  const std::vector<std::pair<std::string, std::function<void(GroupConfig&)>>> changes{
      {"experts", [](GroupConfig& c) { c.experts = 0; }},
      {"deadline", [](GroupConfig& c) { c.deadline = -1s; }},
      {"fabric", [](GroupConfig& c) { c.fabric = static_cast<FabricKind>(9); }},
  };
  for (const auto& [field, change] : changes) {
    Errors errors;
    make_groups(errors, change);
    EXPECT_EQ(errors.of(2).kind(), ErrorKind::invalid_argument);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(errors.of(rank).kind(), ErrorKind::mismatch);
      EXPECT_EQ(errors.of(rank).peer(), 2);
      expect_words(errors.text(rank), {"rank 2", field, "invalid", "expected"});
    }
  }
}

TEST(HostErrors, DifferentConfigurationsAreSaidInWords) {
  Errors fabric, backend, deadline;
  make_groups(fabric, [](GroupConfig& c) { c.fabric = FabricKind::shm; });
  expect_words(fabric.text(0), {"fabric is shm on rank 2 but automatic on rank 0"});
  make_groups(backend, [](GroupConfig& c) { c.backend = Backend::host; });
  expect_words(backend.text(1), {"backend is host on rank 2 but automatic on rank 0"});
  make_groups(deadline, [](GroupConfig& c) { c.deadline = 1500ms; });
  expect_words(deadline.text(0), {"deadline is 1.5 s on rank 2 but 20 s on rank 0"});
}

TEST(HostErrors, NothingIsSaidTwice) {
  Errors failed, later, poor;
  with_groups(2, with_deadline(300ms), [&](Group& group) {
    const Batch batch(group.rank(), 2, 1 << 14, 0);
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options;
    options.max_recv_rows = group.rank() == 1 ? (std::int64_t{1} << 31) - 1 : 8;
    poor.run(group, [&] { group.dispatch(batch.x(), plan, options); });
    group.barrier();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(900ms);
      return;
    }
    failed.run(group, [&] { group.barrier(); });
    later.run(group, [&] { group.plan(batch.ids()); });
  });
  expect_words(poor.text(1), {"rank 1", "could not register", "max_recv_rows"});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(times(poor.text(rank), "grow"), 0u) << poor.text(rank);
    EXPECT_EQ(times(poor.text(rank), "dispatch: "), 1u) << poor.text(rank);
  }
  EXPECT_EQ(times(later.text(0), "barrier (generation"), 1u) << later.text(0);
}

TEST(HostErrors, ALateBadArgumentFailsTheGroupAndIsNamedOnceLaterOn) {
  Errors later;
  with_groups(2, with_deadline(20s), [&](Group& group) {
    Stream stream;
    std::promise<void> release;
    stream.submit([&] { release.get_future().wait(); });
    const Batch batch(group.rank(), 4, 16, 0);
    const Plan plan = group.plan(batch.ids(), {.stream = &stream});
    const Batch rows(0, group.rank() == 0 ? 3 : 0, 16, 0);  // rank 0 receives 8
    const Combined back = group.combine(rows.x(), plan, {.stream = &stream});
    release.set_value();
    if (group.rank() == 0) {
      expect_error(ErrorKind::invalid_argument, {"rows", "3", "8"}, [&] { back.event.wait(20s); });
    } else {
      expect_error(ErrorKind::peer_failed, {"rank 0"}, [&] { back.event.wait(20s); });
    }
    later.run(group, [&] { group.barrier(); });
  });
  expect_words(later.text(0), {"It failed with: combine: rows"});
  EXPECT_EQ(times(later.text(0), "combine: "), 1u) << later.text(0);
}

TEST(HostErrors, EmptySaysWhatWasAskedAndWhatIsThere) {
  with_groups(1, with_deadline(20s), [](Group& group) {
    expect_error(ErrorKind::exhausted,
                 {"[999999999, 7168] of bf16", "14335999985664 bytes", "4096 bytes",
                  "smaller shape", "memory_bytes"},
                 [&] { group.empty({999999999, 7168}, Dtype::bf16); });
    expect_error(ErrorKind::invalid_argument, {"dtype", "77"},
                 [&] { group.empty({4, 4}, static_cast<Dtype>(77)); });
  });
}

TEST(HostErrors, CombineRefusesRowsOfAnotherLayoutAndTheGroupGoesOn) {
  with_groups(2, with_deadline(20s), [](Group& group) {
    const Batch batch(group.rank(), 5, 16, group.rank() == 0 ? 0 : 7);
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options;
    options.order = RowOrder::expert_major;
    options.alignment = 6;
    options.max_recv_rows = 24;
    const Received got = group.dispatch(batch.x(), plan, options);
    CombineOptions back;
    expect_error(ErrorKind::invalid_argument, {"rows", "24 rows as rank_major", "5"},
                 [&] { group.combine(got.x, plan, back); });
    back.order = RowOrder::expert_major;
    back.alignment = 4;
    expect_error(ErrorKind::invalid_argument, {"alignment", "got 4", "expected 6"},
                 [&] { group.combine(got.x, plan, back); });
    back.alignment = 6;
    EXPECT_TRUE(same_rows(group.combine(got.x, plan, back).x, batch));
    back.order = RowOrder::rank_major;
    expect_error(ErrorKind::invalid_argument, {"alignment", "got 6", "rank_major"},
                 [&] { group.combine(got.x, plan, back); });
  });
}

}  // namespace
}  // namespace ferry::host::test
