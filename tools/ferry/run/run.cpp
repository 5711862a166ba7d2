// `ferry run`: starts a program once for each rank.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string_view>

#include "command.hpp"
#include "number.hpp"
#include "run/job_options.hpp"

namespace ferry::cli {
namespace {

constexpr int kMostRunRanks = 1024;
constexpr double kLongestGrace = 86400.0;
constexpr int kCannotStartCode = 127;

constexpr const char* kFooter = R"(
Every rank finds in its environment
  RANK, LOCAL_RANK              0 ... n-1
  WORLD_SIZE, LOCAL_WORLD_SIZE  n
  MASTER_ADDR, MASTER_PORT      127.0.0.1 and a free port (or --port), as torchrun sets them
  FERRY_PORT                    another free port, where Ferry's ranks meet
  FERRY_SECRET                  128 random bits for this job, kept if already set (or in the file that
                                FERRY_SECRET_FILE names)
  OMP_NUM_THREADS               1 when n > 1, kept if already set

With --hosts a,b,c each host runs this same command (by ssh, pdsh, Slurm, a script: nothing is started
on other machines); each finds its own address in the list and starts its n ranks. WORLD_SIZE is n
times the hosts, ranks count on from host to host, MASTER_ADDR is the first, FERRY_PORT is --port + 1,
FERRY_HOST this host's address, kept if already set. FERRY_SECRET or FERRY_SECRET_FILE must be set, with
the same secret on all.

Output comes in whole lines, each behind its rank: [2] loss 3.1. Progress bars (carriage returns)
are drawn in place on a terminal; in a file they become lines, at most one a second for each rank.
Rank 0 reads this command's standard input when that is a pipe or a file; all others, and all from a
terminal, read nothing.

Every rank leads a process group; what is left in it goes when the job ends, also when `ferry run`
itself is killed. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on once; the second one kills.

With --elastic LEAST:MOST there are MOST ranks, and the others go on when one fails
(docs/elastic.md). A process takes the place of a rank that failed, --restarts times in all, with
FERRY_JOIN=1 in its environment. When fewer than LEAST ranks are left, the job ends. A rank that fails
after another has ended with 0 is not started again. With --hosts all of this is for each host: MOST
ranks there, of which the host's command starts failed ones again. --only 0,1 starts these of the MOST
ranks alone; the first one begins the group (FERRY_BEGIN=1), the others join it. With --join all that
the command starts join a group that runs: the rest of such a group, or a host that came back. Both
need --port, the same for all commands of a group; FERRY_PORT is the next.

Exit codes:
  0        every rank ended with 0; with --elastic: at least LEAST of them
  c        the first rank to fail exited with c
  128 + s  the first rank to fail was killed by signal s
  127      the program could not be started
  1        ferry run itself failed: no processes or ports left (the reason is on stderr)
  2        wrong command line
  141      nobody reads the output any more (as after `| head`))";

struct RunArguments {
  JobOptions job{};
  double grace_s = 5.0;
  bool no_prefix = false;
  std::string hosts{};
  std::string elastic{};
};

void add_elastic(CLI::App& run_app, RunArguments& given) {
  run_app
      .add_option("--elastic", given.elastic,
                  "MOST ranks; the job goes on while at least LEAST are left")
      ->type_name("LEAST:MOST");
  run_app
      .add_option("--restarts", given.job.restarts,
                  "With --elastic: how many processes may take the places of ranks that failed")
      ->type_name("N")
      ->check(whole_number(0, 1000000).description("0 ... 1000000"))
      ->capture_default_str();
  run_app
      .add_option("--only", given.job.only,
                  "With --elastic: which of this host's ranks to start; the first one begins the "
                  "group, unless --join is given")
      ->type_name("RANK,...")
      ->delimiter(',')
      ->check(whole_number(0, kMostRunRanks - 1));
  run_app.add_flag("--join", given.job.joins, "With --elastic: the ranks join a group that runs");
}

void check_only(JobOptions& job) {
  if (job.only.empty() && !job.joins) return;
  const char* option = job.only.empty() ? "--join" : "--only";
  if (job.port == 0) {
    throw CLI::ValidationError(fmt::format(
        "{} needs --port (1 ... 65534), the same for all commands of the group", option));
  }
  if (job.only.empty()) return;
  if (!job.hosts.empty() && !job.joins) {
    throw CLI::ValidationError(
        "--only beside --hosts needs --join: on several hosts all ranks are there at first");
  }
  std::sort(job.only.begin(), job.only.end());
  const bool twice = std::adjacent_find(job.only.begin(), job.only.end()) != job.only.end();
  if (twice || job.only.back() >= job.ranks || static_cast<int>(job.only.size()) < job.least) {
    throw CLI::ValidationError(
        fmt::format("--only {}: expected different ranks of 0 ... {}, at least {} (LEAST)",
                    fmt::join(job.only, ","), job.ranks - 1, job.least));
  }
}

/// "a,b,c": not by the parser's delimiter, which drops what is empty.
void set_hosts(RunArguments& given) {
  std::string_view left = given.hosts;
  for (std::size_t comma = 0; comma != std::string_view::npos;) {
    comma = left.find(',');
    given.job.hosts.emplace_back(left.substr(0, comma));
    if (given.job.hosts.back().empty()) {
      throw CLI::ValidationError(fmt::format(
          "--hosts: got \"{}\"; expected the addresses of all hosts, with one comma between two",
          given.hosts));
    }
    left.remove_prefix(std::min(comma, left.size() - 1) + 1);
  }
}

/// Of one host that is not elastic FERRY_PORT is any free one.
void check_next_port(const JobOptions& job) {
  if (job.port != 65535 || (job.least == 0 && job.hosts.empty())) return;
  throw CLI::ValidationError(
      fmt::format("--port: got 65535 beside {}; expected 1 ... 65534, for FERRY_PORT is the next",
                  job.least > 0 ? "--elastic" : "--hosts"));
}

/// "2:4": the job goes on with at least 2 of 4 ranks.
void set_elastic(RunArguments& given) {
  const std::size_t colon = given.elastic.find(':');
  int least = 0, most = 0;
  const auto number = [](std::string_view text, int& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  };
  const std::string_view text = given.elastic;
  const bool read = colon != std::string::npos && number(text.substr(0, colon), least) &&
                    number(text.substr(colon + 1), most);
  if (!read || least < 1 || most < least || most > kMostRunRanks) {
    throw CLI::ValidationError(fmt::format(
        "--elastic: got '{}', expected LEAST:MOST with 1 <= LEAST <= MOST <= {}, as 2:4",
        given.elastic, kMostRunRanks));
  }
  if (given.job.ranks != 0 && given.job.ranks != most) {
    throw CLI::ValidationError(fmt::format("-n {} beside --elastic {}: leave -n out, or give {}",
                                           given.job.ranks, given.elastic, most));
  }
  given.job.ranks = most;
  given.job.least = least;
  check_only(given.job);
}

/// Says in the usage line where the program goes.
class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: ferry run -n N [OPTIONS] -- PROGRAM ARGS\n";
  }
};

