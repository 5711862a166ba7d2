// The command line of `ferry bench`.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/settings.hpp"

namespace ferry::cli {

struct BenchArguments {
  BenchSettings settings{};
  std::vector<std::int64_t> latency_tokens{};  ///< one run of latency mode each
  std::string nccl = "auto";                   ///< as find_nccl takes it
  bool json = false;
  std::string json_file{};  ///< "": standard output
  std::string plot_file{};  ///< "": none

  // As they were given; settle_options makes settings of them.
  bool threads = false;
  bool processes = false;
  int chain = 4;
  std::vector<std::int64_t> token_sweep{};
};

void add_bench_options(CLI::App* app, BenchArguments& given);
/// What was not given is the shape of docs/benchmarks.md: throughput mode on GPUs has it in bf16
/// and in e4m3. Throws CLI::ValidationError when the shape cannot be, or an option is of another
/// backend or mode.
void settle_options(const CLI::App& app, BenchArguments& given);

}  // namespace ferry::cli
