#include "fleet.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "device.hpp"
#include "fleet_board.hpp"

namespace ferry::conformance {
namespace {

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

/// All-gather over the board: two slots a rank, so that a slot is free again when everybody has
/// posted the next one.
AllGather gather_on(Board::Gather* gather, int rank, int size) {
  return [gather, rank, size, round = std::uint64_t{0}](std::span<const std::byte> mine) mutable {
    if (mine.size() > kGatherBytes) throw std::runtime_error("fleet: the all-gather is too small");
    const std::size_t slot = round++ % 2;
    Board::Gather& own = gather[rank];
    own.bytes[slot] = static_cast<std::uint32_t>(mine.size());
    std::copy(mine.begin(), mine.end(), own.data[slot]);
    own.posted.store(round, std::memory_order_release);
    std::vector<std::vector<std::byte>> all;
    for (int peer = 0; peer < size; ++peer) {
      const Board::Gather& theirs = gather[peer];
      while (theirs.posted.load(std::memory_order_acquire) < round) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      all.emplace_back(theirs.data[slot], theirs.data[slot] + theirs.bytes[slot]);
    }
    return all;
  };
}

Device device_of(const Fleet& fleet, int rank) {
  return fleet.gpus > 0 ? Device{DeviceKind::cuda, rank % fleet.gpus} : Device{};
}

void run_rank(Rank& rank, Board& board, const std::function<void(Rank&)>& body) {
  rank.begin("start");
  try {
    use_device(rank.where());
    body(rank);
  } catch (const std::exception& thrown) {
    rank.fail(std::string("threw: ") + thrown.what());
  }
  if (golden::Hash* hash = rank.hash()) {
    hash->add(static_cast<std::uint64_t>(rank.rank()));
    board.results += hash->value();
  }
  board.progress[rank.rank()].ended = true;
}

int stuck(const Board& board, const Fleet& fleet) {
  const std::int64_t limit =
      std::chrono::milliseconds(fleet.deadline).count() * (FERRY_EMULATED ? 6 : 1);
  for (int r = 0; r < fleet.ranks; ++r) {
    const Board::Progress& p = board.progress[r];
    if (!p.ended && p.since_ms != 0 && now_ms() - p.since_ms > limit) return r;
  }
  return -1;
}

void run_threads(Board& board, const Fleet& fleet, const std::function<void(Rank&)>& body) {
  auto boots = thread_bootstrap(fleet.ranks);
  std::vector<std::thread> threads;
  std::atomic<int> left{fleet.ranks};
  for (int r = 0; r < fleet.ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(board, r, fleet.ranks, fleet.wires, boots[static_cast<std::size_t>(r)],
                device_of(fleet, r));
      run_rank(rank, board, body);
      --left;
    });
  }
  for (int n = 0; left > 0; ++n) {
    std::this_thread::sleep_for(std::chrono::microseconds(n < 100 ? 200 : 5000));
    const int rank = stuck(board, fleet);
    if (rank < 0) continue;
    std::fprintf(stderr, "HANGS: rank %d, in: %s\n", rank, board.progress[rank].what);
    for (int i = 0; i < std::min(board.failures.load(), kMaxFailures); ++i) {
      std::fprintf(stderr, "%s\n", board.failure[i]);
    }
    std::_Exit(3);
  }
  for (std::thread& thread : threads) thread.join();
}

Rank Rank::without(int dead) const {
  const int rank = rank_ - (rank_ > dead ? 1 : 0);
  Rank left(board_, rank, size_ - 1, wires_,
            custom_bootstrap(rank, size_ - 1, gather_on(board_.left, rank, size_ - 1)), where_);
  left.seat_ = seat_;
  return left;
}

void Rank::begin(const std::string& what) {
  Board::Progress& mine = board_.progress[seat_];
  std::strncpy(mine.what, what.c_str(), kTextBytes - 1);
  mine.since_ms = now_ms();
}

void Rank::fail(const std::string& text) {
  board_.fail(seat_, text);
}

int Rank::failures() const {
  return board_.failures;
}

bool only_threads() {
  if (!can_fork()) return true;
#if defined(__SANITIZE_THREAD__)
  return true;
#elif defined(__has_feature)
  return __has_feature(thread_sanitizer);
#else
  return false;
#endif
}

bool sanitized() {
#if defined(__SANITIZE_ADDRESS__)
  return true;
#elif defined(__has_feature)
  return only_threads() || __has_feature(address_sanitizer);
#else
  return only_threads();
#endif
}

std::vector<std::string> run_fleet(const Fleet& fleet, const std::function<void(Rank&)>& body) {
  const std::shared_ptr<Board> board = make_board();
  const FabricKind fabric = fleet.wires.fabric;
  if (fabric == FabricKind::shm || (fabric == FabricKind::ofi && !only_threads())) {
    run_processes(*board, fleet, body);
  } else if (fleet.gpus > 0) {
    run_threads_in_child(*board, fleet, body);
  } else {
    run_threads(*board, fleet, body);
  }
  if (fleet.results != nullptr) *fleet.results += board->results;
  std::vector<std::string> lines;
  for (int i = 0; i < std::min(board->failures.load(), kMaxFailures); ++i) {
    lines.emplace_back(board->failure[i]);
  }
  if (board->failures > kMaxFailures) {
    lines.push_back("and " + std::to_string(board->failures - kMaxFailures) + " more");
  }
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

GroupConfig group_config(const Rank& rank, std::int64_t experts, std::size_t memory_bytes) {
  GroupConfig config;
  config.experts = experts;
  config.deadline = std::chrono::seconds(FERRY_EMULATED ? 60 : 10);
  config.memory_bytes = memory_bytes;
  config.fabric = rank.fabric();
  config.domain_size = rank.wires().domain_size;
  config.network = rank.wires().network;
  config.crossing = rank.wires().crossing;
  config.backend = Backend::host;
  if (rank.where().kind == DeviceKind::cuda) {
    config.backend = Backend::cuda;
    config.device = rank.where().index;
    config.deadline = std::chrono::seconds(30);
  }
  return config;
}

}  // namespace ferry::conformance
