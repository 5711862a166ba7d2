// Regroup where a process is being ended, but has not ended: as killed ones that used a GPU.
#include <array>
#include <atomic>
#include <barrier>
#include <filesystem>
#include <iterator>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/layout.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/test_groups.hpp"
#include "fabric/local/local.hpp"
#include "fabric/shm/shm.hpp"
#include "platform/test_child.hpp"

namespace ferry::engine::test {
namespace {

/// What the kernel says of each rank's process, for all ranks.
struct Processes {
  std::array<std::atomic<bool>, 4> ends{}, ended{};
};

/// A local fabric whose ranks have such processes.
class EndingFabric final : public fabric::Fabric {
 public:
  EndingFabric(std::unique_ptr<fabric::Fabric> wire, Processes& processes)
      : wire_(std::move(wire)), processes_(processes) {}
  std::string_view name() const override { return wire_->name(); }
  int rank() const override { return wire_->rank(); }
  int size() const override { return wire_->size(); }
  fabric::Segment register_memory(std::size_t bytes) override {
    return wire_->register_memory(bytes);
  }
  void attach(int peer, fabric::SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override {
    wire_->attach(peer, segment, bytes, handle);
  }
  void seal(fabric::SegmentId segment) override { wire_->seal(segment); }
  void forget(int peer) noexcept override { wire_->forget(peer); }
  std::byte* pointer(int peer, fabric::SegmentId segment) const noexcept override {
    return wire_->pointer(peer, segment);
  }
  std::size_t bytes(int peer, fabric::SegmentId segment) const noexcept override {
    return wire_->bytes(peer, segment);
  }
  void put(int peer, fabric::Address to, const void* from, std::size_t bytes,
           std::uint64_t tag) override {
    wire_->put(peer, to, from, bytes, tag);
  }
  void publish(int peer, fabric::Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override {
    wire_->publish(peer, flag, value, bytes, tag);
  }
  fabric::PeerState peer_state(int peer) noexcept override {
    return processes_.ended[static_cast<std::size_t>(peer)] ? fabric::PeerState::dead
                                                            : fabric::PeerState::alive;
  }
  bool peer_ends(int peer) noexcept override {
    return processes_.ends[static_cast<std::size_t>(peer)];
  }

 private:
  std::unique_ptr<fabric::Fabric> wire_;
  Processes& processes_;
};

/// Of `ranks` the last is being ended; the others regroup.
void regroup_without_last(int ranks, Processes& processes,
                          const std::function<void(Regroup&, const Epoch&)>& check) {
  const auto bootstraps = thread_bootstrap(ranks);
  on_ranks(ranks, [&](int r) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(r)];
    GroupConfig config;
    config.deadline = std::chrono::hours(1);
    const auto start = Clock::now();
    config.on_wait = [start] {
      if (Clock::now() - start > 20s) throw std::runtime_error("waits for a rank that ends");
    };
    auto memory = std::make_shared<Memory>(
        std::make_unique<EndingFabric>(fabric::make_local_fabric(bootstrap, 20s), processes));
    const ControlLayout layout = make_control_layout(ranks, sizeof(StepMessage));
    const fabric::Segment control = memory->fabric->register_memory(layout.bytes);
    const auto handles = bootstrap.all_gather(control.handle, 20s);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == r) continue;
      memory->fabric->attach(peer, 0, layout.bytes, handles[static_cast<std::size_t>(peer)]);
    }
    Channel channel(memory, config, control, layout);
    if (r + 1 < ranks) {
      Regroup regroup(memory, nullptr, channel, config, layout);
      regroup.suspect_ending();
      check(regroup, regroup.run(0));
    }
    bootstrap.all_gather({}, 60s);
  });
}

TEST(Ending, AMajorityGoesOnBeforeAProcessHasEnded) {
  Processes processes;
  processes.ends[2] = true;
  regroup_without_last(3, processes, [&](Regroup& regroup, const Epoch& epoch) {
    EXPECT_EQ(epoch.ranks, (std::vector<int>{0, 1}));
    EXPECT_TRUE(regroup.lost_may_write());
  });
}

