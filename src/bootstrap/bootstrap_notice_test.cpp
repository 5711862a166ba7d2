// A rank that waits long for others says for whom, on stderr.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/log.hpp"
#include "bootstrap/test_ranks.hpp"
#include "bootstrap/test_tcp.hpp"
#include "platform/posix/test_stderr.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using test::Stderr;

class WaitNotice : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("FERRY_WAIT_NOTICE", "0.05", 1); }
  void TearDown() override { ::unsetenv("FERRY_WAIT_NOTICE"); }
  static void expect_none(const std::vector<std::optional<Error>>& errors) {
    for (const auto& e : errors) EXPECT_FALSE(e) << e->what();
  }
};

TEST_F(WaitNotice, ThreadsNameWhoIsMissing) {
  const Stderr err;
  const auto bootstraps = thread_bootstrap(5);
  std::atomic<bool> said{false};
  expect_none(run_ranks(5, [&](int r) {
    Bootstrap& bootstrap = *bootstraps[std::size_t(r)];
    bootstrap.set_stage("Group: attach");
    if (r == 4) said = err.comes("for other ranks (Group: attach): rank 4 did not come yet; ");
    bootstrap.all_gather(bytes_of("x"), 30s);
  }));
  EXPECT_TRUE(said) << err.text();
  EXPECT_NE(err.text().find("ferry: rank "), std::string::npos) << err.text();
}

TEST_F(WaitNotice, NamesWhoNeverReachedTheStoreAndWhoWasSilentThere) {
  const Stderr err;
  const TcpOptions base = fresh_options(6);
  const std::string where = "for other ranks at 127.0.0.1:" + std::to_string(base.port) + ": ";
  std::atomic<bool> said{false};
  expect_none(run_ranks(6, [&](int r) {
    if (r >= 3)
      said = err.comes(where + "ranks 3-5 never reached the store, rank 1 reached it but");
    const auto bootstrap = tcp_bootstrap(as_rank(base, r));
    if (r == 1) err.comes(where + "ranks 3-5 never reached the store, rank 1 reached it but");
    bootstrap->all_gather(bytes_of("x"), 30s);
  }));
  EXPECT_TRUE(said) << err.text();
}

TEST_F(WaitNotice, SaysThatRank0sStoreIsNotThere) {
  const Stderr err;
  const TcpOptions base = fresh_options(2);
  std::atomic<bool> said{false};
  expect_none(run_ranks(2, [&](int r) {
    if (r == 0) {
      said = err.comes("for rank 0's store at 127.0.0.1:" + std::to_string(base.port) +
                       " (last: Connection refused); ");
    }
    tcp_bootstrap(as_rank(base, r))->all_gather(bytes_of("x"), 30s);
  }));
  EXPECT_TRUE(said) << err.text();
}

TEST_F(WaitNotice, IsAnEventOfTheLogWhichNeverHasTheSecret) {
  ::setenv("FERRY_LOG", "debug", 1);
  const Stderr err;
  const TcpOptions base = fresh_options(2);
  std::atomic<bool> said{false};
  expect_none(run_ranks(2, [&](int r) {
    if (r == 1) said = err.comes("level=warn rank=0 event=wait seconds=0.");
    tcp_bootstrap(as_rank(base, r))->all_gather(bytes_of("x"), 30s);
  }));
  ::unsetenv("FERRY_LOG");
  read_log_level();
  const std::string text = err.text();
  EXPECT_TRUE(said) << text;
  EXPECT_NE(text.find("rank=1 event=bootstrap size=2 store=127.0.0.1:"), std::string::npos) << text;
  EXPECT_EQ(text.find(base.secret), std::string::npos) << text;
  EXPECT_EQ(text.find("has waited"), std::string::npos) << text;
}

TEST_F(WaitNotice, IsSilentWhenToldSo) {
  ::setenv("FERRY_WAIT_NOTICE", "0", 1);
  const Stderr err;
  const TcpOptions base = fresh_options(2);
  const auto bootstraps = thread_bootstrap(2);
  expect_none(run_ranks(2, [&](int r) {
    if (r == 0) std::this_thread::sleep_for(200ms);
    const auto bootstrap = tcp_bootstrap(as_rank(base, r));
    if (r == 0) std::this_thread::sleep_for(200ms);
    bootstrap->all_gather(bytes_of("x"), 30s);
    if (r == 0) std::this_thread::sleep_for(200ms);
    bootstraps[std::size_t(r)]->all_gather(bytes_of("x"), 30s);
  }));
  EXPECT_EQ(err.text(), "");
}

TEST_F(WaitNotice, RefusesAWrongTimeBeforeAnybodyIsAwaited) {
  ::setenv("FERRY_WAIT_NOTICE", "later", 1);
  for (const auto& make : std::initializer_list<std::function<void()>>{
           [] { thread_bootstrap(2); }, [] { tcp_bootstrap(fresh_options(2)); }}) {
    const Error e = error_from(make);
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
    EXPECT_TRUE(contains(e, "FERRY_WAIT_NOTICE is \"later\"")) << e.what();
  }
}

}  // namespace
}  // namespace ferry::bootstrap
