// `ferry bench`: how fast exchanges are on this machine.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <string>

#include "bench/board.hpp"
#include "bench/gpu.hpp"
#include "bench/options.hpp"
#include "bench/plot.hpp"
#include "bench/rank.hpp"
#include "bench/report.hpp"
#include "bench/settings.hpp"
#include "command.hpp"
#include "number.hpp"
#include "run/ranks.hpp"

namespace ferry::cli {
namespace {

constexpr int kMostRanks = 64;
constexpr int kMostTopk = 64;
constexpr std::int64_t kMostHidden = std::int64_t{1} << 24;
constexpr std::int64_t kMostExperts = std::int64_t{1} << 20;
constexpr int kMostIterations = 1000000;

/// On stderr: a bar on a terminal, else one line for each mode.
class Progress {
 public:
  Progress(const BenchSettings& settings, const BenchBoard& board)
      : board_(board), terminal_(isatty(STDERR_FILENO) == 1) {
    const int each = settings.warmup + settings.iterations;
    const bool latency = settings.mode == BenchMode::latency;
    // On GPUs it is told of what was measured, else of samples.
    total_ = settings.backend == Backend::cuda ? 4 : (latency ? 1 : 5) * each;
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void clear() {
    if (done_ > 0) fmt::print(stderr, "\r\x1b[K");
    done_ = 0;
  }

  void begin(const char* mode) {
    if (!terminal_) fmt::print(stderr, "bench: {} mode\n", mode);
  }

  void show() {
    const auto done = static_cast<int>(board_.done());
    if (!terminal_ || done == done_) return;
    const int filled = kWidth * done / total_;
    fmt::print(stderr, "\r\x1b[K[{:#<{}}{:.<{}}] {:3} %  {}", "", filled, "", kWidth - filled,
               100 * done / total_, name_of(board_.now()));
    std::fflush(stderr);
    done_ = done;
  }

 private:
  static constexpr int kWidth = 40;
  const BenchBoard& board_;
  bool terminal_;
  int total_ = 0;
  int done_ = 0;
};

using BenchBody = void (*)(const BenchSettings&, const BenchBoard&, std::shared_ptr<Bootstrap>);

BenchBody body_of(const BenchSettings& settings) {
  if (settings.mode == BenchMode::throughput) return bench_throughput;
  return settings.backend == Backend::cuda ? bench_gpu_latency : bench_latency;
}

/// Measures one mode and adds what it found. True when every rank passed; else says which did not.
bool run_mode(const BenchSettings& settings, std::vector<BenchResult>& results) {
  const BenchBoard board(settings);
  Progress progress(settings, board);
  RankRun run;
  run.ranks = settings.ranks;
  run.processes = settings.processes;
  run.tick = [&progress] { progress.show(); };
  progress.begin(settings.mode == BenchMode::latency ? "latency" : "throughput");
  const auto failures = run_ranks(run, [&](int, std::shared_ptr<Bootstrap> bootstrap) {
    body_of(settings)(settings, board, std::move(bootstrap));
  });
  progress.clear();
  if (failures.empty()) {
    for (const BenchResult& result : results_of(settings, board)) results.push_back(result);
    return true;
  }
  fmt::print(stderr, "ferry bench: {}\n", summary(failures));
  return false;
}

/// What is run one after another: throughput mode, then latency mode with each number of tokens.
std::vector<BenchSettings> runs_of(const BenchSettings& settings,
                                   std::vector<std::int64_t> latency_tokens) {
  std::vector<BenchSettings> runs;
  BenchSettings one = settings;
  one.mode = BenchMode::throughput;
  if (settings.mode != BenchMode::latency) runs.push_back(one);
  if (latency_tokens.empty()) latency_tokens = {settings.latency_tokens};
  one.mode = BenchMode::latency;
  for (const std::int64_t tokens : latency_tokens) {
    one.latency_tokens = tokens;
    if (settings.mode != BenchMode::throughput) runs.push_back(one);
  }
  return runs;
}

std::vector<std::string> command_of(const CommandLine& line) {
  std::vector<std::string> command = {"ferry"};
  command.insert(command.end(), line.own.begin(), line.own.end());
  return command;
}

// Writes to the file, or to standard output when it has no name.
int put(const std::string& file, const std::string& text) {
  if (file.empty()) {
    fmt::print("{}\n", text);
    return 0;
  }
  std::ofstream out(file);
  out << text << '\n';
  out.close();
  if (!out.fail()) return 0;
  fmt::print(stderr, "ferry bench: cannot write {}\n", file);
  return 1;
}

int bench(const BenchSettings& settings, const std::vector<std::int64_t>& latency_tokens,
          const GpuOutput& output, const CommandLine& line) {
  std::vector<BenchResult> results;
  for (const BenchSettings& run : runs_of(settings, latency_tokens)) {
    if (!run_mode(run, results)) return 1;
  }
  if (!output.json || !output.json_file.empty()) fmt::print("{}", table(settings, results));
  if (!output.json) return 0;
  const int code = put(output.json_file, to_json(settings, results, command_of(line)).dump(2));
  if (code != 0 || output.plot_file.empty()) return code;
  return draw_plot(output.json_file, output.plot_file) ? 0 : 1;
}

void add_number(CLI::App* app, const char* name, std::int64_t& value, std::int64_t most,
                const char* help) {
  app->add_option(name, value, help)
      ->type_name("N")
      ->check(whole_number(1, most))
      ->capture_default_str();
}

void add_shape_options(CLI::App* app, BenchSettings& s) {
  app->add_option("-n,--ranks", s.ranks, "How many ranks, 1 ... 64")
      ->type_name("N")
      ->check(whole_number(1, kMostRanks))
      ->capture_default_str();
  add_number(app, "--tokens", s.tokens, kMostTokens, "Tokens of each rank, throughput mode");
  add_number(app, "--latency-tokens", s.latency_tokens, kMostTokens,
             "Tokens of each rank, latency mode");
  add_number(app, "--hidden", s.hidden, kMostHidden, "Elements of a row");
  add_number(app, "--experts", s.experts, kMostExperts, "In the whole group");
  app->add_option("--topk", s.topk, "Experts of a token, 1 ... 64")
      ->type_name("N")
      ->check(whole_number(1, kMostTopk))
      ->capture_default_str();
  choice<Dtype>(
      app, "--dtype", s.dtype,
      {{"bf16", Dtype::bf16}, {"f16", Dtype::f16}, {"f32", Dtype::f32}, {"e4m3", Dtype::e4m3}},
      "Of dispatched rows; with e4m3, which has scales, combine carries bf16");
  choice<RouteShape>(app, "--routes", s.routes,
                     {{"uniform", RouteShape::uniform}, {"zipf", RouteShape::zipf}},
                     "Which experts are chosen");
}

void add_domain_options(CLI::App* app, BenchSettings& s) {
  app->add_option("--domain-size", s.domain_size,
                  "Every N consecutive ranks are a domain of their own, joined by --network")
      ->type_name("N")
      ->check(whole_number(1, kMostRanks));
  choice<FabricKind>(
      app, "--network", s.network,
      {{"automatic", FabricKind::automatic}, {"sim", FabricKind::sim}, {"ofi", FabricKind::ofi}},
      "What joins domains: automatic copies as a network would")
      ->needs("--domain-size");
  choice<Crossing>(app, "--crossing", s.crossing,
                   {{"automatic", Crossing::automatic},
                    {"direct", Crossing::direct},
                    {"hierarchical", Crossing::hierarchical}},
                   "How tokens cross from domain to domain in throughput mode")
      ->needs("--domain-size");
}

}  // namespace

void check(const BenchSettings& s) {
  if (s.topk > s.experts) {
    throw CLI::ValidationError(
        fmt::format("--topk {}: there are only {} experts (--experts)", s.topk, s.experts));
  }
  if (s.hidden * static_cast<std::int64_t>(size_of(s.dtype)) % 16 != 0) {
    throw CLI::ValidationError(fmt::format(
        "--hidden {}: a row of {} {} is {} bytes, expected a multiple of 16", s.hidden, s.hidden,
        ferry::name_of(s.dtype), s.hidden * static_cast<std::int64_t>(size_of(s.dtype))));
  }
  if (s.processes && (s.fabric == FabricKind::local || s.fabric == FabricKind::sim)) {
    throw CLI::ValidationError("--fabric local and sim join threads: add --threads");
  }
  if (s.processes && s.network == FabricKind::sim) {
    throw CLI::ValidationError("--network sim joins threads: add --threads");
  }
  if (s.domain_size > 0 && (s.fabric == FabricKind::sim || s.fabric == FabricKind::ofi)) {
    throw CLI::ValidationError(
        fmt::format("--domain-size {}: ranks share no memory over --fabric sim and ofi; give "
                    "--network instead",
                    s.domain_size));
  }
}

void add_bench(CLI::App& app, const CommandLine& line, int& exit_code) {
  struct Arguments {
    BenchSettings settings{};
    bool threads = false;
    bool processes = false;
    std::string json_file{};
    GpuArguments gpu{};
  };
  auto given = std::make_shared<Arguments>();
  BenchSettings& s = given->settings;
  CLI::App* bench_app = app.add_subcommand("bench", "How fast exchanges are on this machine");
  add_shape_options(bench_app, s);
  choice<BenchMode>(bench_app, "--mode", s.mode,
                    {{"all", BenchMode::all},
                     {"throughput", BenchMode::throughput},
                     {"latency", BenchMode::latency}},
                    "What to measure");
  choice<FabricKind>(bench_app, "--fabric", s.fabric,
                     {{"automatic", FabricKind::automatic},
                      {"local", FabricKind::local},
                      {"shm", FabricKind::shm},
                      {"sim", FabricKind::sim},
                      {"ofi", FabricKind::ofi}},
                     "What joins the ranks");
  add_domain_options(bench_app, s);
  CLI::Option* threads = bench_app->add_flag("--threads", given->threads, "Ranks as threads");
  bench_app->add_flag("--processes", given->processes, "Ranks as processes (the default)")
      ->excludes(threads);
  bench_app->add_option("--iterations", s.iterations, "Samples")
      ->type_name("N")
      ->check(whole_number(1, kMostIterations))
      ->capture_default_str();
  bench_app->add_option("--warmup", s.warmup, "Exchanges before the first sample")
      ->type_name("N")
      ->check(whole_number(0, kMostIterations))
      ->capture_default_str();
  bench_app->add_option("--seed", s.seed, "Of routes and rows")
      ->type_name("N")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  CLI::Option* json = bench_app
                          ->add_option("--json", given->json_file,
                                       "For programs, with machine, version and command: into "
                                       "FILE beside the table, or instead of the table")
                          ->type_name("[FILE]")
                          ->expected(0, 1);
  add_gpu_options(bench_app, given->gpu, json);
  bench_app->footer(
      "\nAll data is checked before anything is timed. Progress goes to standard error.\n"
      "Exit codes: 0 done; 1 an exchange failed or brought wrong data; 2 wrong command line.");
  bench_app->callback([given, bench_app, json, &line, &exit_code] {
    BenchSettings& shape = given->settings;
    shape.processes = !given->threads;
    const GpuOutput output{json->count() > 0, given->json_file, given->gpu.plot_file};
    if (!output.plot_file.empty() && output.json_file.empty()) {
      throw CLI::ValidationError("--plot: needs --json FILE, which it draws");
    }
    const bool on_gpus = given->gpu.backend == Backend::cuda;
    if (!on_gpus) refuse_gpu_options(*bench_app, shape.mode);
    if (!on_gpus || shape.mode == BenchMode::latency) {
      if (shape.mode == BenchMode::latency) settle_latency(*bench_app, shape, given->gpu);
      check(shape);
      exit_code = on_gpus && !gpus_suffice(shape)
                      ? 1
                      : bench(shape, given->gpu.latency_tokens, output, line);
      return;
    }
    settle_gpu(*bench_app, shape, given->gpu.settings);
    exit_code = run_gpu_bench(given->gpu.settings, given->gpu.nccl, output, command_of(line));
  });
}

}  // namespace ferry::cli