TEST(Ending, WithoutAMajorityRanksWaitUntilItHasEnded) {
  Processes processes;
  processes.ends[1] = true;
  std::thread kernel([&] {
    std::this_thread::sleep_for(50ms);
    processes.ended[1] = true;
  });
  regroup_without_last(2, processes, [&](Regroup& regroup, const Epoch& epoch) {
    EXPECT_TRUE(processes.ended[1]) << "half of the ranks went on";
    EXPECT_EQ(epoch.ranks, std::vector<int>{0});
    EXPECT_FALSE(regroup.lost_may_write());
  });
  kernel.join();
}

/// As a process that begins a group of three alone (`ticket` 0), or joins it, has it at first.
struct Lone {
  static constexpr int kRanks = 3;
  GroupConfig config{};
  ControlLayout layout = make_control_layout(kRanks, sizeof(StepMessage));
  std::shared_ptr<Memory> memory{};
  std::optional<Channel> channel{};
  std::optional<Regroup> regroup{};

  Lone(std::unique_ptr<fabric::Fabric> wire, const std::string& name, std::uint64_t ticket)
      : memory(std::make_shared<Memory>(std::move(wire))) {
    config.deadline = 20s;
    fabric::Fabric& shm = *memory->fabric;
    shm.lobby()->open({name, "", ticket, {}, true});
    const fabric::Segment control = shm.register_memory(layout.bytes);
    (void)shm.register_memory(4096);
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer != shm.rank()) shm.lobby()->vacate(peer);
    }
    channel.emplace(memory, config, control, layout);
    regroup.emplace(memory, nullptr, *channel, config, layout, std::nullopt, ticket);
    regroup->suspect_ending();
  }
  static std::unique_ptr<Lone> begin(const std::string& name) {
    auto own = std::make_unique<Lone>(fabric::begin_shm_fabric(0, kRanks, name), name, 0);
    (void)own->regroup->begin_alone();
    return own;
  }
  /// `number`: another one for each process that joins.
  static std::unique_ptr<Lone> join(int rank, const std::string& name, std::uint64_t number) {
    auto own =
        std::make_unique<Lone>(fabric::join_shm_fabric(rank, kRanks, name, {}, 20s, {}).fabric,
                               name, fabric::kTicketBit | number);
    (void)own->regroup->join();
    return own;
  }
  /// With all that ask, until there are so many.
  void regroup_to(std::size_t ranks) {
    const auto end = Clock::now() + 20s;
    while (channel->ranks().size() < ranks && Clock::now() < end) (void)regroup->run(0);
    EXPECT_EQ(channel->ranks().size(), ranks);
  }
};

/// One begins, and takes in a second; both take in a third. Whose place is free counts as ended, so
/// as one that ends, too.
TEST(Ending, WhoWaitsForAFreePlaceIsTakenIn) {
  const std::string name = "ending " + std::to_string(process_id());
  std::latch begun(2), two(3), all(3);
  on_ranks(Lone::kRanks, [&](int r) {
    std::unique_ptr<Lone> own;
    const auto join = [&] { own = Lone::join(r, name, static_cast<std::uint64_t>(r)); };
    if (r == 0) {
      own = Lone::begin(name);
      begun.arrive_and_wait();
      own->regroup_to(2);
    } else if (r == 1) {
      begun.arrive_and_wait();
      join();
    }
    two.arrive_and_wait();
    if (r == 2) {
      join();
    } else {
      own->regroup_to(3);
    }
    EXPECT_EQ(own->channel->ranks(), (std::vector<int>{0, 1, 2}));
    all.arrive_and_wait();
  });
}

