// Ranks as processes that are killed or stopped. The parent stays single threaded, so that it can
// fork under every sanitizer; the children report through a pipe and end by _exit.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <string>

#include "bootstrap/test_ranks.hpp"
#include "bootstrap/test_tcp.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kBound = 40s;  // of any child's life

// Children that the destructor kills and reaps, whatever happened.
class Children {
 public:
  explicit Children(int count) : pids_(std::size_t(count)), pipes_(std::size_t(count)) {}
  ~Children() {
    for (pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Each line that `body` gives to `say` can be read by `heard`.
  void start(int index, const std::function<void(const std::function<void(std::string)>&)>& body) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::alarm(unsigned(std::chrono::seconds(kBound).count()));
      const auto say = [&](std::string line) {
        line += '\n';
        if (::write(ends[1], line.data(), line.size()) < 0) ::_exit(3);
      };
      try {
        body(say);
      } catch (const Error& e) {
        say(std::string("error kind=") + name_of(e.kind()) + " peer=" + std::to_string(e.peer()) +
            " " + e.what());
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    pids_[std::size_t(index)] = pid;
    pipes_[std::size_t(index)] = Socket(ends[0]);
  }
  pid_t pid(int index) const { return pids_[std::size_t(index)]; }

  std::string heard(int index, std::chrono::milliseconds within) {
    const auto due = Clock::now() + within;
    std::string line;
    while (Clock::now() < due) {
      pollfd polled{.fd = pipes_[std::size_t(index)].get(), .events = POLLIN, .revents = 0};
      if (::poll(&polled, 1, 20) <= 0) continue;
      char c = 0;
      if (::read(polled.fd, &c, 1) != 1) return line + "(end)";
      if (c == '\n') return line;
      line += c;
    }
    return line + "(nothing within " + std::to_string(within.count()) + " ms)";
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<Socket> pipes_;
};

// Ranks that gather over and over until something ends them.
void start_ranks(Children& children, int size, std::chrono::milliseconds deadline) {
  const TcpOptions base = fresh_options(size);
  for (int r = 0; r < size; ++r) {
    children.start(r, [&, r](const auto& say) {
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
    ::kill(children.pid(dead), SIGKILL);
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
    ::kill(children.pid(stopped), SIGSTOP);
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
  children.start(0, [](const auto& say) {
    auto boot = tcp_bootstrap(as_rank(fresh_options(1), 0));
    const pid_t child = ::fork();
    if (child == 0) {
      const Error e = error_from([&] { boot->all_gather({}, 1s); });
      boot.reset();
      ::_exit(e.kind() == ErrorKind::unsupported ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    boot->all_gather({}, 5s);
    boot.reset();
    say(WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "fine" : "the child failed");
  });
  EXPECT_EQ(children.heard(0, 20s), "fine");
}

}  // namespace
}  // namespace ferry::bootstrap