int run(const JobOptions& options) try {
  return run_job(options);
} catch (const CannotStart& error) {
  fmt::print(stderr, "ferry run: {}\n", error.what());
  return kCannotStartCode;
} catch (const std::exception& error) {
  fmt::print(stderr, "ferry run: {}\n", error.what());
  return 1;
}

// The program comes after `--`; without one, it is the first argument that is no option.
std::vector<std::string> program_of(const CommandLine& line, const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining();
  if (line.separated && !rest.empty()) {
    throw CLI::ValidationError(
        fmt::format("'{}' is no option of ferry run; the program comes after --", rest.front()));
  }
  const std::vector<std::string>& program = line.separated ? line.program : rest;
  if (program.empty()) {
    throw CLI::ValidationError("no program given: ferry run -n 4 -- python train.py");
  }
  if (program.front().empty() || program.front().front() == '-') {
    throw CLI::ValidationError(fmt::format(
        "'{}' is no option of ferry run, and no program: ferry run -n 4 -- python train.py",
        program.front()));
  }
  return program;
}

}  // namespace

void add_run(CLI::App& app, const CommandLine& line, int& exit_code) {
  auto given = std::make_shared<RunArguments>();
  CLI::App* run_app = app.add_subcommand(
      "run", "Start a program once for each rank: ferry run -n 4 -- python train.py");
  run_app->prefix_command();
  run_app->formatter(std::make_shared<RunFormatter>());
  run_app->footer(kFooter);
  run_app->add_option("-n,--ranks", given->job.ranks, "How many ranks")
      ->type_name("N")
      ->check(whole_number(1, kMostRunRanks).description("1 ... 1024"));
  run_app
      ->add_option("--hosts", given->hosts,
                   "Addresses of all hosts, each of which runs this command; -n is then for each")
      ->type_name("A,B,...");
  add_elastic(*run_app, *given);
  run_app->add_flag("--keep-going", given->job.keep_going,
                    "Let the other ranks go on when one fails");
  run_app
      ->add_option("--grace", given->grace_s,
                   "Seconds that the others get to end by themselves when one rank fails; then "
                   "SIGTERM, and 2 s later SIGKILL")
      ->type_name("SECONDS")
      ->check(seconds(kLongestGrace))
      ->capture_default_str();
  run_app->add_flag("--no-prefix", given->no_prefix, "Lines without their rank in front");
  run_app
      ->add_option("--tty-rank", given->job.tty_rank,
                   "This rank writes straight to this command's output, unprefixed: for "
                   "programs that draw on a terminal")
      ->type_name("RANK")
      ->check(whole_number(0, kMostRunRanks - 1));
  run_app->add_option("--port", given->job.port, "MASTER_PORT; a free one if not given")
      ->type_name("PORT")
      ->check(whole_number(1, 65535).description("1 ... 65535"));
  run_app->callback([given, &line, run_app, &exit_code] {
    if (run_app->count("--hosts") > 0) set_hosts(*given);
    if (run_app->count("--elastic") > 0) {
      set_elastic(*given);
    } else if (given->job.restarts > 0 || given->job.joins || !given->job.only.empty()) {
      throw CLI::ValidationError("--restarts, --only and --join are for --elastic LEAST:MOST");
    }
    if (given->job.ranks == 0) {
      throw CLI::ValidationError("no number of ranks given: ferry run -n 4 -- python train.py");
    }
    check_next_port(given->job);
    given->job.command = program_of(line, *run_app);
    given->job.prefix = !given->no_prefix;
    given->job.grace = std::chrono::milliseconds(std::lround(given->grace_s * 1000));
    if (given->job.tty_rank >= given->job.ranks) {
      throw CLI::ValidationError(fmt::format("--tty-rank {}: the ranks are 0 ... {}",
                                             given->job.tty_rank, given->job.ranks - 1));
    }
    exit_code = run(given->job);
  });
}

}  // namespace ferry::cli
