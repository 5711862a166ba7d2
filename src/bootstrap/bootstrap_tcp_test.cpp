#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <set>
#include <stdexcept>

#include "bootstrap/frame.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/store_errors.hpp"
#include "bootstrap/test_ranks.hpp"
#include "bootstrap/test_tcp.hpp"
#include "platform/host.hpp"
#include "platform/posix/test_address.hpp"
#include "platform/posix/test_limits.hpp"
#include "platform/posix/test_rights.hpp"
#include "platform/test_child.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(TcpBootstrap, EveryRankGetsEveryPartInOrder) {
  for (int n : {1, 2, 5}) {
    const TcpOptions base = fresh_options(n);
    run_ranks_well(n, [&](int r) {
      auto boot = tcp_bootstrap(as_rank(base, r));
      EXPECT_EQ(boot->rank(), r);
      EXPECT_EQ(boot->size(), n);
      for (int round = 0; round < 20; ++round) {
        const std::string mine(std::size_t((r * 7 + round) % 5), char('a' + r));
        const Parts parts = boot->all_gather(bytes_of(mine), 20s);
        ASSERT_EQ(parts.size(), std::size_t(n));
        for (int s = 0; s < n; ++s) {
          EXPECT_EQ(text_of(parts[std::size_t(s)]),
                    std::string(std::size_t((s * 7 + round) % 5), char('a' + s)));
        }
      }
    });
  }
}

TcpOptions at_unix_socket(int size) {
  TcpOptions options = fresh_options(size);
  options.address = "@ferry-test." + std::to_string(process_id());
  options.port = 0;
  options.secret.clear();
  return options;
}

TEST(TcpBootstrap, RanksOfAUserMeetAtAUnixSocketWithoutASecret) {
  const TcpOptions base = at_unix_socket(3);
  for (int again = 0; again < 2; ++again) {  // its name is free at once
    run_ranks_well(3, [&](int r) {
      auto boot = tcp_bootstrap(as_rank(base, r));
      EXPECT_EQ(boot->own_address(), "");
      const Parts parts = boot->all_gather(bytes_of(std::string(1 << 20, char('a' + r))), 20s);
      for (int s = 0; s < 3; ++s) EXPECT_EQ(text_of(parts[std::size_t(s)])[0], char('a' + s));
    });
  }
}

// In a child, which becomes another user: what it got, as its exit code.
int as_another_user(const std::function<int()>& body) {
  const auto end = test::Child([&] { return test::become_user(12345) ? body() : 100; }).wait();
  return end.killed ? -1 : end.code;
}

TEST(TcpBootstrap, AnotherUserIsNotLetInAtAUnixSocket) {
  if (user_id() != 0) GTEST_SKIP() << "only root can be another user";
  std::string problem;
  const StoreAddress place{at_unix_socket(1).address, 0};
  const SocketAddress address = resolve(place, 0, problem).at(0);
  int error = 0;
  const Socket listener = listen_at(place, 0);
  const auto connected = [&] {
    const Socket socket = connect_to(address, error);
    return socket ? connect_result(socket) : error;
  };
  EXPECT_EQ(connected(), 0);
  EXPECT_TRUE(accept_from(listener, error));
  EXPECT_EQ(as_another_user(connected), EPERM);  // nor would that user's rank take this store
  EXPECT_FALSE(accept_from(listener, error));
  EXPECT_EQ(error, 0);
}

/// A rank goes; the others meet anew at the same place, and still hold what they met with before.
void meet_again_without(int gone, const TcpOptions& base) {
  std::atomic<bool> is_gone{false};
  run_ranks_well(3, [&](int r) {
    auto held = tcp_bootstrap(as_rank(base, r));
    held->all_gather({}, 20s);
    if (r == gone) {
      held.reset();
      is_gone = true;
      return;
    }
    TcpOptions next = as_rank(base, r - (r > gone ? 1 : 0));
    next.size = 2;
    while (!is_gone) std::this_thread::sleep_for(1ms);
    if (next.rank == 0) std::this_thread::sleep_for(100ms);  // the other finds the store of before
    auto boot = tcp_bootstrap(next);
    const Parts parts = boot->all_gather(bytes_of(std::to_string(r)), 20s);
    EXPECT_EQ(text_of(parts[std::size_t(next.rank)]), std::to_string(r));
  });
}

TEST(TcpBootstrap, RanksThatAreLeftMeetAtTheSamePlaceAtOnce) {
  for (int gone = 0; gone < 3; ++gone) {
    meet_again_without(gone, fresh_options(3));
    meet_again_without(gone, at_unix_socket(3));
  }
}

