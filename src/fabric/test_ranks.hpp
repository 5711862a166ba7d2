// For the tests of this folder: ranks as threads or as forked processes, always bounded in time.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/test_errors.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/fabric.hpp"
#include "fabric/local/local.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/shm/shm.hpp"
#include "fabric/sim/sim.hpp"
#include "platform/library.hpp"
#include "platform/test_child.hpp"
#include "protocol/watch.hpp"

namespace ferry::fabric::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;
using ferry::test::expect_error;

inline constexpr std::chrono::nanoseconds kDeadline = 20s;
inline constexpr std::size_t kMaxRanks = 8;
inline constexpr unsigned kSeed = 20260727;  // of every random choice in these tests

/// Memory that all ranks share, also after fork: carries the tests' own all-gather and notes.
struct Board {
  struct Slot {
    std::uint64_t bytes;
    std::array<std::byte, 1024> data;
  };
  std::array<std::atomic<std::uint64_t>, kMaxRanks> arrived;
  std::array<std::array<Slot, 2>, kMaxRanks> slots;
  std::array<std::atomic<std::int64_t>, 64> notes;
};

inline std::shared_ptr<Board> make_board() {
  return std::static_pointer_cast<Board>(ferry::test::shared_block(sizeof(Board)));
}

inline std::int64_t nanoseconds_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

/// Waits for a condition that another rank or the kernel makes true; false after `limit`.
inline bool eventually(const std::function<bool()>& condition,
                       std::chrono::nanoseconds limit = kDeadline) {
  const auto end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

/// All-gather over a Board; two slots suffice, as in a Swap.
class BoardBootstrap final : public Bootstrap {
 public:
  BoardBootstrap(Board& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<Bytes> all_gather(std::span<const std::byte> mine, std::chrono::nanoseconds deadline,
                                const OnWait& on_wait) override {
    const std::uint64_t generation = ++generation_;
    auto& slot = board_.slots[index(rank_)][generation % 2];
    if (mine.size() > slot.data.size()) throw std::length_error("the test's slots are too small");
    slot.bytes = mine.size();
    if (!mine.empty()) std::memcpy(slot.data.data(), mine.data(), mine.size());
    board_.arrived[index(rank_)].store(generation, std::memory_order_release);
    std::vector<Bytes> all;
    for (int r = 0; r < size_; ++r) {
      const bool came = eventually(
          [&] {
            if (on_wait) on_wait();
            return board_.arrived[index(r)].load(std::memory_order_acquire) >= generation;
          },
          deadline);
      if (!came) {
        throw Error(ErrorKind::deadline, "rank " + std::to_string(r) + " did not come",
                    {.rank = rank_, .peer = r});
      }
      const auto& from = board_.slots[index(r)][generation % 2];
      all.emplace_back(from.data.begin(), from.data.begin() + static_cast<long>(from.bytes));
    }
    if (record_) gathered_.push_back(all);
    return all;
  }

  /// From now on keeps what all_gather returns.
  void record() { record_ = true; }
  const std::vector<std::vector<Bytes>>& gathered() const { return gathered_; }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  Board& board_;
  int rank_;
  int size_;
  std::uint64_t generation_ = 0;
  bool record_ = false;
  std::vector<std::vector<Bytes>> gathered_;
};

/// What is under test, and what its ranks are.
struct Setting {
  const char* name;
  const char* fabric;  // "local", "shm", "sim", "ofi"
  bool processes;
};

inline void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name;
}

/// FERRY_OFI_PROVIDER runs the same tests over another provider.
inline OfiOptions ofi_options() {
  OfiOptions options;
  if (const char* provider = std::getenv("FERRY_OFI_PROVIDER")) options.provider = provider;
  return options;
}

/// Why the ofi fabric cannot be tested here; empty: it can.
inline std::string no_ofi() {
  if (!ofi_is_built()) return "built without the headers of libfabric";
  static const Library library("libfabric.so.1");
  return library ? "" : "libfabric.so.1 is not installed";
}

constexpr bool thread_sanitizer() {
#if defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

/// One rank of a test.
struct Rank {
  const Setting& setting;
  Board& board;
  BoardBootstrap bootstrap;

  int rank() const { return bootstrap.rank(); }
  int size() const { return bootstrap.size(); }
  void barrier() { bootstrap.all_gather({}, kDeadline, {}); }

  std::unique_ptr<Fabric> make(SimOptions options = {}) {
    const std::string kind = setting.fabric;
    if (kind == "local") return make_local_fabric(bootstrap, kDeadline);
    if (kind == "shm") return make_shm_fabric(bootstrap, kDeadline);
    if (kind == "ofi") return make_ofi_fabric(bootstrap, ofi_options(), kDeadline);
    // Every rank in a domain of its own.
    if (kind == "local+sim") return make_domains(1, options);
    if (kind == "shm+copies") {
      return make_domain_fabric(Domains::blocks(size(), 1), make_shm_fabric(bootstrap, kDeadline));
    }
    if (kind == "shm+ofi") {
      auto inside = make_shm_fabric(bootstrap, kDeadline);
      return make_domain_fabric(Domains::blocks(size(), 1), std::move(inside),
                                make_ofi_fabric(bootstrap, ofi_options(), kDeadline));
    }
    options.seed = kSeed;
    return make_sim_fabric(bootstrap, options, kDeadline);
  }

  /// Domains of so many ranks: local inside, sim across.
  std::unique_ptr<Fabric> make_domains(int domain_size, SimOptions options = {}) {
    options.seed = kSeed;
    auto inside = make_local_fabric(bootstrap, kDeadline);
    return make_domain_fabric(Domains::blocks(size(), domain_size), std::move(inside),
                              make_sim_fabric(bootstrap, options, kDeadline));
  }

  /// Registers on every rank, attaches everywhere, seals.
  Segment connect(Fabric& fabric, std::size_t bytes) {
    Segment mine = fabric.register_memory(bytes);
    const auto handles = bootstrap.all_gather(mine.handle, kDeadline, {});
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) fabric.attach(peer, mine.id, bytes, handles[std::size_t(peer)]);
    }
    barrier();
    fabric.seal(mine.id);
    return mine;
  }
};

