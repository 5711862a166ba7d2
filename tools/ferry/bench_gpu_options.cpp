// The options of `ferry bench --backend cuda`.
#include "bench_options.hpp"
#include "number.hpp"

namespace ferry::cli {

void add_gpu_options(CLI::App* app, GpuArguments& given, CLI::Option* json) {
  GpuBenchSettings& s = given.settings;
  choice<Backend>(app, "--backend", given.backend,
                  {{"host", Backend::host}, {"cuda", Backend::cuda}}, "What runs the exchanges");
  const char* group = "With --backend cuda (throughput mode)";
  app->add_option("--sms", s.sms, "Numbers of SMs that move the rows")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(whole_number(1, 1024))
      ->group(group)
      ->default_str("16");
  app->add_option("--token-sweep", s.tokens, "Numbers of tokens of each rank, instead of --tokens")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(whole_number(1, kMostTokens))
      ->group(group)
      ->default_str("");
  app->add_option("--chain", s.chain, "Calls that are timed together")
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

void refuse_gpu_options(const CLI::App& app) {
  for (const char* name :
       {"--sms", "--token-sweep", "--chain", "--alignment", "--nccl", "--plot"}) {
    if (app.count(name) > 0) {
      throw CLI::ValidationError(fmt::format("{}: only with --backend cuda", name));
    }
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
    throw CLI::ValidationError("--backend cuda measures --mode throughput");
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
