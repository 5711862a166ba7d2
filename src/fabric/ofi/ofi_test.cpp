// What the network fabric does beyond the contract: peers that die, stop or leave, strangers at its
// port, options.
#include "fabric/ofi/ofi.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <random>

#include "fabric/ofi/fi_endpoint.hpp"
#include "fabric/ofi/handshake.hpp"
#include "fabric/ofi/message.hpp"
#include "fabric/ofi/nics/nics.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kOfi{"ofi", "ofi", true};

class OfiFabric : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_ofi(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// 0 and 2 can still talk, whatever became of 1.
void expect_the_others_talk(Fabric& fabric, const Segment& mine, int rank) {
  const std::uint64_t word = 11;
  const int other = 2 - rank;
  fabric.put(other, {mine.id, 256}, &word, 8, 77);
  fabric.publish(other, {mine.id, 128}, 9, 8, 77);
  EXPECT_TRUE(await_flag(mine, 128, 9));
  EXPECT_EQ(flag_value(mine, 256), 11u);
  EXPECT_EQ(fabric.peer_state(other), PeerState::alive);
}

/// Everybody has heard from everybody.
void attach_peers(Rank& me, Fabric& fabric, const Segment& mine) {
  for (int peer = 0; peer < me.size(); ++peer) {
    fabric.publish(peer, {mine.id, 512 + 64 * std::uint64_t(me.rank())}, 1, 0, 1);
  }
  for (int peer = 0; peer < me.size(); ++peer) {
    ASSERT_TRUE(await_flag(mine, 512 + 64 * std::uint64_t(peer), 1));
  }
  me.barrier();
}

TEST_F(OfiFabric, AKilledRankIsDead) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 1 << 20);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) raise(SIGKILL);
    const auto start = Clock::now();
    EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::dead; }, 5s));
    std::printf("rank %d: dead after %.3f s\n", me.rank(),
                std::chrono::duration<double>(Clock::now() - start).count());
    const Bytes data(1 << 20, std::byte{1});
    for (int i = 0; i < 20; ++i) fabric->put(1, {mine.id, 0}, data.data(), data.size(), 5);
    fabric->publish(1, {mine.id, 0}, 1, 20 << 20, 5);
    expect_the_others_talk(*fabric, mine, me.rank());
    EXPECT_LT(Clock::now() - start, 8s);
  });
  ranks.expect_success({1});
}

/// What the network refuses of a dead rank rings for nothing, again and again: from then on, too,
/// what the others say wakes a thread that sleeps at the network.
TEST_F(OfiFabric, MessagesWakeRanksAfterAnotherWasKilled) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) raise(SIGKILL);
    EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::dead; }, 5s));
    const int other = 2 - me.rank();
    constexpr int kRounds = 20;
    int late = 0;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      std::this_thread::sleep_for(5ms);  // the other's thread falls asleep
      if (me.rank() == 0) fabric->publish(other, {mine.id, 128}, round, 0, 7);
      const auto start = Clock::now();
      ASSERT_TRUE(await_flag(mine, 128, round));
      late += Clock::now() - start > 20ms ? 1 : 0;
      if (me.rank() == 2) fabric->publish(other, {mine.id, 128}, round, 0, 7);
    }
    EXPECT_LT(late, kRounds * 3 / 4);
  });
  ranks.expect_success({1});
}

TEST_F(OfiFabric, AStoppedRankIsNotHeardAndComesBack) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    me.board.notes[std::size_t(me.rank())] = getpid();
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) {
      raise(SIGSTOP);
    } else {
      EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::unknown; }, 5s));
      expect_the_others_talk(*fabric, mine, me.rank());
      fabric->publish(1, {mine.id, 64 * std::size_t(me.rank())}, 3, 0, 6);
      if (me.rank() == 2) {
        kill(static_cast<pid_t>(me.board.notes[1]), SIGCONT);
      }
      EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::alive; }, 5s));
    }
    if (me.rank() == 1) {
      EXPECT_TRUE(await_flag(mine, 0, 3));
      EXPECT_TRUE(await_flag(mine, 128, 3));
    }
    me.barrier();
  });
  ranks.expect_success();
}