/// A rank leaves, and its process runs on; another takes its seat. Until the one that left has said
/// that it is at rest, what was granted to it stays held back.
TEST(Ending, WhoHasLeftAtRestWritesNoMore) {
  for (const std::string says : {"never", "before", "after"}) {
    const std::string name = "left " + std::to_string(process_id()) + " " + says;
    std::barrier step(2);
    on_ranks(2, [&](int r) {
      if (r == 0) {
        const auto own = Lone::begin(name);
        step.arrive_and_wait();
        own->regroup_to(2);
        step.arrive_and_wait();  // it leaves
        step.arrive_and_wait();
        EXPECT_EQ(own->regroup->run(0).ranks, std::vector<int>{0});
        EXPECT_EQ(own->regroup->lost_may_write(), says != "before") << says;
        step.arrive_and_wait();
        own->regroup_to(2);
        EXPECT_EQ(own->regroup->lost_may_write(), says != "before") << says << ", seat taken";
        step.arrive_and_wait();  // it says so at last
        step.arrive_and_wait();
        EXPECT_EQ(own->regroup->lost_may_write(), says == "never") << says << ", at last";
        step.arrive_and_wait();
      } else {
        step.arrive_and_wait();
        const auto former = Lone::join(1, name, 1);
        step.arrive_and_wait();
        former->channel->leave();
        former->memory->fabric->lobby()->close();
        if (says == "before") former->channel->say_at_rest();
        step.arrive_and_wait();
        step.arrive_and_wait();
        const auto next = Lone::join(1, name, 2);
        step.arrive_and_wait();
        if (says == "after") former->channel->say_at_rest();
        step.arrive_and_wait();
        step.arrive_and_wait();
      }
    });
  }
}

/// A process that takes a seat again and again, never at rest, costs the others one descriptor.
TEST(Ending, WhoComesAgainTakesOneDescriptor) {
  constexpr int kTimes = 12;
  const std::string name = "again " + std::to_string(process_id());
  const auto descriptors = [] {
    const std::filesystem::directory_iterator open("/proc/self/fd"), end;
    return std::distance(open, end);
  };
  std::barrier step(2);
  std::vector<std::ptrdiff_t> open;
  on_ranks(2, [&](int r) {
    std::unique_ptr<Lone> own;
    if (r == 0) own = Lone::begin(name);
    for (std::uint64_t time = 1; time <= kTimes; ++time) {
      step.arrive_and_wait();
      if (r == 0) {
        own->regroup_to(2);
        step.arrive_and_wait();
        step.arrive_and_wait();
        EXPECT_EQ(own->regroup->run(0).ranks, std::vector<int>{0});
        open.push_back(descriptors());
      } else {
        own = Lone::join(1, name, time);
        step.arrive_and_wait();
        own->channel->leave();
        own.reset();
        step.arrive_and_wait();
      }
    }
  });
  EXPECT_LE(open.back(), open[1] + 2) << "after " << kTimes << " times, and after the second";
}

/// A rank leaves and never says that it is at rest; its process ends after another has its seat.
TEST(Ending, WhoseSeatIsTakenMayWriteUntilItsProcessEnds) {
  const std::string name = "taken " + std::to_string(process_id());
  const auto step =
      std::static_pointer_cast<std::atomic<int>>(ferry::test::shared_block(sizeof(int)));
  ferry::test::Child former(
      [&] {
        const auto there = Lone::join(1, name, 1);
        there->channel->leave();
        there->memory->fabric->lobby()->close();
        *step = 1;
        while (*step == 1) std::this_thread::sleep_for(1ms);
        return 0;
      },
      20s);
  const auto own = Lone::begin(name);
  own->regroup_to(2);
  while (*step == 0) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(own->regroup->run(0).ranks, std::vector<int>{0});
  std::thread next([&] { (void)Lone::join(1, name, 2); });
  own->regroup_to(2);
  next.join();
  EXPECT_TRUE(own->regroup->lost_may_write());
  *step = 2;
  EXPECT_EQ(former.wait().code, 0);
  EXPECT_FALSE(own->regroup->lost_may_write());
}

}  // namespace
}  // namespace ferry::engine::test