TEST(TcpBootstrap, AStoreThatStillWaitsForRanksKeepsItsPlace) {
  const TcpOptions base = fresh_options(2);
  run_ranks_well(2, [&](int r) {
    auto boot = tcp_bootstrap(as_rank(base, r));
    if (r == 0) {
      const Error e = error_from([&] { tcp_bootstrap(as_rank(base, 0)); });
      EXPECT_EQ(e.kind(), ErrorKind::system) << e.what();
    }
    boot->all_gather({}, 20s);
  });
}

TEST(TcpBootstrap, LoopbackIsNoAddressForOthers) {
  const TcpOptions base = fresh_options(2);
  run_ranks_well(2, [&](int r) {
    auto boot = tcp_bootstrap(as_rank(base, r));
    EXPECT_EQ(boot->own_address(), "");
    boot->all_gather({}, 20s);
  });
}

TEST(TcpBootstrap, TheAddressOnTheWayToTheStoreIsKnown) {
  TcpOptions base = fresh_options(2);
  base.address = test::outer_address();
  if (base.address.empty()) GTEST_SKIP() << "no address but loopback";
  run_ranks_well(2, [&](int r) {
    auto boot = tcp_bootstrap(as_rank(base, r));
    EXPECT_EQ(boot->own_address(), base.address);
    boot->all_gather({}, 20s);
  });
}

TEST(TcpBootstrap, Rank0MayComeLast) {
  const TcpOptions base = fresh_options(3);
  run_ranks_well(3, [&](int r) {
    if (r == 0) std::this_thread::sleep_for(300ms);
    tcp_bootstrap(as_rank(base, r))->all_gather({}, 20s);
  });
}

// Rank 0 goes right after its last gather; a slow rank still gets a large answer.
TEST(TcpBootstrap, AnEarlyEndOfRank0LosesNoAnswer) {
  const TcpOptions base = fresh_options(3);
  const std::string large(4 << 20, 'x');
  run_ranks_well(3, [&](int r) {
    auto boot = tcp_bootstrap(as_rank(base, r));
    int polls = 0;
    const Parts parts = boot->all_gather(bytes_of(large), 30s, [&] {
      if (r == 2 && ++polls < 10) std::this_thread::sleep_for(30ms);
    });
    for (const auto& part : parts) EXPECT_EQ(part.size(), large.size());
  });
}

TEST(TcpBootstrap, MessagesAreBounded) {
  auto boot = tcp_bootstrap(as_rank(fresh_options(1), 0));
  const std::vector<std::byte> large(kMaxMessageBytes + 1);
  const Error e = error_from([&] { boot->all_gather(large, 5s); });
  EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
  EXPECT_EQ(boot->all_gather({}, 5s).size(), 1u);  // nothing was moved, all still works
}

TEST(TcpBootstrap, TooMuchTogetherIsNamed) {
  const TcpOptions base = fresh_options(5);
  const std::vector<std::byte> large(15 << 20);
  auto errors =
      run_ranks(5, [&](int r) { tcp_bootstrap(as_rank(base, r))->all_gather(large, 60s); });
  for (auto& e : errors) {
    ASSERT_TRUE(e);
    // Whoever was in the midst of sending when the limit was passed may see the end only.
    EXPECT_TRUE(e->kind() == ErrorKind::exhausted || e->kind() == ErrorKind::peer_left ||
                e->kind() == ErrorKind::peer_failed)
        << e->what();
  }
}

TEST(TcpBootstrap, DeadlineNamesTheRanksThatDidNotCome) {
  const TcpOptions base = fresh_options(4);
  const auto start = Clock::now();
  std::atomic<bool> over{false};
  auto errors = run_ranks(4, [&](int r) {
    if (r == 3) return;  // never comes
    auto boot = tcp_bootstrap(as_rank(base, r));
    if (r == 1) {  // comes, but does not call
      while (!over) std::this_thread::sleep_for(10ms);
      return;
    }
    try {
      boot->all_gather({}, r == 0 ? 1000ms : 20000ms);
    } catch (...) {
      if (r == 2) over = true;
      while (!over) std::this_thread::sleep_for(10ms);
      throw;
    }
  });
  EXPECT_LT(Clock::now() - start, 10s);
  for (int r : {0, 2}) {
    ASSERT_TRUE(errors[std::size_t(r)]);
    const Error& e = *errors[std::size_t(r)];
    EXPECT_EQ(e.kind(), ErrorKind::deadline) << e.what();
    EXPECT_EQ(e.rank(), r);
    EXPECT_EQ(e.peer(), 1);
    EXPECT_TRUE(contains(e, "rank 3 never reached the store")) << e.what();
    EXPECT_TRUE(contains(e, "rank 1 reached it but did not call all_gather")) << e.what();
  }
}

