// What the command has on Linux alone.
#include <fmt/format.h>

#include "bench/nccl.hpp"
#include "bench/plot.hpp"
#include "command.hpp"
#include "doctor/machine.hpp"

namespace ferry::cli {
namespace {

void add_absent(CLI::App& app, const char* name, const char* instead, int& exit_code) {
  CLI::App* command = app.add_subcommand(name, fmt::format("Not on Windows; {}", instead));
  command->set_help_flag();
  command->allow_extras();
  command->prefix_command();
  command->callback([name, instead, &exit_code] {
    fmt::print(stderr, "ferry {}: not on Windows; {}\n", name, instead);
    exit_code = 1;
  });
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  add_absent(app, "plan", "plan on Linux (or WSL)", exit_code);
}

void add_simulate(CLI::App& app, int& exit_code) {
  add_absent(app, "simulate", "simulate on Linux (or WSL)", exit_code);
}

void add_calibrate(CLI::App& app, int& exit_code) {
  add_absent(app, "calibrate", "calibrate on the machines that are planned for", exit_code);
}

void add_top(CLI::App& app, int& exit_code) {
  add_absent(app, "top", "it is part of the Python package: python -m ferry top", exit_code);
}

Nccl find_nccl(const std::string& /*asked*/) {
  return {"", "", "there is no NCCL on Windows"};
}

std::string nccl_version(int code) {
  return std::to_string(code);
}

std::string no_plot() {
  return "no plots on Windows; leave it out: the programs in bench/ draw what --json writes";
}

bool draw_plot(std::string_view /*program*/, const std::string& json_file,
               const std::string& /*image*/) {
  fmt::print(stderr, "ferry: no plots on Windows; python bench/plot_exchange.py draws {}\n",
             json_file);
  return false;
}

bool draw_text(std::string_view /*program*/, const std::string& /*json*/,
               const std::string& /*image*/) {
  fmt::print(stderr, "ferry: no plots on Windows; --json has what would be drawn\n");
  return false;
}

}  // namespace ferry::cli
