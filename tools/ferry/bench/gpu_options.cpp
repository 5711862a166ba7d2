// Options of `ferry bench --backend cuda`, and --chain and --token-sweep, which latency mode has
// with both backends. Those of both: bench.cpp.
#include "bench/options.hpp"
#include "number.hpp"

namespace ferry::cli {

void add_gpu_options(CLI::App* app, GpuArguments& given, CLI::Option* json) {
  GpuBenchSettings& s = given.settings;
  choice<Backend>(app, "--backend", given.backend,
                  {{"host", Backend::host}, {"cuda", Backend::cuda}}, "What runs the exchanges");
  const char* group = "With --backend cuda";
  app->add_option("--sms", s.sms, "Numbers of SMs that move the rows")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(whole_number(1, 1024))
      ->group(group)
      ->default_str("16");
  app->add_option("--token-sweep", s.tokens,
                  "Numbers of tokens of each rank, instead of --tokens; with --mode latency, on "
                  "either backend, instead of --latency-tokens")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(whole_number(1, kMostTokens))
      ->group(group)
      ->default_str("");
  app->add_option("--chain", s.chain,
                  "Calls that are timed together; with --mode latency, on either backend, pairs")
      ->type_name("N")
      ->check(whole_number(1, 32))
      ->group(group)
      ->capture_default_str();
  app->add_option("--alignment", s.alignment, "Rows of expert-major blocks")
      ->type_name("N")
      ->check(whole_number(1, 4096))
      ->group(group)
      ->capture_default_str();
  app->add_option(
         "--nccl", given.nccl,
         "Measure NCCL beside it: a library, off, or auto ($FERRY_NCCL or libnccl.so.2, if "
         "there is one)")
      ->type_name("auto|off|FILE")
      ->group(group)
      ->capture_default_str();
  app->add_option("--plot", given.plot_file, "Draw the JSON (python3 with matplotlib)")
      ->type_name("FILE")
      ->group(group)
      ->needs(json);
}

void refuse_gpu_options(const CLI::App& app, BenchMode mode) {
  for (const std::string name :
       {"--sms", "--alignment", "--nccl", "--plot", "--token-sweep", "--chain"}) {
    const bool shared = name == "--token-sweep" || name == "--chain";
    if (shared && mode == BenchMode::latency) continue;
    if (app.count(name) > 0) {
      throw CLI::ValidationError(fmt::format("{}: only with --backend cuda", name));
    }
  }
}

void settle_latency(const CLI::App& app, BenchSettings& shape, GpuArguments& given) {
  const bool on_gpus = given.backend == Backend::cuda;
  shape.backend = given.backend;
  if (app.count("--chain") > 0) shape.chain = given.settings.chain;
  if (app.count("--token-sweep") > 0) given.latency_tokens = given.settings.tokens;
  if (!on_gpus) return;
  if (app.count("--hidden") == 0) shape.hidden = 7168;
  if (app.count("--experts") == 0) shape.experts = 256;
  if (app.count("--dtype") == 0) shape.dtype = Dtype::e4m3;
  if (app.count("--iterations") == 0) shape.iterations = 200;
  if (app.count("--chain") == 0) shape.chain = 20;
  if (given.latency_tokens.empty() && app.count("--latency-tokens") == 0) {
    given.latency_tokens = {1, 64, 128, 256};
  }
  for (const char* name : {"--sms", "--alignment", "--nccl"}) {
    if (app.count(name) > 0) {
      throw CLI::ValidationError(fmt::format("{}: only with --mode throughput", name));
    }
  }
  if (shape.fabric == FabricKind::sim || shape.fabric == FabricKind::ofi) {
    throw CLI::ValidationError("--fabric sim and ofi: only with --backend host");
  }
}

void settle_gpu(const CLI::App& app, BenchSettings shape, GpuBenchSettings& gpu) {
  if (app.count("--hidden") == 0) shape.hidden = 7168;
  if (app.count("--experts") == 0) shape.experts = 256;
  if (app.count("--token-sweep") == 0) {
    gpu.tokens = {app.count("--tokens") == 0 ? 4096 : shape.tokens};
  }
  if (app.count("--dtype") > 0) gpu.dtypes = {shape.dtype};
  if (app.count("--mode") > 0 && shape.mode != BenchMode::throughput) {
    throw CLI::ValidationError("--backend cuda measures --mode throughput or --mode latency");
  }
  if (shape.fabric == FabricKind::sim || shape.fabric == FabricKind::ofi) {
    throw CLI::ValidationError("--fabric sim and ofi: only with --backend host");
  }
  if (app.count("--domain-size") > 0) {
    throw CLI::ValidationError("--domain-size: only with --backend host");
  }
  for (const Dtype dtype : gpu.dtypes) {
    shape.dtype = dtype;
    check(shape);
  }
  gpu.shape = shape;
}

}  // namespace ferry::cli