TEST(TcpBootstrap, ADestroyedRankIsNamedAtOnce) {
  for (int leaver : {1, 0}) {
    const TcpOptions base = fresh_options(3);
    const auto start = Clock::now();
    auto errors = run_ranks(3, [&](int r) {
      auto boot = tcp_bootstrap(as_rank(base, r));
      boot->all_gather({}, 20s);
      if (r == leaver) {
        std::this_thread::sleep_for(100ms);
        return;
      }
      boot->all_gather({}, 20s);
    });
    EXPECT_LT(Clock::now() - start, 10s);
    for (int r = 0; r < 3; ++r) {
      if (r == leaver) continue;
      ASSERT_TRUE(errors[std::size_t(r)]);
      EXPECT_EQ(errors[std::size_t(r)]->kind(), ErrorKind::peer_left);
      EXPECT_EQ(errors[std::size_t(r)]->peer(), leaver) << errors[std::size_t(r)]->what();
    }
  }
}

TEST(TcpBootstrap, OnWaitEndsTheWaitAndTheOthersHearOfIt) {
  const TcpOptions base = fresh_options(3);
  std::atomic<bool> thrown{false};
  auto errors = run_ranks(3, [&](int r) {
    if (r == 2) return;
    auto boot = tcp_bootstrap(as_rank(base, r));
    if (r == 0) {
      boot->all_gather({}, 20s);
      return;
    }
    int polls = 0;
    try {
      boot->all_gather({}, 20s, [&] {
        if (++polls == 10) throw std::runtime_error("stop");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
      EXPECT_EQ(error_from([&] { boot->all_gather({}, 1s); }).kind(), ErrorKind::interrupted);
    }
  });
  EXPECT_TRUE(thrown);
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->kind(), ErrorKind::peer_failed);
  EXPECT_EQ(errors[0]->peer(), 1);
}

TEST(TcpBootstrap, OnWaitEndsTheConnecting) {
  TcpOptions options = as_rank(fresh_options(2), 1);
  options.on_wait = [polls = 0]() mutable {
    if (++polls == 5) throw std::runtime_error("stop");
  };
  EXPECT_THROW(tcp_bootstrap(options), std::runtime_error);
}

TEST(TcpBootstrap, ConnectingHasADeadline) {
  TcpOptions options = as_rank(fresh_options(2), 1);
  options.deadline = 300ms;
  const auto start = Clock::now();
  const Error e = error_from([&] { tcp_bootstrap(options); });
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_EQ(e.kind(), ErrorKind::deadline);
  EXPECT_EQ(e.peer(), 0);
  EXPECT_TRUE(contains(e, "Connection refused")) << e.what();
}

// One group of two; meanwhile `visit` is done to its store; then the group must still work.
void undisturbed_by(const std::function<void(const TcpOptions&)>& visit) {
  const TcpOptions base = fresh_options(2);
  std::atomic<int> joined{0};
  std::atomic<bool> visited{false};
  std::thread visitor([&] {
    while (joined < 2) std::this_thread::sleep_for(1ms);
    visit(base);
    visited = true;
  });
  run_ranks_well(2, [&](int r) {
    auto boot = tcp_bootstrap(as_rank(base, r));
    ++joined;
    for (bool last = false; !last;) {
      last = visited;
      // All ranks must agree on which round is the last.
      std::vector<std::byte> mine{std::byte(last)};
      const Parts parts = boot->all_gather(mine, 20s);
      EXPECT_EQ(parts[std::size_t(r)], mine);
      last = parts[0][0] == std::byte{1} && parts[1][0] == std::byte{1};
    }
  });
  visitor.join();
}

void refused(TcpOptions visitor, const std::string& why) {
  visitor.deadline = 10s;
  const Error e = error_from([&] { tcp_bootstrap(visitor); });
  EXPECT_EQ(e.kind(), ErrorKind::refused) << e.what();
  EXPECT_TRUE(contains(e, why)) << e.what();
  EXPECT_FALSE(contains(e, visitor.secret)) << e.what();
}

TEST(TcpBootstrap, RefusesASecondRankAndTheFirstStaysUnharmed) {
  undisturbed_by([](const TcpOptions& base) {
    refused(as_rank(base, 1), "another process is already there as rank 1");
  });
}

TEST(TcpBootstrap, RefusesAWrongSecret) {
  undisturbed_by([](const TcpOptions& base) {
    TcpOptions visitor = as_rank(base, 1);
    visitor.secret = "guessed-by-a-stranger";
    refused(visitor, "rank 1: the store at " + StoreAddress{base.address, base.port}.text() +
                         " refused this process: this process has another secret");
  });
}

TEST(TcpBootstrap, RefusesAWrongSize) {
  undisturbed_by([](const TcpOptions& base) {
    TcpOptions visitor = as_rank(base, 2);
    visitor.size = 7;
    refused(visitor, "started for 7 ranks, expected 2");
  });
}

TEST(TcpBootstrap, RefusesAnotherVersionWithAFrameThatItCanRead) {
  undisturbed_by([](const TcpOptions& base) {
    FrameHeader header{.type = FrameType::hello, .rank = 1, .length = 99};
    header.version = 7;
    const auto bytes = encode_header(header);
    const std::string answer = talk_to(base, {bytes.begin(), bytes.end()});
    ASSERT_EQ(answer.size(), kHeaderBytes + 20);
    EXPECT_EQ(answer[6], char(FrameType::refused));
    EXPECT_EQ(answer[kHeaderBytes], 2);                  // other_version
    EXPECT_EQ(answer[kHeaderBytes + 4], kStoreVersion);  // expected
    EXPECT_EQ(answer[kHeaderBytes + 12], 7);             // got
  });
}

TEST(TcpBootstrap, GarbageAndSilentVisitorsDisturbNobody) {
  undisturbed_by([](const TcpOptions& base) {
    std::vector<Socket> silent;
    for (int i = 0; i < 200; ++i) silent.push_back(connected_to(base));  // half-open, more than 66
    EXPECT_EQ(talk_to(base, bytes_of("GET / HTTP/1.1\r\nHost: me\r\n\r\n")), "");
    EXPECT_EQ(talk_to(base, std::vector<std::byte>(1 << 20, std::byte{0xff})), "");
    // A header that announces much, before anything was proved.
    const auto bytes = encode_header({.type = FrameType::give, .rank = 1, .length = 0xffffffff});
    EXPECT_EQ(talk_to(base, {bytes.begin(), bytes.end()}), "");
    // A rank that knocks now still comes through: it is refused for the right reason.
    refused(as_rank(base, 1), "already there");
  });
}

TEST(TcpBootstrap, WhatIsNoStoreIsSaidToBeNone) {
  TcpOptions options = as_rank(fresh_options(2), 1);
  const Socket listener = listen_at({options.address, options.port}, 0);
  std::thread other([&] {
    int error = 0;
    Socket visitor;
    while (!(visitor = accept_from(listener, error))) std::this_thread::sleep_for(1ms);
    write_to(visitor, bytes_of("SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"));
    std::this_thread::sleep_for(100ms);
  });
  const Error e = error_from([&] { tcp_bootstrap(options); });
  other.join();
  EXPECT_EQ(e.kind(), ErrorKind::refused);
  EXPECT_TRUE(contains(e, "is not a Ferry store")) << e.what();
}

TEST(TcpBootstrap, ATakenPortSaysWhatToDo) {
  const TcpOptions options = as_rank(fresh_options(2), 0);
  const Socket listener = listen_at({options.address, options.port}, 0);
  const Error e = error_from([&] { tcp_bootstrap(options); });
  EXPECT_EQ(e.kind(), ErrorKind::system);
  EXPECT_TRUE(contains(e, "set FERRY_PORT")) << e.what();
}

TEST(TcpBootstrap, RefusesBadOptions) {
  const auto message = [](auto change) {
    TcpOptions options = as_rank(fresh_options(2), 0);
    change(options);
    const Error e = error_from([&] { tcp_bootstrap(options); });
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument) << e.what();
    return std::string(e.what());
  };
  EXPECT_NE(message([](auto& o) { o.port = 0; }).find("port is 0"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.rank = 2; }).find("rank is 2"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.size = 0; }).find("size is 0"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.secret = ""; }).find("secret is empty"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.address = ""; }).find("address is empty"), std::string::npos);
  EXPECT_NE(message([](auto& o) { o.address = "192.0.2.1"; }).find("none of this machine"),
            std::string::npos);
}

