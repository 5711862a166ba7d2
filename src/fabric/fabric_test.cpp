// The contract of Fabric, over all of them.
#include "fabric/fabric.hpp"

#include <random>

#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kSettings[] = {{"ofi", "ofi", true},
                                 {"across_ofi", "shm+ofi", true},
                                 {"ofi_threads", "ofi", false},
                                 {"local", "local", false},
                                 {"sim", "sim", false},
                                 {"shm_threads", "shm", false},
                                 {"shm", "shm", true},
                                 {"across_sim", "local+sim", false},
                                 {"across_copies", "shm+copies", true}};

class FabricTest : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (!std::string(GetParam().fabric).ends_with("ofi")) return;
    if (const std::string why = no_ofi(); !why.empty()) GTEST_SKIP() << why;
    // Ranks that meet on the board are ordered by it, which one process alone does not show; of a
    // network this process writes what arrives.
    if (GetParam().processes && thread_sanitizer()) GTEST_SKIP() << "needs ranks as threads";
  }
  void run(int ranks, const Body& body) {
    SCOPED_TRACE("seed " + std::to_string(kSeed));
    run_ranks(GetParam(), ranks, body);
  }
  bool has_pointers() const {
    const std::string fabric = GetParam().fabric;
    return fabric == "local" || fabric == "shm";
  }
};

INSTANTIATE_TEST_SUITE_P(Every, FabricTest, ::testing::ValuesIn(kSettings),
                         [](const auto& setting) { return std::string(setting.param.name); });

std::byte pattern(int source, int target, std::uint64_t generation, std::size_t at) {
  return static_cast<std::byte>(1 + source * 31 + target * 7 + generation * 13 + at * 3);
}

TEST_P(FabricTest, SaysWhoItIs) {
  run(3, [](Rank& me) {
    const auto fabric = me.make();
    EXPECT_EQ(fabric->name(), me.setting.fabric);
    EXPECT_EQ(fabric->rank(), me.rank());
    EXPECT_EQ(fabric->size(), 3);
    EXPECT_EQ(fabric->peer_state(2), PeerState::alive);
    me.barrier();
  });
}

// Data of many generations in flight; every flag comes after its bytes, own rank included.
TEST_P(FabricTest, BytesAreThereWhenTheFlagIs) {
  constexpr int kRanks = 3;
  constexpr std::uint64_t kGenerations = 40;
  constexpr std::size_t kRoom = 700;  // for one source and generation
  constexpr std::size_t kFlags = kRanks * kGenerations * kRoom;
  run(kRanks, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, kFlags / 64 * 64 + 64 + 64 * kRanks);
    const auto flag_of = [](int source) {
      return kFlags / 64 * 64 + 64 + 64 * std::size_t(source);
    };
    std::mt19937 random(kSeed + unsigned(me.rank()));
    for (std::uint64_t g = 1; g <= kGenerations; ++g) {
      for (int peer = 0; peer < kRanks; ++peer) {
        const std::size_t base = (std::size_t(me.rank()) * kGenerations + (g - 1)) * kRoom;
        std::size_t sent = 0;
        while (sent < kRoom) {  // several puts of any size, also none
          const std::size_t bytes = std::min<std::size_t>(random() % 400, kRoom - sent);
          Bytes data(bytes);
          for (std::size_t i = 0; i < bytes; ++i) data[i] = pattern(me.rank(), peer, g, sent + i);
          fabric->put(peer, {mine.id, base + sent}, data.data(), bytes, g);
          sent += bytes;
        }
        fabric->publish(peer, {mine.id, flag_of(me.rank())}, g, kRoom, g);
      }
    }
    for (std::uint64_t g = 1; g <= kGenerations; ++g) {
      for (int source = 0; source < kRanks; ++source) {
        ASSERT_TRUE(await_flag(mine, flag_of(source), g)) << "from " << source << " at " << g;
        const std::byte* rows = mine.data + (std::size_t(source) * kGenerations + (g - 1)) * kRoom;
        for (std::size_t i = 0; i < kRoom; ++i) {
          ASSERT_EQ(rows[i], pattern(source, me.rank(), g, i))
              << "from " << source << " generation " << g << " byte " << i;
        }
      }
    }
    me.barrier();
  });
}

TEST_P(FabricTest, PublishWakesAWaiter) {
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    me.barrier();
    if (me.rank() == 0) {
      std::this_thread::sleep_for(100ms);  // the other one sleeps by now
      fabric->publish(1, {mine.id, 64}, 7, 0, 1);
    } else {
      const auto start = Clock::now();
      // One slice as long as the deadline: only a wake ends it early.
      EXPECT_TRUE(await_flag(mine, 64, 7, 15s, 15s));
      EXPECT_LT(Clock::now() - start, 5s);
    }
    me.barrier();
  });
}