TEST_F(OfiFabric, ARankThatTakesNothingIsLostAtTheDeadline) {
  static constexpr auto kLate = 3s;  // also for the ranks to meet, on machines that are busy
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = make_ofi_fabric(me.bootstrap, ofi_options(), kLate);
    const Segment mine = me.connect(*fabric, 2 << 20);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) raise(SIGSTOP);
    const auto start = Clock::now();
    const Bytes data(1 << 20, std::byte{1});
    // More than sockets and chunks hold; behind the flags that rank 1 has read.
    for (int i = 0; i < 64; ++i) {
      fabric->put(1, {mine.id, 1 << 20}, data.data(), data.size(), 5);
    }
    std::printf("rank %d: 64 MiB after %.3f s\n", me.rank(),
                std::chrono::duration<double>(Clock::now() - start).count());
    EXPECT_LT(Clock::now() - start, kLate + 3s);
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
    expect_the_others_talk(*fabric, mine, me.rank());
    fabric.reset();
    EXPECT_LT(Clock::now() - start, kLate + 5s);
  });
  EXPECT_TRUE(eventually([&] { return ranks.ended(0) && ranks.ended(2); }));
  ranks[1].kill();
  ranks.expect_success({1});
}

TEST_F(OfiFabric, WhatWasPutArrivesAtARankThatPausesWhileThisOneLeaves) {
  constexpr std::size_t kBytes = 6 << 20;  // more than sockets hold
  Processes ranks(kOfi, 2, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 8 << 20);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) {
      raise(SIGSTOP);
      EXPECT_TRUE(await_flag(mine, 64, 2));
      EXPECT_EQ(mine.data[4096 + kBytes - 1], std::byte{7});
      return;
    }
    const Bytes data(kBytes, std::byte{7});
    std::thread([&] {
      fabric->put(1, {mine.id, 4096}, data.data(), data.size(), 5);
      fabric->publish(1, {mine.id, 64}, 2, data.size(), 5);
    }).join();
    fabric.reset();
  });
  std::this_thread::sleep_for(1800ms);
  ranks[1].signal(SIGCONT);
  ranks.expect_success();
}

TEST_F(OfiFabric, TheFirstBytesDoNotWaitForAFullChunk) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "it looks at rows before their flag has come, as no program may";
#endif
  constexpr std::size_t kRow = 8192, kRows = 6, kAt = 4096;
  Processes ranks(kOfi, 2, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 1 << 20);
    attach_peers(me, *fabric, mine);
    const Bytes row(kRow, std::byte{1});
    if (me.rank() == 0) {
      for (std::size_t i = 0; i < kRows; ++i) {
        fabric->put(1, {mine.id, kAt + i * kRow}, row.data(), kRow, 5);
      }
    } else {
      EXPECT_TRUE(eventually([&] { return flag_value(mine, kAt) != 0; }, 5s));
    }
    me.barrier();
    if (me.rank() == 0) fabric->publish(1, {mine.id, 0}, 1, kRows * kRow, 5);
    if (me.rank() == 1) {
      EXPECT_TRUE(await_flag(mine, 0, 1));
      for (std::size_t i = 0; i < kRows * kRow; i += kRow) {
        EXPECT_NE(flag_value(mine, kAt + i), 0u);
      }
    }
    me.barrier();
  });
  ranks.expect_success();
}

TEST_F(OfiFabric, AForkedChildThatEndsDoesNotTakeTheConnectionsAlong) {
  Processes ranks(kOfi, 2, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 0) {
      const pid_t child = fork();
      if (child == 0) {
        fabric.reset();
        _exit(0);
      }
      int status = -1;
      EXPECT_TRUE(eventually([&] { return waitpid(child, &status, WNOHANG) == child; }, 5s));
      EXPECT_EQ(status, 0);
    }
    me.barrier();
    const int peer = 1 - me.rank();
    fabric->publish(peer, {mine.id, 64}, 5, 0, 6);
    EXPECT_TRUE(await_flag(mine, 64, 5));
    EXPECT_EQ(fabric->peer_state(peer), PeerState::alive);
    me.barrier();
  });
  ranks.expect_success();
}

/// Somebody with libfabric who knows the address but not the job.
class Stranger {
 public:
  explicit Stranger(const Bytes& name)
      : library_(ofi::library(0)),
        fi_endpoint_(library_, ofi::find_provider(library_, 0, ofi_options()), 0),
        victim_(fi_endpoint_.insert(name)) {}

  template <class T>
  void send(const T& what) {
    post([&] { return fi_inject(fi_endpoint_.ep(), &what, sizeof what, victim_); });
  }
  void write(const std::uint64_t& word, std::uint64_t data, std::uint64_t key) {
    post([&] {
      return fi_inject_writedata(fi_endpoint_.ep(), &word, sizeof word, data, victim_, 0, key);
    });
  }