// Two jobs at once, also when somebody gives them the same port.
TEST(TcpBootstrap, TwoJobsDoNotMeet) {
  const TcpOptions one = fresh_options(2);
  TcpOptions two = fresh_options(2);
  two.secret = "the-other-job";
  run_ranks_well(4, [&](int i) {
    auto boot = tcp_bootstrap(as_rank(i < 2 ? one : two, i % 2));
    for (int round = 0; round < 20; ++round) {
      const std::string mine = std::to_string(i);
      const Parts parts = boot->all_gather(bytes_of(mine), 20s);
      EXPECT_EQ(text_of(parts[0]), i < 2 ? "0" : "2");
      EXPECT_EQ(text_of(parts[1]), i < 2 ? "1" : "3");
    }
  });
  undisturbed_by([&](const TcpOptions& base) {
    TcpOptions stray = as_rank(two, 1);
    stray.port = base.port;
    refused(stray, "another secret");
  });
}

TEST(TcpBootstrap, FiftyCyclesLeakNothing) {
  const auto cycle = [] {
    const TcpOptions base = fresh_options(3);
    run_ranks_well(3,
                   [&](int r) { tcp_bootstrap(as_rank(base, r))->all_gather(bytes_of("x"), 20s); });
  };
  cycle();  // what a first use keeps
  const auto descriptors = entries_of("/proc/self/fd");
  const auto threads = entries_of("/proc/self/task");
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
}

