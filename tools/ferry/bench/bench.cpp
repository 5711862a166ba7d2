// `ferry bench`: how fast exchanges are on this machine.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "bench/board.hpp"
#include "bench/memory.hpp"
#include "bench/options.hpp"
#include "bench/plot.hpp"
#include "bench/rank.hpp"
#include "bench/report.hpp"
#include "bench/tuning.hpp"
#include "command.hpp"
#include "doctor/machine.hpp"
#include "platform/terminal.hpp"
#include "progress.hpp"
#include "run/ranks.hpp"

namespace ferry::cli {
namespace {

/// Of what `done` of a board counts: on GPUs what was measured, else samples.
int steps_of(const BenchSettings& settings, const BenchBoard& board) {
  const bool latency = settings.mode == BenchMode::latency;
  const auto lines = static_cast<int>(board.lines.size());
  const int each = settings.warmup + settings.iterations;
  return settings.on_gpus() ? (latency ? 4 : lines) : (latency ? 1 : lines) * each;
}

using BenchBody = void (*)(const BenchSettings&, const BenchBoard&, std::shared_ptr<Bootstrap>);

BenchBody body_of(const BenchSettings& s) {
  if (s.mode == BenchMode::latency) return s.on_gpus() ? bench_gpu_latency : bench_latency;
  return s.on_gpus() ? bench_gpu_throughput : bench_throughput;
}

/// Measures one mode and adds what it found. True when every rank passed; else says which did not.
bool run_mode(const BenchSettings& settings, std::vector<BenchResult>& results) {
  const BenchBoard board(settings);
  const bool latency = settings.mode == BenchMode::latency;
  if (!is_terminal(kErrorOutput)) {
    fmt::print(stderr, "bench: {} mode\n", latency ? "latency" : "throughput");
  }
  auto progress = std::make_unique<Progress>("bench", steps_of(settings, board));
  RankRun run;
  run.ranks = settings.ranks;
  run.processes = settings.processes;
  run.tick = [&] {
    const auto done = static_cast<int>(board.done());
    progress->show(done, done == 0 ? "preparing" : traits(board.now()).name);
  };
  const auto failures = run_ranks(run, [&](int, std::shared_ptr<Bootstrap> bootstrap) {
    body_of(settings)(settings, board, std::move(bootstrap));
  });
  progress.reset();
  if (failures.empty()) {
    for (const BenchResult& result : results_of(settings, board)) results.push_back(result);
    return true;
  }
  fmt::print(stderr, "ferry bench: {}\n", summary(failures));
  return false;
}

/// What is run one after another: throughput mode, then latency mode with each number of tokens.
std::vector<BenchSettings> runs_of(const BenchArguments& given) {
  std::vector<BenchSettings> runs;
  BenchSettings one = given.settings;
  one.mode = BenchMode::throughput;
  if (given.settings.mode != BenchMode::latency) runs.push_back(one);
  if (given.settings.mode == BenchMode::throughput) return runs;
  one.mode = BenchMode::latency;
  for (const std::int64_t tokens : given.latency_tokens) {
    one.latency_tokens = tokens;
    runs.push_back(one);
  }
  return runs;
}

/// Whether there are GPUs for these ranks; says why not.
bool gpus_suffice(const BenchSettings& s) {
  const int gpus = gpu_count();
  if (gpus == 0) {
    fmt::print(stderr,
               "ferry bench: --backend cuda: there is no GPU, or this build has no CUDA "
               "engine (`ferry doctor` says which)\n");
    return false;
  }
  if (s.ranks <= gpus) return true;
  if (!s.processes) {
    fmt::print(stderr, "ferry bench: {} ranks on {} GPUs must be processes\n", s.ranks, gpus);
    return false;
  }
  fmt::print(stderr, "ferry bench: {} ranks share {} GPUs: the figures say little\n", s.ranks,
             gpus);
  return true;
}

/// Whether they find enough memory; says why not.
bool memory_suffices(const std::vector<BenchSettings>& runs) {
  const std::string why = too_large(runs, system_facts().memory);
  if (!why.empty()) fmt::print(stderr, "ferry bench: {}\n", why);
  return why.empty();
}

/// Finds NCCL. False, and says so: one that was named cannot be used.
bool prepare_sweep(BenchArguments& given) {
  BenchSettings& s = given.settings;
  s.data_seed = std::random_device{}();
  try {
    s.nccl = s.ranks > gpu_count()
                 ? Nccl{"", "", "ranks share GPUs, which its communicators do not"}
                 : find_nccl(given.nccl);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ferry bench: {}\n", error.what());
    return false;
  }
  return true;
}

bool write_file(const std::string& file, const std::string& text) {
  std::ofstream out(file);
  out << text << '\n';
  out.close();
  return !out.fail() || cannot_write("bench", file);
}

/// Returns the exit code.
int bench(BenchArguments& given, const CommandLine& line) {
  const BenchSettings& s = given.settings;
  if (s.on_gpus() && !gpus_suffice(s)) return 1;
  if (!may_write("bench", given.json_file) || !may_draw("bench", given.plot_file)) return 1;
  if (!may_write("bench", s.tune)) return 1;
  if (s.sweeps() && !prepare_sweep(given)) return 1;
  const std::vector<BenchSettings> runs = runs_of(given);
  if (!s.on_gpus() && !memory_suffices(runs)) return 1;
  std::vector<BenchResult> results;
  for (const BenchSettings& run : runs) {
    if (!run_mode(run, results)) return 1;
  }
  if (!given.json || !given.json_file.empty()) {
    fmt::print("{}", table(s, results));
    if (!s.tune.empty()) fmt::print("{}", tuning_table(s.tune));
  }
  if (!given.json) return 0;
  std::vector<std::string> command = {"ferry"};
  command.insert(command.end(), line.own.begin(), line.own.end());
  const std::string json = to_json(s, results, command).dump(1);
  if (given.json_file.empty()) {
    fmt::print("{}\n", json);
    return 0;
  }
  if (!write_file(given.json_file, json)) return 1;
  if (given.plot_file.empty()) return 0;
  return draw_plot(kExchangePlot, given.json_file, given.plot_file) ? 0 : 1;
}

}  // namespace

void add_bench(CLI::App& app, const CommandLine& line, int& exit_code) {
  auto given = std::make_shared<BenchArguments>();
  CLI::App* bench_app = app.add_subcommand("bench", "How fast exchanges are on this machine");
  add_bench_options(bench_app, *given);
  bench_app->footer(
      "\nAll data is checked before anything is timed. Progress goes to standard error.\n"
      "Exit codes: 0 done; 1 too little memory, an exchange failed or brought wrong data; 2 wrong "
      "command line.");
  bench_app->callback([given, bench_app, &line, &exit_code] {
    settle_options(*bench_app, *given);
    exit_code = bench(*given, line);
  });
}

}  // namespace ferry::cli