 private:
  void post(const std::function<ssize_t()>& call) {
    fi_cq_data_entry entry;
    const auto poll = [&] {
      if (fi_cq_read(fi_endpoint_.cq(), &entry, 1) == -FI_EAVAIL) {
        fi_cq_err_entry error{};
        fi_cq_readerr(fi_endpoint_.cq(), &error, 0);
      }
    };
    EXPECT_TRUE(eventually([&] {
      poll();
      return call() != -FI_EAGAIN;
    }));
    for (int i = 0; i < 200; ++i, std::this_thread::sleep_for(100us)) poll();
  }

  const ofi::Library& library_;
  ofi::FiEndpoint fi_endpoint_;
  fi_addr_t victim_;
};

/// A connection to the port of an endpoint, with these bytes; closed by the caller.
int connected(const Bytes& name, const Bytes& says) {
  sockaddr_storage to{};
  std::memcpy(&to, name.data(), name.size());
  const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(
      connect(fd, reinterpret_cast<const sockaddr*>(&to), static_cast<socklen_t>(name.size())), 0);
  if (!says.empty()) {
    EXPECT_GT(::send(fd, says.data(), says.size(), MSG_NOSIGNAL), 0);
  }
  return fd;
}

TEST_F(OfiFabric, StrangersAtThePortDoNoHarm) {
  Processes ranks(kOfi, 2, [](Rank& me) {
    me.bootstrap.record();
    const auto fabric = me.make();
    const auto handshakes = me.bootstrap.gathered()[1];
    const Bytes victim = ofi::handshake_from(handshakes[0], me.rank(), 0).names[0];
    const Segment mine = me.connect(*fabric, 1 << 20);
    attach_peers(me, *fabric, mine);
    std::vector<int> open;
    if (me.rank() == 1) {
      open.push_back(connected(victim, {}));  // says nothing
      for (const unsigned seed : {1u, 2u, 3u}) {
        std::mt19937 random(kSeed + seed);
        Bytes garbage(10'000 * seed);
        for (std::byte& byte : garbage) byte = static_cast<std::byte>(random());
        open.push_back(connected(victim, garbage));
      }
      open.push_back(connected(victim, Bytes(8, std::byte{3})));  // half a header
      Stranger stranger(victim);
      ofi::Message message{.kind = ofi::MessageKind::signal, .source = 1};
      message.sequence = 2;
      message.value = 99;
      message.flag_offset = 512 + 64;  // whose first value rank 1 has published
      stranger.send(message);
      message.kind = ofi::MessageKind::bye;
      stranger.send(message);
      stranger.send(Bytes::value_type{7});
      stranger.send(std::array<std::byte, 100>{});
      Stranger(victim).write(99, ofi::piece_data({}, 1, 0), 12345);  // a key that is none
    }
    me.barrier();
    if (me.rank() == 0) {
      EXPECT_EQ(flag_value(mine, 512 + 64), 1u);
      EXPECT_EQ(flag_value(mine, 0), 0u);
    }
    EXPECT_EQ(fabric->peer_state(1 - me.rank()), PeerState::alive);
    const Bytes data(100'000, std::byte{5});
    for (std::uint64_t round = 1; round <= 3; ++round) {
      const std::uint64_t at = 4096 + round * (1 << 17);  // the peer may be a round ahead
      fabric->put(1 - me.rank(), {mine.id, at}, data.data(), data.size(), round);
      fabric->publish(1 - me.rank(), {mine.id, 64}, round, data.size(), round);
      ASSERT_TRUE(await_flag(mine, 64, round));
      EXPECT_EQ(mine.data[at + 99'999], std::byte{5});
    }
    me.barrier();
    for (const int fd : open) close(fd);
  });
  ranks.expect_success();
}

TEST_F(OfiFabric, AnEndpointThatIsLinkedWithNobodyBelievesNobody) {
  Processes ranks(kOfi, 2, [](Rank& me) {
    me.bootstrap.record();
    OfiOptions options = ofi_options();
    options.nics = me.rank() == 0 ? "127.0.0.1,127.0.0.2" : "127.0.0.1";
    const auto fabric = make_ofi_fabric(me.bootstrap, options, kDeadline);
    const auto names = ofi::handshake_from(me.bootstrap.gathered()[1][0], me.rank(), 0).names;
    ASSERT_EQ(names.size(), 2u);
    const Segment mine = me.connect(*fabric, 4096);
    attach_peers(me, *fabric, mine);
    if (me.rank() == 1) {
      // There the key of rank 1 was never made: it is zeros.
      for (const Bytes& name : names) {
        Stranger stranger(name);
        ofi::Message message{.kind = ofi::MessageKind::signal, .source = 1};
        message.sequence = 1;
        message.value = 99;
        message.stream = ofi::kStreamMask + 1;
        stranger.send(message);
        message.kind = ofi::MessageKind::bye;
        stranger.send(message);
      }
    }
    me.barrier();
    EXPECT_EQ(flag_value(mine, 0), 0u);
    fabric->publish(1 - me.rank(), {mine.id, 64}, 5, 0, 6);  // nobody said goodbye
    EXPECT_TRUE(await_flag(mine, 64, 5));
    me.barrier();
  });
  ranks.expect_success();
}

TEST_F(OfiFabric, OptionsThatCannotBe) {
  run_ranks({"ofi", "ofi", false}, 1, [](Rank& me) {
    const auto refused = [&](ErrorKind kind, const OfiOptions& options, const char* words) {
      expect_error(kind, {words}, [&] { make_ofi_fabric(me.bootstrap, options, kDeadline); });
    };
    refused(ErrorKind::invalid_argument, {.host = "0.0.0.0"}, "all interfaces");
    refused(ErrorKind::invalid_argument, {.host = "::"}, "all interfaces");
    refused(ErrorKind::invalid_argument, {.host = "::ffff:0.0.0.0"}, "all interfaces");
    for (const char* everybody : {"224.0.0.1", "255.255.255.255", "127.255.255.255", "ff02::1"}) {
      refused(ErrorKind::invalid_argument, {.host = everybody}, "none of this machine's");
    }
    for (const char* all : {"0.0.0.0", "::", "::ffff:0.0.0.0"}) {
      refused(ErrorKind::unsupported, {.nics = all}, all);
    }
    refused(ErrorKind::unsupported, {.provider = "shm"}, "shm");
    refused(ErrorKind::invalid_argument, {.host = "no such host"}, "no such host");
    refused(ErrorKind::invalid_argument, {.endpoints = 9}, "endpoints are 9");
    refused(ErrorKind::invalid_argument, {.traffic_class = "fast"}, "\"fast\"");
    refused(ErrorKind::unsupported, {.provider = "nonsense"}, "nonsense");
    refused(ErrorKind::invalid_argument, {.host = "192.0.2.99"}, "none of this machine's");
  });
}

/// Its thread sleeps when nothing moves, but for signs of life: it once polled all the time.
TEST_F(OfiFabric, AnIdleRankSleeps) {
  for (const char* provider : {"", "tcp;ofi_rxm"}) {
    Processes ranks(kOfi, 2, [provider](Rank& me) {
      auto fabric = make_ofi_fabric(me.bootstrap, {.provider = provider}, kDeadline);
      const Segment mine = me.connect(*fabric, 4096);
      attach_peers(me, *fabric, mine);
      // On a busy machine connections take their time to settle: one quiet half second will do. A
      // thread that polls has none.
      long switches = 0;
      for (int attempt = 0; attempt < 20; ++attempt) {
        rusage before{}, after{};
        getrusage(RUSAGE_SELF, &before);
        std::this_thread::sleep_for(500ms);
        getrusage(RUSAGE_SELF, &after);
        switches = after.ru_nvcsw - before.ru_nvcsw;
        if (switches < 600) break;
      }
      EXPECT_LT(switches, 600) << provider;
      me.barrier();
    });
    ranks.expect_success();
  }
}

TEST_F(OfiFabric, SeveralEndpointsCarryTheirOwnTags) {
  run_ranks({"ofi", "ofi", false}, 2, [](Rank& me) {
    OfiOptions options = ofi_options();
    options.endpoints = 3;
    options.traffic_class = "bulk_data";
    const auto fabric = make_ofi_fabric(me.bootstrap, options, kDeadline);
    const Segment mine = me.connect(*fabric, 1 << 20);
    const int peer = 1 - me.rank();
    for (std::uint64_t space = 0; space < 5; ++space) {  // of the group and of latency exchanges
      const std::uint64_t tag = space << 40 | 9;
      const Bytes data(5000, static_cast<std::byte>(space + 1));
      fabric->put(peer, {mine.id, 8192 * (space + 1)}, data.data(), data.size(), tag);
      fabric->publish(peer, {mine.id, 64 * space}, 1, data.size(), tag);
    }
    for (std::uint64_t space = 0; space < 5; ++space) {
      ASSERT_TRUE(await_flag(mine, 64 * space, 1));
      EXPECT_EQ(mine.data[8192 * (space + 1) + 4999], static_cast<std::byte>(space + 1));
    }
    me.barrier();
  });
}

}  // namespace
}  // namespace ferry::fabric::test
