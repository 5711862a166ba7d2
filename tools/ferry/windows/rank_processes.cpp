// Ranks as processes: this program anew with the same arguments. A rank does what the command does,
// without a word, until it comes to the call that started it; there it runs its body and ends.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "run/ports.hpp"
#include "run/ranks.hpp"
#include "run/shared_array.hpp"
#include "windows/ranks.hpp"

namespace ferry::cli {
namespace {

using WinClock = std::chrono::steady_clock;
constexpr const char* kRankVariable = "FERRY_RANK_OF_COMMAND";
constexpr auto kWinPoll = std::chrono::milliseconds(5);
constexpr int kTickEvery = 10;  // polls
constexpr auto kWinGrace = std::chrono::seconds(5);
constexpr UINT kEndedByUs = 0xE0000001;

struct Said {
  char text[1024];
};

struct Started {
  Handle process{};
  bool ended = false;
  DWORD code = 0;
};

[[noreturn]] void be_rank(const RankRun& run, const RankBody& body, Said& said) {
  const OwnRank& own = own_rank();
  TcpOptions options;
  options.rank = own.rank;
  options.size = run.ranks;
  options.port = own.port;
  options.secret = own.secret;
  const auto failure = failure_of([&] { body(options.rank, tcp_bootstrap(options)); });
  if (failure) std::strncpy(said.text, failure->c_str(), sizeof said.text - 1);
  TerminateProcess(GetCurrentProcess(), failure ? 1 : 0);
  std::abort();
}

/// With outputs that nobody reads: what it has to say is in the shared memory.
Handle start_rank(HANDLE job, const std::string& words) {
  SECURITY_ATTRIBUTES inherited{sizeof inherited, nullptr, TRUE};
  const Handle nul(CreateFileA("NUL", GENERIC_READ | GENERIC_WRITE,
                               FILE_SHARE_READ | FILE_SHARE_WRITE, &inherited, OPEN_EXISTING, 0,
                               nullptr));
  STARTUPINFOA start{};
  start.cb = sizeof start;
  start.dwFlags = STARTF_USESTDHANDLES;
  start.hStdInput = start.hStdOutput = start.hStdError = nul.get();
  PROCESS_INFORMATION made{};
  std::string command = GetCommandLineA();
  SetEnvironmentVariableA(kRankVariable, words.c_str());
  const BOOL ok = CreateProcessA(nullptr, command.data(), nullptr, nullptr, TRUE, CREATE_SUSPENDED,
                                 nullptr, nullptr, &start, &made);
  SetEnvironmentVariableA(kRankVariable, nullptr);
  if (!ok) raise_last("cannot start a rank");
  AssignProcessToJobObject(job, made.hProcess);
  ResumeThread(made.hThread);
  CloseHandle(made.hThread);
  return Handle(made.hProcess);
}

/// True when all have ended; sets `failed` when one did badly.
bool look_at(std::vector<Started>& ranks, bool& failed) {
  bool all = true;
  for (Started& rank : ranks) {
    if (!rank.ended && WaitForSingleObject(rank.process.get(), 0) == WAIT_OBJECT_0) {
      rank.ended = true;
      GetExitCodeProcess(rank.process.get(), &rank.code);
      failed = failed || rank.code != 0;
    }
    all = all && rank.ended;
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
      if (now >= until && !rank.ended) TerminateProcess(rank.process.get(), kEndedByUs);
    }
    std::this_thread::sleep_for(kWinPoll);
    if (run.tick && n % kTickEvery == 0) run.tick();
  }
}

}  // namespace

const OwnRank& own_rank() {
  static const OwnRank told = [] {
    OwnRank own;
    const char* const text = std::getenv(kRankVariable);
    if (text != nullptr) {
      std::istringstream words(text);
      words >> own.command >> own.call >> own.rank >> own.port >> own.secret;
    }
    SetEnvironmentVariableA(kRankVariable, nullptr);
    return own;
  }();
  return told;
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
  const Handle job = make_job();
  std::vector<Started> ranks;
  for (int r = 0; r < run.ranks; ++r) {
    ranks.push_back({start_rank(job.get(), fmt::format("{} {} {} {} {}", command_process(), call, r,
                                                       port.number(), secret))});
  }
  wait_for_all(run, ranks);
  std::vector<RankFailure> failures;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].code == 0) continue;
    const std::string words = said[r].text;
    failures.push_back(
        {static_cast<int>(r), ranks[r].code == kEndedByUs ? "did not end in time and was ended"
                              : words.empty() ? fmt::format("its process exited with code {:#x}",
                                                            static_cast<unsigned>(ranks[r].code))
                                              : words});
  }
  return failures;
}

}  // namespace ferry::cli
