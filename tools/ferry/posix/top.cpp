// `ferry top` is part of the Python package, which reads what Prometheus reads.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "command.hpp"

namespace ferry::cli {
namespace {

/// Returns only when there is no python3.
int start_top(std::vector<std::string> words) {
  words.insert(words.begin(), {"python3", "-m", "ferry", "top"});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execvp(arguments.front(), arguments.data());
  fmt::print(stderr, "ferry top: cannot start python3: {}\n", std::strerror(errno));
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