TEST_P(FabricTest, PointersReachThePeersMemory) {
  run(3, [this](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 8192);
    EXPECT_EQ(fabric->pointer(me.rank(), mine.id), mine.data);
    EXPECT_EQ(fabric->pointer(me.rank(), mine.id + 1), nullptr);
    EXPECT_EQ(fabric->pointer(-1, mine.id), nullptr);
    EXPECT_EQ(fabric->pointer(3, mine.id), nullptr);
    const int next = (me.rank() + 1) % 3;
    const int previous = (me.rank() + 2) % 3;
    std::byte* const there = fabric->pointer(next, mine.id);
    if (!has_pointers()) {
      EXPECT_EQ(there, nullptr);
      return;
    }
    ASSERT_NE(there, nullptr);
    there[8191] = static_cast<std::byte>(me.rank() + 1);
    me.barrier();
    EXPECT_EQ(mine.data[8191], static_cast<std::byte>(previous + 1));
    me.barrier();
  });
}

TEST_P(FabricTest, MemoryIsZeroedAlignedAndGrows) {
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    std::vector<Segment> mine;
    const int peer = 1 - me.rank();
    for (const std::size_t bytes :
         {std::size_t{1}, std::size_t{4096}, std::size_t{5000}, std::size_t{2} << 20,
          (std::size_t{2} << 20) + 1, std::size_t{5} << 20}) {
      mine.push_back(me.connect(*fabric, bytes));
      const Segment& segment = mine.back();
      EXPECT_EQ(segment.id, mine.size() - 1);
      EXPECT_EQ(segment.bytes, bytes);
      EXPECT_LE(segment.handle.size(), kMaxHandleBytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment.data) % 4096, 0u);
      EXPECT_EQ(segment.data[0], std::byte{0});
      EXPECT_EQ(segment.data[bytes - 1], std::byte{0});
    }
    me.barrier();
    for (const Segment& segment : mine) {  // also the oldest one still works
      const auto value = static_cast<std::byte>(segment.id + 1);
      fabric->put(peer, {segment.id, segment.bytes - 1}, &value, 1, 5 + segment.id);
      fabric->publish(peer, {1, 64 * segment.id}, 1, 1, 5 + segment.id);
    }
    for (const Segment& segment : mine) {
      ASSERT_TRUE(await_flag(mine[1], 64 * segment.id, 1));
      EXPECT_EQ(segment.data[segment.bytes - 1], static_cast<std::byte>(segment.id + 1));
    }
    me.barrier();
  });
}

TEST_P(FabricTest, AnEmptySegmentHoldsNothing) {
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 0);
    const std::byte value{1};
    fabric->put(1 - me.rank(), {mine.id, 0}, nullptr, 0, 1);
    expect_error(ErrorKind::invalid_argument, {"1 bytes at offset 0", "of 0 bytes"},
                 [&] { fabric->put(1 - me.rank(), {mine.id, 0}, &value, 1, 1); });
    me.barrier();
  });
}

TEST_P(FabricTest, RefusesWhatLiesOutside) {
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4000);  // its pages hold 4096
    const int peer = 1 - me.rank();
    const Bytes data(4096, std::byte{0xff});
    const auto refused = [&](int target, Address to, std::size_t bytes, const char* word) {
      expect_error(ErrorKind::invalid_argument, {"put", "rank " + std::to_string(target), word},
                   [&] { fabric->put(target, to, data.data(), bytes, 1); });
    };
    refused(peer, {mine.id, 0}, 4001, "of 4000 bytes");
    refused(peer, {mine.id, 4000}, 1, "offset 4000");
    refused(peer, {mine.id, 1}, 4000, "4000 bytes at offset 1");
    refused(peer, {mine.id, ~0ull}, 2, "offset 18446744073709551615");  // the sum overflows
    refused(peer, {mine.id, 8}, ~std::size_t{0}, "18446744073709551615 bytes");
    refused(peer, {mine.id + 1, 0}, 1, "segment 1 is not attached");
    refused(2, {mine.id, 0}, 1, "expected 0 to 1");
    refused(-1, {mine.id, 0}, 1, "expected 0 to 1");
    const auto no_flag = [&](std::uint64_t offset, const char* word) {
      expect_error(ErrorKind::invalid_argument, {"publish", word},
                   [&] { fabric->publish(peer, {mine.id, offset}, 1, 0, 1); });
    };
    no_flag(3996, "16 bytes at offset 3996");
    no_flag(8, "multiple of 64");
    no_flag(~7ull, "offset");
    expect_error(ErrorKind::exhausted, {"rank " + std::to_string(me.rank())},
                 [&] { fabric->register_memory(~std::size_t{0} - 5); });
    me.barrier();
    for (std::size_t i = 0; i < 4000; ++i) EXPECT_EQ(mine.data[i], std::byte{0}) << i;
    me.barrier();
    // Up to the last byte is fine.
    fabric->put(peer, {mine.id, 0}, data.data(), 3968, 1);
    fabric->publish(peer, {mine.id, 3968}, 1, 3968, 1);
    ASSERT_TRUE(await_flag(mine, 3968, 1));
    EXPECT_EQ(mine.data[3967], std::byte{0xff});
    me.barrier();
  });
}

