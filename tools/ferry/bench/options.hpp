// What the parts of the command line of `ferry bench` share.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench/gpu.hpp"
#include "bench/settings.hpp"
#include "command.hpp"
#include "ferry/group.hpp"

namespace ferry::cli {

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;

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

/// Throws CLI::ValidationError when the shape cannot be.
void check(const BenchSettings& settings);

/// Options that only --backend cuda has.
struct GpuArguments {
  Backend backend = Backend::host;
  GpuBenchSettings settings{};
  std::string nccl = "auto";
  std::string plot_file{};
  std::vector<std::int64_t> latency_tokens{};  ///< --token-sweep in latency mode
};
void add_gpu_options(CLI::App* app, GpuArguments& given, CLI::Option* json);
/// Throws CLI::ValidationError when one of them was given, for another backend.
void refuse_gpu_options(const CLI::App& app, BenchMode mode);
/// Latency mode on either engine: what was not given is the shape of docs/benchmarks.md on GPUs.
/// Numbers of tokens go to `latency_tokens`.
void settle_latency(const CLI::App& app, BenchSettings& shape, GpuArguments& given);
/// What was not given is the shape of docs/benchmarks.md, in bf16 and in e4m3.
void settle_gpu(const CLI::App& app, BenchSettings shape, GpuBenchSettings& gpu);

}  // namespace ferry::cli
