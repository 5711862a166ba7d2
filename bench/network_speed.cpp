// Ferry over libfabric against libfabric alone, in one run.
//
//   network_speed [--rounds N] [--tokens N] [--spins N] [--pin 0|1] [--only TEXT] [--json FILE]
//                 [--hosts NAMESPACE=ADDRESS,NAMESPACE=ADDRESS]
//
// Two processes of this machine (FERRY_HOST, FERRY_OFI_PROVIDER as for a group), or of two hosts
// that are network namespaces of it (`tests/hosts/speed.py raw` makes them). In turn, in every
// round: raw remote writes of the same bytes both ways, in pieces of a row and of 64 KiB to 1 MiB;
// a dispatch and a combine in throughput mode whose rows all cross; a dispatch in latency mode of 1
// and 8 tokens, and raw writes of as many bytes. Rows are 7168 bf16. The first round is not
// counted.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "platform/machine.hpp"
#include "platform/posix/process_group.hpp"
#include "raw_network.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/doctor/machine.hpp"
#include "tools/ferry/number.hpp"
#include "tools/ferry/progress.hpp"
#include "tools/ferry/run/ranks.hpp"
#include "tools/ferry/run/shared_array.hpp"

namespace ferry::bench {
namespace {

constexpr std::int64_t kHidden = 7168;
constexpr std::size_t kRow = kHidden * 2;
constexpr std::size_t kUnderWay = std::size_t{4} << 20;  // as much as a group has
constexpr int kFewTokens = 8;

/// One way of moving the same bytes.
struct Figure {
  std::string name{};
  std::string group{};       ///< figures of one group move the same bytes
  bool raw = false;          ///< without Ferry
  bool latency = false;      ///< what counts is time, not bytes a second
  std::size_t bytes = 0;     ///< that each rank sends to the other, rows alone
  std::vector<double> us{};  ///< of every round, the slower rank; sorted
  double median_us() const { return cli::percentile(us, 0.5); }
  double best_us() const { return us.front(); }
  double gb_per_s() const { return static_cast<double>(bytes) / median_us() / 1e3; }
};

using Time = double (Figure::*)() const;

/// Of the same group's best raw figure: bytes a second as a share, or how many times as long. Of
/// the best rounds, it is what remains where others use the machine, too.
double against_raw(const Figure& figure, const std::vector<Figure>& all, Time time) {
  double best = std::numeric_limits<double>::infinity();
  for (const Figure& other : all) {
    if (other.raw && other.group == figure.group) best = std::min(best, (other.*time)());
  }
  return figure.latency ? (figure.*time)() / best : best / (figure.*time)();
}

void print_table(const std::vector<Figure>& figures) {
  const auto shown = [&](const Figure& figure, Time time) {
    const double ratio = against_raw(figure, figures, time);
    return figure.latency ? fmt::format("{:.2f} x", ratio) : fmt::format("{:.0f} %", 100 * ratio);
  };
  fmt::print("{:<32} {:>10} {:>10} {:>8} {:>9} {:>10} {:>9}\n", "", "bytes", "median us", "GB/s",
             "of raw", "best us", "of raw");
  for (const Figure& f : figures) {
    fmt::print("{:<32} {:>10} {:>10.1f} {:>8.2f} {:>9} {:>10.1f} {:>9}\n", f.name, f.bytes,
               f.median_us(), f.gb_per_s(), shown(f, &Figure::median_us), f.best_us(),
               shown(f, &Figure::best_us));
  }
}

nlohmann::json to_json(const std::vector<Figure>& figures) {
  nlohmann::json all = nlohmann::json::array();
  for (const Figure& f : figures) {
    const std::string name = f.latency ? "times_raw" : "share_of_raw";
    all.push_back({{"name", f.name},
                   {"bytes", f.bytes},
                   {"median_us", f.median_us()},
                   {"best_us", f.best_us()},
                   {"gb_per_s", f.gb_per_s()},
                   {name, against_raw(f, figures, &Figure::median_us)},
                   {"best_" + name, against_raw(f, figures, &Figure::best_us)},
                   {"us", f.us}});
  }
  return all;
}

struct Options {
  int rounds = 15;
  int tokens = 2048;
  int spins = 100;     ///< exchanges of a latency sample
  int pin = 1;         ///< each rank, with all its threads, on a core of its own
  std::string only{};  ///< what has this in its name
  std::vector<std::pair<std::string, std::string>> hosts{};  ///< namespace and address, by rank
  std::string json{};
};

/// What one rank exchanges with the other.
class Pair {
 public:
  Pair(const Options& o, const std::shared_ptr<Bootstrap>& bootstrap)
      : options_(o),
        raw_(*bootstrap, static_cast<std::size_t>(o.tokens) * kRow),
        group_(bootstrap, config()),
        latency_(group_, {kFewTokens, kHidden, 1, Dtype::bf16}),
        ids_(static_cast<std::size_t>(o.tokens), 1 - group_.rank()),
        x_(static_cast<std::size_t>(o.tokens * kHidden), 0x3f80),
        out_(x_.size()),
        plan_(group_.plan({ids_.data(), Dtype::i64, {o.tokens, 1}})) {}