TEST_P(FabricTest, ChecksAPeersHandle) {
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = fabric->register_memory(4096);
    const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, {});
    const int peer = 1 - me.rank();
    const Bytes& good = handles[std::size_t(peer)];
    const auto refused = [&](SegmentId segment, std::size_t bytes, const Bytes& handle) {
      expect_error(ErrorKind::system, {"cannot attach segment", "of rank " + std::to_string(peer)},
                   [&] { fabric->attach(peer, segment, bytes, handle); });
      EXPECT_EQ(fabric->pointer(peer, segment), nullptr);
    };
    refused(0, 4096, {});
    refused(0, 4096, Bytes(good.begin(), good.end() - 1));
    refused(0, 4096, Bytes(good.size(), std::byte{0}));
    refused(0, 8192, good);
    refused(1, 4096, good);
    refused(0, 4096, handles[std::size_t(me.rank())]);
    for (const std::size_t at : {0u, 4u, 8u, 12u, 16u, 23u, 32u, 47u}) {
      Bytes bad = good;
      bad[good.size() - 48 + at] ^= std::byte{0x40};  // of the one that serves, where there are two
      refused(0, 4096, bad);
    }
    expect_error(ErrorKind::invalid_argument, {"attach", "rank 2"},
                 [&] { fabric->attach(2, 0, 4096, good); });
    fabric->attach(peer, 0, 4096, good);
    expect_error(ErrorKind::system, {"attached already"},
                 [&] { fabric->attach(peer, 0, 4096, good); });
    me.barrier();
    fabric->seal(mine.id);
    fabric->seal(mine.id);  // twice does no harm
    me.barrier();
  });
}

TEST_P(FabricTest, OffsetsBeyondFourGibibytes) {
  constexpr std::size_t kBytes = (std::size_t{4} << 30) + 65536;
  if (std::string(GetParam().fabric).starts_with("shm") &&
      !GTEST_FLAG_GET(also_run_disabled_tests)) {
    GTEST_SKIP() << "shm reserves 4 GiB for it: seconds; --gtest_also_run_disabled_tests runs it";
  }
  run(2, [](Rank& me) {
    const auto fabric = me.make();
    Segment mine;
    try {
      if (me.rank() == 1) mine = fabric->register_memory(kBytes);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::exhausted) throw;
      std::printf("skipped: %s\n", e.what());  // a small /dev/shm or a strict overcommit
    }
    const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, {});
    if (handles[1].empty()) return;
    if (me.rank() == 0) {
      fabric->attach(1, 0, kBytes, handles[1]);
      const std::uint64_t value = 0x1234567890abcdef;
      fabric->put(1, {0, kBytes - 128}, &value, 8, 1);
      fabric->publish(1, {0, kBytes - 64}, 9, 8, 1);
      expect_error(ErrorKind::invalid_argument, {"leave"},
                   [&] { fabric->put(1, {0, kBytes - 4}, &value, 8, 1); });
    } else {
      ASSERT_TRUE(await_flag(mine, kBytes - 64, 9));
      std::uint64_t value = 0;
      std::memcpy(&value, mine.data + kBytes - 128, 8);
      EXPECT_EQ(value, 0x1234567890abcdefu);
      EXPECT_EQ(mine.data[65536 - 64], std::byte{0});  // where 32 bits would have led
      EXPECT_EQ(mine.data[65536 - 128], std::byte{0});
    }
    me.barrier();
  });
}

