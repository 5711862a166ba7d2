// To add an option: a field in settings.hpp (or options.hpp), a line in one of the add_…_options;
// for one backend or mode only: the list in settle_options.
#include "bench/options.hpp"

#include <fmt/format.h>

#include <limits>
#include <map>

#include "ferry/group.hpp"
#include "number.hpp"

namespace ferry::cli {
namespace {

constexpr int kMostBenchRanks = 512;
constexpr int kMostTopk = 64;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMostHidden = std::int64_t{1} << 24;
constexpr std::int64_t kMostExperts = std::int64_t{1} << 20;
constexpr int kMostIterations = 1000000;

/// An option whose value is one of these words.
template <class T>
CLI::Option* choice(CLI::App* app, const char* name, T& value, const std::map<std::string, T>& map,
                    const char* help) {
  std::string names;
  std::string chosen;
  for (const auto& [key, each] : map) {
    names += (names.empty() ? "" : "|") + key;
    if (each == value) chosen = key;
  }
  return app->add_option(name, value, help)
      ->transform(CLI::Validator(
          [map, names](std::string& word) {
            const auto known = map.find(CLI::detail::to_lower(word));
            if (known == map.end()) return fmt::format("'{}': must be one of {}", word, names);
            word = std::to_string(static_cast<int>(known->second));  // as CLI11 reads an enum
            return std::string();
          },
          ""))
      ->type_name(names)
      ->default_str(chosen);
}

template <class T>
CLI::Option* number(CLI::App* app, const char* name, T& value, std::int64_t least,
                    std::int64_t most, const char* help) {
  return app->add_option(name, value, help)
      ->type_name("N")
      ->check(whole_number(least, most))
      ->capture_default_str();
}

template <class T>
CLI::Option* numbers(CLI::App* app, const char* name, std::vector<T>& values, std::int64_t most,
                     const char* help) {
  return app->add_option(name, values, help)
      ->type_name("N,...")
      ->delimiter(',')
      ->check(whole_number(1, most));
}

void add_shape_options(CLI::App* app, BenchSettings& s) {
  number(app, "-n,--ranks", s.ranks, 1, kMostBenchRanks, "How many ranks, 1 ... 512");
  number(app, "--tokens", s.tokens, 1, kMostTokens, "Tokens of each rank, throughput mode");
  number(app, "--latency-tokens", s.latency_tokens, 1, kMostTokens,
         "Tokens of each rank, latency mode");
  number(app, "--hidden", s.hidden, 1, kMostHidden, "Elements of a row");
  number(app, "--experts", s.experts, 1, kMostExperts, "In the whole group");
  number(app, "--topk", s.topk, 1, kMostTopk, "Experts of a token, 1 ... 64");
  choice<Dtype>(
      app, "--dtype", s.dtype,
      {{"bf16", Dtype::bf16}, {"f16", Dtype::f16}, {"f32", Dtype::f32}, {"e4m3", Dtype::e4m3}},
      "Of dispatched rows; with e4m3, which has scales, combine carries bf16");
  choice<RouteShape>(app, "--routes", s.routes,
                     {{"uniform", RouteShape::uniform}, {"zipf", RouteShape::zipf}},
                     "Which experts are chosen");
  choice<BenchMode>(app, "--mode", s.mode,
                    {{"all", BenchMode::all},
                     {"throughput", BenchMode::throughput},
                     {"latency", BenchMode::latency}},
                    "What to measure");
  number(app, "--iterations", s.iterations, 1, kMostIterations, "Samples");
  number(app, "--warmup", s.warmup, 0, kMostIterations, "Exchanges before the first sample");
  number(app, "--seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(), "Of routes and rows");
}

void add_fabric_options(CLI::App* app, BenchArguments& given) {
  BenchSettings& s = given.settings;
  choice<FabricKind>(app, "--fabric", s.fabric,
                     {{"automatic", FabricKind::automatic},
                      {"local", FabricKind::local},
                      {"shm", FabricKind::shm},
                      {"sim", FabricKind::sim},
                      {"ofi", FabricKind::ofi}},
                     "What joins the ranks");
  app->add_option("--domain-size", s.domain_size,
                  "Every N consecutive ranks are a domain of their own, joined by --network")
      ->type_name("N")
      ->check(whole_number(1, kMostBenchRanks));
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
  app->add_option("--tune", s.tune,
                  "First find the settings that are fastest, between domains or, with --backend "
                  "cuda, from the least to the most of --sms; into a JSON file, for FERRY_TUNING")
      ->type_name("FILE");
  number(app, "--oracle", s.oracle, 1, kMostIterations,
         "Then measure all settings in turn so many times, and say what the tuned ones lose")
      ->needs("--tune");
  CLI::Option* threads = app->add_flag("--threads", given.threads, "Ranks as threads");
  app->add_flag("--processes", given.processes, "Ranks as processes (the default)")
      ->excludes(threads);
}

void add_gpu_options(CLI::App* app, BenchArguments& given) {
  BenchSettings& s = given.settings;
  choice<Backend>(app, "--backend", s.backend, {{"host", Backend::host}, {"cuda", Backend::cuda}},
                  "What runs the exchanges");
  const char* group = "With --backend cuda";
  numbers(app, "--sms", s.num_sms, 1024, "Numbers of SMs that move the rows")
      ->group(group)
      ->default_str("16");
  numbers(app, "--token-sweep", given.token_sweep, kMostTokens,
          "Numbers of tokens of each rank, instead of --tokens; with --mode latency, on either "
          "backend, instead of --latency-tokens")
      ->group(group);
  number(app, "--chain", given.chain, 1, 32,
         "Calls that are timed together; with --mode latency, on either backend, pairs")
      ->group(group);
  number(app, "--alignment", s.alignment, 1, 4096, "Rows of expert-major blocks")->group(group);
  app->add_option(
         "--nccl", given.nccl,
         "Measure NCCL beside it: a library, off, or auto ($FERRY_NCCL or libnccl.so.2, if "
         "there is one)")
      ->type_name("auto|off|FILE")
      ->group(group)
      ->capture_default_str();
}

template <class... Words>
void refuse_if(bool refused, fmt::format_string<Words...> text, Words&&... words) {
  if (refused) throw CLI::ValidationError(fmt::format(text, std::forward<Words>(words)...));
}

void check(const BenchSettings& s) {
  refuse_if(s.topk > s.experts, "--topk {}: there are only {} experts (--experts)", s.topk,
            s.experts);
  const auto row_bytes = s.hidden * static_cast<std::int64_t>(size_of(s.dtype));
  refuse_if(row_bytes % 16 != 0,
            "--hidden {}: a row of {} {} is {} bytes, expected a multiple of 16", s.hidden,
            s.hidden, ferry::name_of(s.dtype), row_bytes);
  refuse_if(s.processes && (s.fabric == FabricKind::local || s.fabric == FabricKind::sim),
            "--fabric local and sim join threads: add --threads");
  refuse_if(s.processes && s.network == FabricKind::sim,
            "--network sim joins threads: add --threads");
  refuse_if(s.domain_size > 0 && (s.fabric == FabricKind::sim || s.fabric == FabricKind::ofi),
            "--domain-size {}: ranks share no memory over --fabric sim and ofi; give --network "
            "instead",
            s.domain_size);
}

void settle_gpus(const CLI::App& app, BenchSettings& s) {
  refuse_if(app.count("--mode") > 0 && s.mode == BenchMode::all,
            "--backend cuda measures --mode throughput or --mode latency");
  refuse_if(s.fabric == FabricKind::sim || s.fabric == FabricKind::ofi,
            "--fabric sim and ofi: only with --backend host");
  const bool latency = s.mode == BenchMode::latency;
  if (app.count("--hidden") == 0) s.hidden = 7168;
  if (app.count("--experts") == 0) s.experts = 256;
  if (latency) {
    if (app.count("--dtype") == 0) s.dtype = Dtype::e4m3;
    if (app.count("--iterations") == 0) s.iterations = 200;
    if (app.count("--chain") == 0) s.chain = 20;
    return;
  }
  refuse_if(app.count("--domain-size") > 0, "--domain-size: only with --backend host");
  s.mode = BenchMode::throughput;
  if (app.count("--tokens") == 0) s.tokens = 4096;
  s.dtypes = {s.dtype};
  if (app.count("--dtype") == 0) s.dtypes = {Dtype::bf16, Dtype::e4m3};
}

}  // namespace

void add_bench_options(CLI::App* app, BenchArguments& given) {
  add_shape_options(app, given.settings);
  add_fabric_options(app, given);
  CLI::Option* json = app->add_option("--json", given.json_file,
                                      "For programs, with machine, version and command: into FILE "
                                      "beside the table, or instead of the table")
                          ->type_name("[FILE]")
                          ->expected(0, 1);
  app->add_option("--plot", given.plot_file, "Draw the JSON (python3 with matplotlib)")
      ->type_name("FILE")
      ->needs(json);
  add_gpu_options(app, given);
}

void settle_options(const CLI::App& app, BenchArguments& given) {
  BenchSettings& s = given.settings;
  refuse_if(!s.tune.empty() && s.mode == BenchMode::latency, "--tune: only with throughput mode");
  refuse_if(
      !s.tune.empty() && !s.on_gpus() && app.count("--domain-size") == 0,
      "--tune: needs --domain-size or --backend cuda: in one domain on CPUs nothing is chosen");
  refuse_if(!s.tune.empty() && !s.on_gpus() && s.domain_size >= s.ranks,
            "--tune: --domain-size {} makes one domain of {} ranks, where nothing is chosen; give "
            "less",
            s.domain_size, s.ranks);
  refuse_if(s.oracle > 0 && s.on_gpus(),
            "--oracle: not with --backend cuda, where --sms measures all numbers");
  s.processes = !given.threads;
  given.json = app.count("--json") > 0;
  refuse_if(!given.plot_file.empty() && given.json_file.empty(),
            "--plot: needs --json FILE, which it draws");
  const bool latency = s.mode == BenchMode::latency;
  for (const std::string name : {"--sms", "--alignment", "--nccl", "--token-sweep", "--chain"}) {
    const bool both = latency && (name == "--token-sweep" || name == "--chain");
    refuse_if(!s.on_gpus() && !both && app.count(name) > 0, "{}: only with --backend cuda", name);
    refuse_if(latency && !both && app.count(name) > 0, "{}: only with --mode throughput", name);
  }
  if (app.count("--chain") > 0) s.chain = given.chain;
  (latency ? given.latency_tokens : s.token_sweep) = given.token_sweep;
  if (s.on_gpus()) settle_gpus(app, s);
  if (s.on_gpus() && latency && given.latency_tokens.empty() &&
      app.count("--latency-tokens") == 0) {
    given.latency_tokens = {1, 64, 128, 256};
  }
  if (given.latency_tokens.empty()) given.latency_tokens = {s.latency_tokens};
  check(s);
  for (const Dtype dtype : s.dtypes) check(s.with(s.tokens, dtype));
}

}  // namespace ferry::cli
