// ferry calibrate: a cluster file from what ferry bench and ferry doctor --net measured.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "command.hpp"
#include "number.hpp"
#include "plan/described.hpp"
#include "plan/fit.hpp"
#include "plan/measured.hpp"

namespace ferry::cli {
namespace {

struct CalibrateOptions {
  std::vector<std::string> results;
  std::string out;
  int points = 5;
};

/// An operation, fitted, and how well.
struct Calibrated {
  std::string operation;
  FittedRates rates{};
  std::vector<Observation> calls{};
  std::vector<bool> fitted{};
  std::vector<double> errors{};  ///< percent, of each call
  double error = 0;              ///< relative, of the rates: what the cluster file says
  double worst = 0, median = 0;  ///< of those that were not fitted
  int held = 0;
};

/// Of nine calls in ten the relative error is at most this, or that of measured values; fitted
/// calls count, too. In percent, rounded up.
double error_of_rates(std::vector<double> percent) {
  for (double& one : percent) one = std::abs(one);
  std::sort(percent.begin(), percent.end());
  const std::size_t tenths = (percent.size() * 9 + 9) / 10;
  const double found = std::ceil(percent[tenths - 1]) / 100;
  return std::clamp(found, error_of("measured"), 1.0);
}

Calibrated calibrated(const std::string& operation, const std::vector<Observation>& calls,
                      int count) {
  Calibrated made{operation, {}, calls, std::vector<bool>(calls.size()), {}};
  std::vector<Observation> points;
  for (const std::size_t i : spread_points(calls, static_cast<std::size_t>(count))) {
    made.fitted[i] = true;
    points.push_back(calls[i]);
  }
  made.rates = fit(points);
  std::vector<double> held;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const double predicted = made.rates.time(calls[i]).seconds();
    const double error = (predicted / calls[i].seconds - 1) * 100;
    made.errors.push_back(std::abs(error) < 0.05 ? 0
                                                 : error);  // the sign of a rounding error is none
    if (!made.fitted[i]) held.push_back(std::abs(made.errors.back()));
  }
  made.error = error_of_rates(made.errors);
  made.held = static_cast<int>(held.size());
  if (held.empty()) {  // nothing says how far off other calls are
    made.error = std::max(made.error, error_of("assumed"));
    return made;
  }
  std::sort(held.begin(), held.end());
  made.worst = held.back();
  made.median = held[held.size() / 2];
  return made;
}

constexpr double kAskedPercent =
    10;  ///< percent of error that is asked of a call that was not fitted

/// Whether it took a time that `ferry plan` would have said it takes.
bool is_covered(const Calibrated& one, const Observation& call) {
  const FittedRates& rates = one.rates;
  const auto at = [&](double by) {
    FittedRates other = rates;
    other.latency_s *= 1 - by;
    other.few_latency_s *= 1 - by;
    other.few_token_s *= 1 - by;
    const double rates_by = std::clamp(by, -0.95, 0.95);  // as rates_of has it
    for (double* rate : {&other.copy, &other.nvlink, &other.nic}) *rate *= 1 + rates_by;
    return other.time(call).seconds();
  };
  const Interval seconds = predicted_interval(at(0), at(one.error), at(-one.error));
  return call.seconds >= seconds.low && call.seconds <= seconds.high;
}

void print_calibrated(const std::vector<Calibrated>& all) {
  fmt::print(
      "| call | GPUs | dtype | tokens | SMs | measured us | predicted us | error % | bottleneck | "
      "|\n"
      "| --- | --: | --- | --: | --: | --: | --: | --: | --- | --- |\n");
  for (const Calibrated& one : all) {
    for (std::size_t i = 0; i < one.calls.size(); ++i) {
      const Observation& call = one.calls[i];
      const ExchangeTime time = one.rates.time(call);
      const char* verdict = one.fitted[i]                             ? "fitted"
                            : std::abs(one.errors[i]) > kAskedPercent ? "**miss**"
                                                                      : "";
      fmt::print("| {} | {} | {} | {} | {} | {:.1f} | {:.1f} | {:+.1f} | {} | {} |\n",
                 call.operation, call.ranks, call.dtype, call.tokens,
                 call.num_sms > 0 ? std::to_string(call.num_sms) : "-", call.seconds * 1e6,
                 time.seconds() * 1e6, one.errors[i], time.bottleneck(), verdict);
    }
  }
  fmt::print(
      "\n| call | not fitted | within {:.0f} % | within the interval | worst % | median % |\n"
      "| --- | --: | --: | --: | --: | --: |\n",
      kAskedPercent);
  for (const Calibrated& one : all) {
    int within = 0, covered = 0;
    for (std::size_t i = 0; i < one.calls.size(); ++i) {
      if (one.fitted[i]) continue;
      within += std::abs(one.errors[i]) <= kAskedPercent ? 1 : 0;
      covered += is_covered(one, one.calls[i]) ? 1 : 0;
    }
    if (one.held == 0) {
      fmt::print("| {} | 0 | - | - | - | - |\n", one.operation);
      continue;
    }
    fmt::print("| {} | {} | {} | {} | {:.1f} | {:.1f} |\n", one.operation, one.held, within,
               covered, one.worst, one.median);
  }
}

std::string fitted_value(const char* key, double value, double error) {
  const std::string stated =
      error > error_of("measured") ? fmt::format(", error: {:.2f}", error) : "";
  return fmt::format("  {}: {{value: {:.4g}, from: measured{}}}\n", key, value, stated);
}

/// Says which fits nothing checks.
void print_unchecked(const std::vector<Calibrated>& all) {
  for (const Calibrated& one : all) {
    if (one.held > 0) continue;
    fmt::print(stderr,
               "Nothing checks the fit of {}: all of its calls ({}) were fitted. Measure more "
               "numbers of tokens (ferry bench --token-sweep, or a file for each --tokens)\n",
               one.operation, one.calls.size());
  }
}

/// Says which operations have no rate of a NIC, and why.
void print_missing_nics(const Measured& measured, const std::vector<Calibrated>& all) {
  if (!measured.nic.empty()) return;
  for (const Calibrated& one : all) {
    if (!std::isinf(one.rates.nic)) continue;
    const bool crossed = std::any_of(one.calls.begin(), one.calls.end(),
                                     [](const Observation& call) { return call.bytes.nic > 0; });
    fmt::print(stderr, "No nic was fitted for {}: {}\n", one.operation,
               crossed ? "no point crosses hosts and waits for it; take more --points"
                       : "no call crosses hosts; ferry doctor --net --json measures its rate");
  }
}

/// Says which contention has no section to stand in.
void print_left_out(const Measured& measured) {
  for (const auto& [operation, times] : measured.contention) {
    if (measured.calls.contains(operation)) continue;
    fmt::print(stderr,
               "The contention of {}, {:.3f}, is left out: there are no calls of it; add a file of "
               "ferry bench --mode throughput --json\n",
               operation, times);
  }
}

std::string cluster_file(const Measured& measured, const std::vector<Calibrated>& all) {
  std::string text = "# Made by ferry calibrate.\n";
  text += fmt::format("host_ranks: {}\n", measured.host_ranks);
  if (measured.memory_gb > 0) {
    text += fmt::format("memory_gb: {{value: {}, from: measured}}\n", measured.memory_gb);
  }
  if (measured.sms > 0) text += fmt::format("sms: {{value: {}, from: measured}}\n", measured.sms);
  if (!measured.nic.empty()) {
    std::vector<double> nic = measured.nic;
    std::nth_element(nic.begin(), nic.begin() + static_cast<std::ptrdiff_t>(nic.size() / 2),
                     nic.end());
    text += fmt::format("nic: {{value: {:.4g}, from: measured, source: ferry doctor --net}}\n",
                        nic[nic.size() / 2] / 1e9);
  }
  for (const Calibrated& one : all) {
    constexpr double kShortest_us = 1e-3;  // less is where the search ended, not a time
    text += one.operation + ":\n";
    const auto latency = [&](const char* key, double seconds) {
      if (std::isinf(seconds)) return;
      text += fitted_value(key, seconds * 1e6 < kShortest_us ? 0 : seconds * 1e6, one.error);
    };
    latency("latency_us",
            std::isinf(one.rates.latency_s) ? one.rates.few_latency_s : one.rates.latency_s);
    latency("few_latency_us", one.rates.few_latency_s);
    if (one.rates.few_token_s > 0) latency("few_token_us", one.rates.few_token_s);
    if (one.rates.overlap > 1) text += fmt::format("  overlap: {}\n", one.rates.overlap);
    if (one.rates.hidden_latency > 0) {
      text += fmt::format("  hidden_latency: {:.3f}\n", one.rates.hidden_latency);
    }
    const auto slowed = measured.contention.find(one.operation);
    if (slowed != measured.contention.end()) {
      text += fmt::format("  contention: {{value: {:.3f}, from: measured}}\n", slowed->second);
    }
    const auto rate = [&](const char* key, double value) {
      if (value / 1e9 <= kMostRate) text += fitted_value(key, value / 1e9, one.error);
    };
    rate(one.calls.front().num_sms > 0 ? "sm_copy" : "copy", one.rates.copy);
    rate("nvlink", one.rates.nvlink);
    rate("nic", one.rates.nic);
  }
  return text;
}

int calibrate(const CalibrateOptions& options) {
  if (!may_write("calibrate", options.out)) return 1;
  const Measured measured = read_results(options.results);
  std::vector<Calibrated> all;
  for (const auto& [operation, calls] : measured.calls) {
    all.push_back(calibrated(operation, calls, options.points));
  }
  if (all.empty() && measured.nic.empty()) {
    throw std::runtime_error(
        "nothing to calibrate with: no dispatch or combine, and no links "
        "between domains; add files of `ferry bench --json` or `ferry doctor --net --json`");
  }
  print_calibrated(all);
  print_unchecked(all);
  print_missing_nics(measured, all);
  print_left_out(measured);
  if (options.out.empty()) return 0;
  std::ofstream out(options.out);
  out << cluster_file(measured, all);
  if (!out.flush()) {
    throw std::runtime_error(fmt::format("--out: {} cannot be written", options.out));
  }
  return 0;
}

}  // namespace

void add_calibrate(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CalibrateOptions>();
  CLI::App* command = app.add_subcommand(
      "calibrate", "Make a cluster file from results of ferry bench and ferry doctor --net");
  command->add_option("results", options->results, "Files of --json")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--out", options->out, "Write the cluster file here");
  command
      ->add_option("--points", options->points,
                   "Calls to fit to, of each operation; the others are predicted")
      ->check(whole_number(3, 1000));
  command->footer("How the points are chosen: docs/planning.md.");
  command->callback([options, &exit_code] { exit_code = calibrate(*options); });
}

}  // namespace ferry::cli