TEST(TcpBootstrap, WithoutFileDescriptorsARankSaysSoAtOnce) {
  const TcpOptions base = fresh_options(2);
  const auto start = Clock::now();
  for (int rank = 0; rank < 2; ++rank) {
    const test::NoFilesLeft none;
    const Error e = error_from([&] { tcp_bootstrap(as_rank(base, rank)); });
    EXPECT_EQ(e.kind(), ErrorKind::exhausted) << e.what();
    for (const char* word : {"too many open files", "96", "ulimit -n"}) {
      EXPECT_TRUE(contains(e, word)) << e.what();
    }
    EXPECT_TRUE(contains(e, "rank " + std::to_string(rank))) << e.what();
  }
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(TcpBootstrap, AStoreWithoutFileDescriptorsSaysThatItLetsNobodyIn) {
  const TcpOptions base = fresh_options(2);
  auto boot = tcp_bootstrap(as_rank(base, 0));
  test::NoFilesLeft none;
  none.give_back();
  const Socket visitor = connected_to(base);  // takes the one that is left
  const Error e = error_from([&] { boot->all_gather({}, 700ms); });
  EXPECT_EQ(e.kind(), ErrorKind::exhausted) << e.what();
  EXPECT_TRUE(contains(e, "could not let all ranks in")) << e.what();
  EXPECT_TRUE(contains(e, "too many open files")) << e.what();
}

TEST(StoreErrors, RefusedVisitorsAreSaidInSentences) {
  const Speaker who{.rank = 0, .size = 2, .store = "there:1"};
  Absences absences;
  absences.absent.listed = {1};
  absences.absent.total = 1;
  absences.refused = 1;
  absences.last_refusal = RefusalCode::wrong_secret;
  EXPECT_TRUE(contains(deadline_error(who, {}, 1s, absences),
                       "the store refused 1 connection: it had a wrong secret"));
  absences.refused = 3;
  absences.last_refusal = RefusalCode::group_over;
  EXPECT_TRUE(contains(deadline_error(who, {}, 1s, absences),
                       "the store refused 3 connections: the last one came after the ranks had "
                       "failed to meet"));
}

TEST(TcpBootstrap, SocketsAreClosedOnExec) {
  const std::set<int> before = open_descriptors();
  auto boot = tcp_bootstrap(as_rank(fresh_options(1), 0));
  int checked = 0;
  for (int fd : open_descriptors()) {
    if (before.count(fd) > 0) continue;
    EXPECT_TRUE(test::closes_on_exec(fd)) << fd;
    ++checked;
  }
  EXPECT_GE(checked, 4);  // listener, event, both ends of the own connection
}

TEST(TcpBootstrap, ListensOnlyWhereItWasTold) {
  const TcpOptions base = fresh_options(1);
  auto boot = tcp_bootstrap(as_rank(base, 0));
  TcpOptions elsewhere = base;
  elsewhere.address = "127.0.0.2";  // the same machine, another address
  EXPECT_FALSE(connected_to(elsewhere));
  EXPECT_TRUE(connected_to(base));
}

}  // namespace
}  // namespace ferry::bootstrap
