// Ranks as processes that are killed or stopped. The parent stays single threaded, so that it can
// fork under every sanitizer.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "bootstrap/test_ranks.hpp"
#include "bootstrap/test_tcp.hpp"
#include "platform/test_child.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kBound = 40s;  // of any child's life

// Children that the destructor kills and reaps, whatever happened.
class Children {
 public:
  explicit Children(int count) : lines_(std::size_t(count)) {}

  // In order. Each line that `body` gives to `say` can be read by `heard`.
  void start(const std::function<void(const std::function<void(std::string)>&)>& body) {
    test::Lines& lines = lines_[children_.size()];
    children_.emplace_back(
        [&] {
          const auto say = [&](const std::string& line) { lines.say(line); };
          try {
            body(say);
          } catch (const Error& e) {
            say(std::string("error kind=") + name_of(e.kind()) +
                " peer=" + std::to_string(e.peer()) + " " + e.what());
          }
          return 0;
        },
        kBound);
    lines.listen();
  }
  test::Child& operator[](int index) { return children_[std::size_t(index)]; }
  std::string heard(int index, std::chrono::milliseconds within) {
    return lines_[std::size_t(index)].next(within);
  }

 private:
  std::vector<test::Lines> lines_;
  std::vector<test::Child> children_;
};

// Ranks that gather over and over until something ends them.
void start_ranks(Children& children, int size, std::chrono::milliseconds deadline) {
  const TcpOptions base = fresh_options(size);
  for (int r = 0; r < size; ++r) {
    children.start([&, r](const auto& say) {
      auto boot = tcp_bootstrap(as_rank(base, r));
      const std::vector<std::byte> mine(1000);
      for (int round = 0;; ++round) {
        boot->all_gather(mine, deadline);
        if (round == 20) say("under way");
      }
    });
  }
  for (int r = 0; r < size; ++r) ASSERT_EQ(children.heard(r, 20s), "under way");
}

TEST(TcpBootstrapKill, SurvivorsNameTheDeadRankWithinASecond) {
  for (int dead : {0, 1, 2}) {
    Children children(3);
    start_ranks(children, 3, 30000ms);
    const auto start = Clock::now();
    children[dead].kill();
    for (int r = 0; r < 3; ++r) {
      if (r == dead) continue;
      const std::string line = children.heard(r, 1000ms);
      EXPECT_EQ(line.rfind("error kind=peer failed peer=" + std::to_string(dead), 0), 0u)
          << "rank " << r << ": " << line;
    }
    EXPECT_LT(Clock::now() - start, 2s);
  }
}

TEST(TcpBootstrapKill, AStoppedRankIsNamedAtTheDeadline) {
  for (int stopped : {1, 0}) {
    Children children(3);
    start_ranks(children, 3, 1500ms);
    children[stopped].signal(SIGSTOP);
    const auto start = Clock::now();
    for (int r = 0; r < 3; ++r) {
      if (r == stopped) continue;
      const std::string line = children.heard(r, 5000ms);
      EXPECT_EQ(line.rfind("error kind=deadline peer=" + std::to_string(stopped), 0), 0u)
          << "rank " << r << ": " << line;
    }
    EXPECT_GT(Clock::now() - start, 1s);
  }
}

// A forked child neither hangs in the destructor nor ends the parent's membership.
TEST(TcpBootstrapKill, AForkedChildMayDestroyItsCopy) {
  Children children(1);
  children.start([](const auto& say) {
    auto boot = tcp_bootstrap(as_rank(fresh_options(1), 0));
    const auto end = test::Child([&] {
                       const Error e = error_from([&] { boot->all_gather({}, 1s); });
                       boot.reset();
                       return e.kind() == ErrorKind::unsupported ? 0 : 1;
                     }).wait();
    boot->all_gather({}, 5s);
    boot.reset();
    say(end.good() ? "fine" : "the child failed");
  });
  EXPECT_EQ(children.heard(0, 20s), "fine");
}

}  // namespace
}  // namespace ferry::bootstrap