/// Waits until the flag word at `offset` of own memory is `value` or more.
inline bool await_flag(const Segment& mine, std::uint64_t offset, std::uint64_t value,
                       std::chrono::nanoseconds limit = kDeadline,
                       std::chrono::nanoseconds slice = 50ms) {
  const protocol::Flag flag{reinterpret_cast<std::uint64_t*>(mine.data + offset)};
  protocol::DeadlineWatch watch(limit, 0, static_cast<std::uint64_t>(slice.count()));
  return flag.wait_until([value](std::uint64_t seen) { return seen >= value; }, watch).ok();
}

/// The value of a flag word of own memory.
inline std::uint64_t flag_value(const Segment& mine, std::uint64_t offset) {
  const protocol::Flag flag{reinterpret_cast<std::uint64_t*>(mine.data + offset)};
  return flag.load(protocol::order::acquire);
}

using Body = std::function<void(Rank&)>;

/// Ranks as processes. Ends them in every case; they stay zombies until all have ended.
class Processes {
 public:
  Processes(const Setting& setting, int ranks, const Body& body) : board_(make_board()) {
    for (int r = 0; r < ranks; ++r) {
      children_.emplace_back([&, r] { return child(setting, r, ranks, body); });
      reaped_.push_back(false);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  ferry::test::Child& operator[](int rank) { return children_[static_cast<std::size_t>(rank)]; }
  Board& board() { return *board_; }

  /// Whether the rank has ended; does not reap it.
  bool ended(int rank) const { return children_[static_cast<std::size_t>(rank)].ended(); }
  /// Waits for the end of a rank and reaps it.
  ferry::test::Child::End reap(int rank) {
    auto& one = children_[static_cast<std::size_t>(rank)];
    if (!eventually([&] { return one.ended(); })) {
      ADD_FAILURE() << "rank " << rank << " did not end in time";
      one.kill();
    }
    reaped_[static_cast<std::size_t>(rank)] = true;
    return one.wait();
  }
  /// Expects that all ranks but those in `killed` end well. Reaps only when all have ended.
  void expect_success(const std::vector<int>& killed = {}) {
    const int ranks = static_cast<int>(children_.size());
    for (int r = 0; r < ranks; ++r) {
      EXPECT_TRUE(eventually([&] { return ended(r); })) << "rank " << r << " did not end in time";
    }
    for (int r = 0; r < ranks; ++r) {
      if (reaped_[static_cast<std::size_t>(r)]) continue;
      const auto end = reap(r);
      const bool was_killed = std::find(killed.begin(), killed.end(), r) != killed.end();
      EXPECT_EQ(end.killed, was_killed) << "rank " << r;
      EXPECT_TRUE(was_killed || end.code == 0) << "rank " << r << " ended with " << end.code;
    }
  }

 private:
  int child(const Setting& setting, int rank, int ranks, const Body& body) {
    try {
      Rank context{setting, *board_, BoardBootstrap(*board_, rank, ranks)};
      body(context);
    } catch (const std::exception& e) {
      ADD_FAILURE() << "rank " << rank << ": " << e.what();
    }
    return ::testing::Test::HasFailure() ? 1 : 0;
  }

  std::shared_ptr<Board> board_;
  std::vector<ferry::test::Child> children_;
  std::vector<bool> reaped_;
};

/// Runs `body` on every rank and expects no failure.
inline void run_ranks(const Setting& setting, int ranks, const Body& body) {
  if (setting.processes) {
    Processes(setting, ranks, body).expect_success();
    return;
  }
  const auto board = make_board();
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank context{setting, *board, BoardBootstrap(*board, r, ranks)};
        body(context);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ferry::fabric::test
