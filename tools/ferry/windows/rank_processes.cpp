// Ranks as processes: this program anew with the same arguments. A rank does what the command does,
// without a word, until it comes to the call that started it; there it runs its body and ends.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

#include "platform/host.hpp"
#include "platform/pages.hpp"
#include "platform/process.hpp"
#include "platform/windows/child_process.hpp"
#include "run/ports.hpp"
#include "run/ranks.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {
namespace {

using WinClock = std::chrono::steady_clock;
constexpr const char* kRankVariable = "FERRY_RANK_OF_COMMAND";
constexpr auto kWinPoll = std::chrono::milliseconds(5);
constexpr int kTickEvery = 10;  // polls
constexpr auto kWinGrace = std::chrono::seconds(5);
constexpr unsigned kEndedByUs = 0xE0000001;

struct Said {
  char text[1024];
};

struct Started {
  Process process{};
  std::optional<ProcessEnd> end{};
  unsigned code() const { return static_cast<unsigned>(end->code); }
};

/// What its starter tells a process that this command has started as a rank of its own.
struct OwnRank {
  std::int64_t command = 0;  ///< process id of the starter; 0: this process is no rank
  int call = 0;              ///< which of its run_processes, from 0
  int rank = 0;
  std::uint16_t port = 0;
  std::string secret{};
};

const OwnRank& own_rank() {
  static const OwnRank told = [] {
    OwnRank own;
    std::istringstream words(environment_variable(kRankVariable).value_or(""));
    words >> own.command >> own.call >> own.rank >> own.port >> own.secret;
    return own;
  }();
  return told;
}

/// The process that has the memory: the starter of this rank, or this one.
std::int64_t command_process() {
  return own_rank().command != 0 ? own_rank().command : process_id();
}

[[noreturn]] void be_rank(const RankRun& run, const RankBody& body, Said& said) {
  const OwnRank& own = own_rank();
  TcpOptions options;
  options.rank = own.rank;
  options.size = run.ranks;
  options.port = own.port;
  options.secret = own.secret;
  const auto failure = failure_of([&] { body(options.rank, tcp_bootstrap(options)); });
  if (failure) std::strncpy(said.text, failure->c_str(), sizeof said.text - 1);
  windows::end_this_process(failure ? 1 : 0);
}

/// True when all have ended; sets `failed` when one did badly.
bool look_at(std::vector<Started>& ranks, bool& failed) {
  bool all = true;
  for (Started& rank : ranks) {
    if (!rank.end && (rank.end = end_of(rank.process))) failed = failed || rank.end->failed();
    all = all && rank.end;
  }
  return all;
}

void wait_for_all(const RankRun& run, std::vector<Started>& ranks) {
  bool failed = false, told = false;
  auto until = WinClock::now() + std::chrono::duration_cast<WinClock::duration>(run.limit);
  for (int n = 1; !look_at(ranks, failed); ++n) {
    const auto now = WinClock::now();
    if (failed && !told) until = std::min<WinClock::time_point>(until, now + kWinGrace);
    told = failed;
    for (const Started& rank : ranks) {
      if (now >= until && !rank.end) windows::end_process(rank.process, kEndedByUs);
    }
    std::this_thread::sleep_for(kWinPoll);
    if (run.tick && n % kTickEvery == 0) run.tick();
  }
}

}  // namespace

// Ranks are this program with the same arguments, so the n-th block of a rank is the n-th of the
// command.
std::shared_ptr<void> shared_with_ranks(std::size_t bytes) {
  static int made = 0;
  const std::string name = fmt::format("/ferry-command-{}-{}", command_process(), made++);
  SectionFailure failure;
  // Its name stays: a rank of a later run comes by the blocks of the earlier ones.
  const Section section = own_rank().command == 0 ? make_section(name, bytes, failure)
                                                  : open_section(name, bytes, SectionAccess::write,
                                                                 std::nullopt, failure);
  if (section.data == nullptr) {
    throw std::system_error(failure.error, std::generic_category(), "cannot map shared memory");
  }
  return {section.data, [bytes](void* data) { unmap_pages(static_cast<std::byte*>(data), bytes); }};
}

std::vector<RankFailure> run_processes(const RankRun& run, const RankBody& body) {
  static int calls = 0;
  const int call = calls++;
  const SharedArray<Said> said(static_cast<std::size_t>(run.ranks));
  if (own_rank().command != 0) {
    if (call < own_rank().call) return {};  // has been
    be_rank(run, body, said[static_cast<std::size_t>(own_rank().rank)]);
  }
  const ReservedPort port;
  const std::string secret = random_secret();
  std::vector<Started> ranks;
  for (int r = 0; r < run.ranks; ++r) {
    const std::string words =
        fmt::format("{} {} {} {} {}", command_process(), call, r, port.number(), secret);
    ranks.push_back({windows::start_again("", kRankVariable, words, true)});
  }
  wait_for_all(run, ranks);
  std::vector<RankFailure> failures;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].code() == 0) continue;
    const std::string words = said[r].text;
    failures.push_back({static_cast<int>(r),
                        ranks[r].code() == kEndedByUs ? "did not end in time and was ended"
                        : words.empty()
                            ? fmt::format("its process exited with code {:#x}", ranks[r].code())
                            : words});
  }
  return failures;
}

}  // namespace ferry::cli
