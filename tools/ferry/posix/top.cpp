// `ferry top` is part of the Python package, which reads what Prometheus reads.
#include <fmt/format.h>

#include <cstring>
#include <string>
#include <vector>

#include "command.hpp"
#include "platform/posix/process_group.hpp"

namespace ferry::cli {
namespace {

/// Returns only when there is no python3.
int start_top(std::vector<std::string> words) {
  words.insert(words.begin(), {"python3", "-m", "ferry", "top"});
  const int reason = become_program(words);
  fmt::print(stderr, "ferry top: cannot start python3: {}\n", std::strerror(reason));
  return 1;
}

}  // namespace

void add_top(CLI::App& app, int& exit_code) {
  CLI::App* top = app.add_subcommand(
      "top", "Ranks, rates, waits and masks of running groups (needs the Python package)");
  top->set_help_flag();
  top->allow_extras();
  top->prefix_command();
  top->callback([top, &exit_code] { exit_code = start_top(top->remaining()); });
}

}  // namespace ferry::cli