TEST_P(FabricTest, ARankMayLeaveFirst) {
  run(3, [this](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    const std::uint64_t word = 42;
    if (me.rank() == 0) {
      fabric->put(1, {mine.id, 64}, &word, 8, 1);
      fabric->publish(1, {mine.id, 0}, 1, 8, 1);
      fabric.reset();
      me.barrier();
      return;
    }
    me.barrier();
    if (me.rank() == 1) {  // what it sent before still arrives
      EXPECT_TRUE(await_flag(mine, 0, 1));
      EXPECT_EQ(flag_value(mine, 64), 42u);
    }
    const Bytes data(1000, std::byte{3});  // nobody reads it; no fault
    const std::size_t place = 1000 * std::size_t(me.rank());
    fabric->put(0, {mine.id, place}, data.data(), data.size(), 2);
    fabric->publish(0, {mine.id, 64 * std::size_t(me.rank())}, 1, 1000, 2);
    if (has_pointers()) std::memset(fabric->pointer(0, mine.id) + place, 7, 1000);
    const int other = 3 - me.rank();
    fabric->publish(other, {mine.id, 192}, 5, 0, 3);
    EXPECT_TRUE(await_flag(mine, 192, 5));
  });
}

TEST_P(FabricTest, WhatIsSealedOrLeftIsNotAttached) {
  if (std::string(GetParam().fabric).ends_with("ofi")) {
    GTEST_SKIP() << "a handle of ofi is all that a write needs: nothing is looked up";
  }
  run(2, [](Rank& me) {
    auto fabric = me.make();
    const Segment sealed = fabric->register_memory(4096);
    const Segment open = fabric->register_memory(4096);
    const auto first = me.bootstrap.all_gather(sealed.handle, kDeadline, {});
    const auto second = me.bootstrap.all_gather(open.handle, kDeadline, {});
    const auto refused = [&](SegmentId segment, const Bytes& handle) {
      expect_error(ErrorKind::system, {"cannot attach", "of rank 0", "left"},
                   [&] { fabric->attach(0, segment, 4096, handle); });
    };
    if (me.rank() == 0) fabric->seal(sealed.id);
    me.barrier();
    if (me.rank() == 1) refused(sealed.id, first[0]);
    if (me.rank() == 0) fabric.reset();
    me.barrier();
    if (me.rank() == 1) refused(open.id, second[0]);
  });
}

TEST_P(FabricTest, TwoJobsAtOnceDoNotMeet) {
  run(2, [](Rank& me) {
    const auto first = me.make();
    const auto second = me.make();
    const int peer = 1 - me.rank();
    const Segment a = first->register_memory(4096);
    const Segment b = second->register_memory(4096);
    const auto as = me.bootstrap.all_gather(a.handle, kDeadline, {});
    const auto bs = me.bootstrap.all_gather(b.handle, kDeadline, {});
    expect_error(ErrorKind::system, {"another group"},
                 [&] { second->attach(peer, 0, 4096, as[std::size_t(peer)]); });
    first->attach(peer, 0, 4096, as[std::size_t(peer)]);
    second->attach(peer, 0, 4096, bs[std::size_t(peer)]);
    const std::uint64_t one = 1;
    const std::uint64_t two = 2;
    first->put(peer, {0, 64}, &one, 8, 1);
    first->publish(peer, {0, 0}, 1, 8, 1);
    second->put(peer, {0, 64}, &two, 8, 1);
    second->publish(peer, {0, 0}, 1, 8, 1);
    ASSERT_TRUE(await_flag(a, 0, 1));
    ASSERT_TRUE(await_flag(b, 0, 1));
    EXPECT_EQ(flag_value(a, 64), 1u);
    EXPECT_EQ(flag_value(b, 64), 2u);
    me.barrier();
  });
}

TEST_P(FabricTest, CreationReachesItsDeadline) {
  if (GetParam().processes) GTEST_SKIP() << "the same code as with threads";
  if (std::string(GetParam().fabric) == "local+sim") GTEST_SKIP() << "made of two of the others";
  run(2, [](Rank& me) {
    if (me.rank() == 1) return;  // never comes
    SimOptions options;
    const std::string kind = me.setting.fabric;
    expect_error(ErrorKind::deadline, {"rank 1"}, [&] {
      if (kind == "local") make_local_fabric(me.bootstrap, 50ms);
      if (kind == "shm") make_shm_fabric(me.bootstrap, 50ms);
      if (kind == "sim") make_sim_fabric(me.bootstrap, options, 50ms);
      if (kind == "ofi") make_ofi_fabric(me.bootstrap, ofi_options(), 50ms);
    });
  });
}

}  // namespace
}  // namespace ferry::fabric::test