  RawNetwork& raw() { return raw_; }
  Group& group() { return group_; }
  void dispatch() {
    received_ = group_.dispatch({x_.data(), Dtype::bf16, {tokens(), kHidden}}, plan_);
  }
  void combine() {
    if (!received_.x) dispatch();  // --only
    CombineOptions options;
    options.out = TensorView(out_.data(), Dtype::bf16, {tokens(), kHidden});
    group_.combine(received_.x, plan_, options);
  }
  void drop() { received_ = {}; }
  void few(int count) {
    const LatencyReceived received = latency_.dispatch({x_.data(), Dtype::bf16, {count, kHidden}},
                                                       {ids_.data(), Dtype::i64, {count, 1}});
  }

 private:
  GroupConfig config() const {
    GroupConfig config;
    config.experts = 2;
    config.fabric = FabricKind::ofi;
    config.memory_bytes = 4 * static_cast<std::size_t>(options_.tokens) * kRow + (16 << 20);
    return config;
  }
  std::int64_t tokens() const { return options_.tokens; }

  const Options& options_;
  RawNetwork raw_;
  Group group_;
  LatencyExchange latency_;
  std::vector<std::int64_t> ids_;
  std::vector<std::uint16_t> x_;
  std::vector<std::uint16_t> out_;  // the C library would give such memory back after each call
  Plan plan_;
  Received received_{};
};

struct Measurement {
  Figure figure;
  int repeats = 1;
  std::function<void(Pair&)> run;
};

std::vector<Measurement> measurements(const Options& o) {
  const auto tokens = static_cast<std::size_t>(o.tokens);
  const std::size_t rows = tokens * kRow;
  std::vector<Measurement> all;
  const auto throughput = [&](const std::string& name, bool raw, std::function<void(Pair&)> run) {
    all.push_back({{name, "throughput", raw, false, rows}, 1, std::move(run)});
  };
  throughput("raw writes of a row", true,
             [=](Pair& p) { p.raw().exchange(kRow, tokens, kUnderWay / kRow); });
  for (const std::size_t kib : {64, 256, 1024}) {
    const std::size_t piece = kib << 10;
    throughput(fmt::format("raw writes of {} KiB", kib), true,
               [=](Pair& p) { p.raw().exchange(piece, rows / piece, kUnderWay / piece); });
  }
  throughput("dispatch", false, [](Pair& p) { p.dispatch(); });
  throughput("combine", false, [](Pair& p) { p.combine(); });
  for (const int count : {1, kFewTokens}) {
    const auto n = static_cast<std::size_t>(count);
    const auto latency = [&](const std::string& name, bool raw, std::function<void(Pair&)> run) {
      all.push_back(
          {{fmt::format("{}: {}", count == 1 ? "1 token" : fmt::format("{} tokens", count), name),
            std::to_string(count), raw, true, n * kRow},
           o.spins,
           std::move(run)});
    };
    latency("raw write", true, [=](Pair& p) { p.raw().exchange(n * kRow, 1, 1); });
    if (count > 1) {
      latency("raw writes of a row", true, [=](Pair& p) { p.raw().exchange(kRow, n, n); });
    }
    latency("latency dispatch", false, [=](Pair& p) { p.few(count); });
  }
  std::erase_if(
      all, [&](const Measurement& m) { return m.figure.name.find(o.only) == std::string::npos; });
  return all;
}

/// Microseconds of each rank, round and measurement.
using Board = cli::SharedArray<double>;

std::size_t place(std::size_t measurement, int round, int rank, const Options& o) {
  return (measurement * static_cast<std::size_t>(o.rounds) + static_cast<std::size_t>(round)) * 2 +
         static_cast<std::size_t>(rank);
}

void move_to(const std::pair<std::string, std::string>& host) {
  enter_network_namespace(host.first);
  setenv("FERRY_HOST", host.second.c_str(), 1);
}

/// done: measurements, rounds that are not counted included; rank 0 counts.
void run_rank(const Options& o, const Board& board, int& done,
              const std::shared_ptr<Bootstrap>& bootstrap) {
  const int rank = bootstrap->rank();
  if (!o.hosts.empty()) move_to(o.hosts[static_cast<std::size_t>(rank)]);
  if (o.pin != 0 && !pin_to_core(rank)) fmt::print(stderr, "cannot pin a rank\n");
  Pair pair(o, bootstrap);
  const std::vector<Measurement> all = measurements(o);
  for (int round = -1; round < o.rounds; ++round) {
    for (std::size_t m = 0; m < all.size(); ++m) {
      pair.group().barrier();
      pair.raw().exchange(8, 1, 1);  // both begin together
      const double us = cli::time_of([&] {
        for (int i = 0; i < all[m].repeats; ++i) all[m].run(pair);
        return 0;
      });
      if (rank == 0) std::atomic_ref(done).fetch_add(1, std::memory_order_relaxed);  // only shown
      if (round >= 0) board[place(m, round, bootstrap->rank(), o)] = us / all[m].repeats;
    }
    pair.drop();
  }
  pair.group().barrier();
}

/// "A=10.0.0.1,B=10.0.0.2"; empty unless there are two.
std::vector<std::pair<std::string, std::string>> hosts_in(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> hosts;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t at = word.find('=');
    if (at == std::string::npos) return {};
    hosts.emplace_back(word.substr(0, at), word.substr(at + 1));
  }
  return hosts.size() == 2 ? hosts : std::vector<std::pair<std::string, std::string>>();
}

int run(const Options& o, const std::string& command) {
  const std::vector<Measurement> all = measurements(o);
  const Board board(all.size() * static_cast<std::size_t>(o.rounds) * 2);
  cli::RankRun job;
  job.ranks = 2;
  job.processes = true;
  const cli::SharedArray<int> done(1);
  auto progress = std::make_unique<cli::Progress>("network_speed",
                                                  static_cast<int>(all.size()) * (o.rounds + 1));
  job.tick = [&] {
    progress->show(std::atomic_ref(done[0]).load(std::memory_order_relaxed), "measuring");
  };
  const auto failures = cli::run_ranks(job, [&](int, std::shared_ptr<Bootstrap> bootstrap) {
    run_rank(o, board, done[0], bootstrap);
  });
  progress.reset();
  if (!failures.empty()) {
    fmt::print(stderr, "network_speed: {}\n", cli::summary(failures));
    return 1;
  }
  std::vector<Figure> figures;
  for (std::size_t m = 0; m < all.size(); ++m) {
    figures.push_back(all[m].figure);
    for (int round = 0; round < o.rounds; ++round) {
      figures.back().us.push_back(
          std::max(board[place(m, round, 0, o)], board[place(m, round, 1, o)]));
    }
    std::sort(figures.back().us.begin(), figures.back().us.end());
  }
  print_table(figures);
  if (o.json.empty()) return 0;
  const cli::Machine machine = cli::look_at_machine();
  const nlohmann::json out = {{"command", command},         {"machine", cli::to_json(machine)},
                              {"ferry", version()},         {"rounds", o.rounds},
                              {"tokens", o.tokens},         {"pinned", o.pin != 0},
                              {"figures", to_json(figures)}};
  std::ofstream file(o.json);
  file << out.dump(1) << '\n';
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace ferry::bench

int main(int argc, char** argv) {
  using ferry::cli::whole_number;
  ferry::bench::Options o;
  std::string hosts;
  CLI::App app("Ferry over libfabric against libfabric alone, in one run");
  app.add_option("--rounds", o.rounds)->check(whole_number(1, 1000000));
  app.add_option("--tokens", o.tokens, "A multiple of 512, which is whole MiB");
  app.add_option("--spins", o.spins, "Exchanges of a latency sample")
      ->check(whole_number(1, 100000));
  app.add_option("--pin", o.pin, "1: each rank on a core of its own")->check(whole_number(0, 1));
  app.add_option("--only", o.only, "What has this in its name");
  app.add_option("--hosts", hosts, "NAMESPACE=ADDRESS,NAMESPACE=ADDRESS");
  app.add_option("--json", o.json);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  o.hosts = ferry::bench::hosts_in(hosts);
  if ((o.hosts.empty() && !hosts.empty()) || o.tokens < 512 || o.tokens % 512 != 0) {
    fmt::print(stderr, "--hosts: two of NAMESPACE=ADDRESS; --tokens: a multiple of 512\n");
    return 2;
  }
  std::string command = "network_speed";
  for (int i = 1; i < argc; ++i) command.append(" ").append(argv[i]);
  return ferry::bench::run(o, command);
}
