// ferry: the command line.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "command.hpp"

namespace {

ferry::cli::CommandLine split(int argc, char** argv) {
  ferry::cli::CommandLine line;
  const std::vector<std::string> all(argv + 1, argv + argc);
  const auto separator = std::find(all.begin(), all.end(), "--");
  line.own.assign(all.begin(), separator);
  line.separated = separator != all.end();
  if (line.separated) line.program.assign(separator + 1, all.end());
  return line;
}

}  // namespace

int main(int argc, char** argv) try {
  const ferry::cli::CommandLine line = split(argc, argv);
  CLI::App app("Ferry carries Mixture-of-Experts tokens to their experts and back.", "ferry");
  app.set_version_flag("--version", "ferry " FERRY_VERSION);
  app.require_subcommand(1);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.footer(
      "Exit codes: 0 done; 1 it did not work (the reason is on stderr); 2 wrong command line.\n"
      "`ferry run` passes on the exit code of the program: see `ferry run --help`.");
  int exit_code = 0;
  ferry::cli::add_run(app, line, exit_code);
  ferry::cli::add_doctor(app, exit_code);
  ferry::cli::add_bench(app, line, exit_code);

  std::vector<std::string> arguments(line.own.rbegin(),
                                     line.own.rend());  // CLI11 reads from the back
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : ferry::cli::kUsageError;
  }
  return exit_code;
} catch (const std::exception& error) {
  fmt::print(stderr, "ferry: {}\n", error.what());
  return 1;
}
