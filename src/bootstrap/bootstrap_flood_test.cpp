// Strangers who knock at the store without end, while honest ranks join.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "bootstrap/store_client.hpp"
#include "bootstrap/store_thread.hpp"
#include "bootstrap/test_ranks.hpp"
#include "bootstrap/test_tcp.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;

std::vector<std::byte> hello_of(int rank, int size) {
  StoreClient client({.rank = rank, .size = size, .secret = "x", .nonce = random_nonce()});
  std::vector<std::byte> bytes;
  for (FrameQueue& output = client.output(); !output.empty();) {
    const auto piece = output.front();
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    output.written(piece.size());
  }
  return bytes;
}

/// Connections without end: silent ones, such as say hello and prove nothing, and others that say
/// what is no frame. `pause`: between two of a kind.
class Flood {
 public:
  explicit Flood(const TcpOptions& store, std::chrono::microseconds pause = {})
      : store_(store), pause_(pause) {
    const std::vector<std::byte> noise(100, std::byte{0x5a});
    for (const auto& words : {std::vector<std::byte>(), hello_of(1, store_.size), noise}) {
      threads_.emplace_back([this, words] { run(words); });
    }
  }
  ~Flood() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  int connections() const { return made_; }

 private:
  void run(const std::vector<std::byte>& words) {
    constexpr std::size_t kHeld = 150;
    std::deque<Socket> held;
    auto next = std::chrono::steady_clock::now();
    while (!over_) {
      std::this_thread::sleep_until(next);
      next += pause_;
      held.push_back(connected_to(store_));
      if (!held.back()) {
        held.pop_back();
        continue;
      }
      ++made_;
      reset_when_closed(held.back());
      if (!words.empty()) write_to(held.back(), words);
      if (held.size() > kHeld) held.pop_front();
    }
  }

  const TcpOptions store_;
  const std::chrono::microseconds pause_;
  std::atomic<bool> over_{false};
  std::atomic<int> made_{0};
  std::vector<std::thread> threads_;
};

TEST(Flood, RanksJoinThroughIt) {
  TcpOptions base = fresh_options(6);
  base.deadline = 10s;
  std::atomic<bool> flooded{false};
  int strangers = 0;
  std::thread flooding([&] {
    const Flood flood(base);
    while (!flooded) std::this_thread::sleep_for(1ms);
    strangers = flood.connections();
  });
  run_ranks_well(6, [&](int r) {
    if (r > 0) std::this_thread::sleep_for(r * 50ms);
    tcp_bootstrap(as_rank(base, r))->all_gather(bytes_of("x"), 10s);
  });
  flooded = true;
  flooding.join();
  EXPECT_GT(strangers, 300);
}

// Ranks come one a second while 2000 strangers a second do; a machine that is slower has fewer.
TEST(Flood, FourRanksJoinThroughTwoThousandASecond) {
  TcpOptions base = fresh_options(4);
  base.deadline = 10s;
  std::atomic<int> strangers{0};
  run_ranks_well(5, [&](int r) {
    if (r == 4) {
      std::this_thread::sleep_for(200ms);
      const Flood flood(base, 1500us);
      std::this_thread::sleep_for(3s);
      strangers = flood.connections();
      return;
    }
    std::this_thread::sleep_for(r * 900ms);
    const auto bootstrap = tcp_bootstrap(as_rank(base, r));
    EXPECT_EQ(bootstrap->all_gather(bytes_of("x"), 10s).size(), 4u);
    EXPECT_EQ(bootstrap->all_gather(bytes_of("y"), 10s).size(), 4u);
  });
  EXPECT_GT(strangers, 100);
  RecordProperty("strangers", strangers);
}

/// A store without its rank 0.
struct Store {
  TcpOptions base = fresh_options(2);
  StoreThread::Config config{
      .server = {.size = 2, .secret = base.secret},
      .listener = listen_at({base.address, base.port}, 0),
      .own = {},
  };
  Socket rank0{};
  std::unique_ptr<StoreThread> thread{};
  void start() {
    std::tie(rank0, config.own) = socket_pair(0);
    thread = std::make_unique<StoreThread>(std::move(config));
  }
};

// What waits in the backlog is taken in one go: the first of them is an honest rank.
TEST(Flood, AHelloThatIsThereIsReadBeforeItsConnectionGoes) {
  Store store;
  const Socket rank = connected_to(store.base);
  write_to(rank, hello_of(1, 2));
  std::vector<Socket> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(connected_to(store.base));
  store.start();
  write_to(store.rank0, hello_of(0, 2));
  for (const Socket* one : std::initializer_list<const Socket*>{&rank, &store.rank0}) {
    ASSERT_TRUE(comes(*one, 5s));
    std::vector<std::byte> answer(256);
    EXPECT_GT(read_from(*one, answer).bytes, 0u);  // of a challenge; no hang-up
  }
}

// Answers every hello with a challenge and hangs up, until its end.
void challenge_only(const Socket& listener, const TcpOptions& store,
                    const std::atomic<bool>& over) {
  while (!over) {
    int error = 0;
    if (!comes(listener, 10ms)) continue;
    const Socket rank = accept_from(listener, error);
    StoreServer server({.size = store.size, .secret = store.secret});
    const auto id = server.open(std::chrono::steady_clock::now());
    std::byte one{};
    const auto reads_one = [&] { return comes(rank, 5s) && read_from(rank, {&one, 1}).bytes == 1; };
    while (server.output(id).empty() && reads_one()) server.receive(id, {&one, 1});
    for (auto piece = server.output(id); !piece.empty(); piece = server.output(id)) {
      write_to(rank, piece);
      server.written(id, piece.size());
    }
    shut_down(rank, Direction::sending);
    while (reads_one()) {
    }
  }
}

TEST(Flood, AStoreThatLetsNobodyInWasFoundNevertheless) {
  TcpOptions options = as_rank(fresh_options(2), 1);
  options.deadline = 1s;
  const Socket listener = listen_at({options.address, options.port}, 0);
  std::atomic<bool> over{false};
  std::thread store([&] { challenge_only(listener, options, over); });
  const Error e = error_from([&] { tcp_bootstrap(options); });
  over = true;
  store.join();
  EXPECT_EQ(e.kind(), ErrorKind::deadline);
  EXPECT_TRUE(contains(e, "did not let this rank in within 1 s")) << e.what();
}

}  // namespace
}  // namespace ferry::bootstrap
