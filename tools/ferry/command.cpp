// The command line: which subcommand, and what is said of words that name none.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "bench/plot.hpp"
#include "command.hpp"
#include "entry.hpp"
#include "ferry/version.hpp"

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

// How many letters must be changed, added, left out or swapped with the next to get `b` from `a`.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// What to say about a first word that is no command; "" when it is one, or an option.
std::string complaint(const CLI::App& app, const std::vector<std::string>& own) {
  if (own.empty() || own.front().starts_with('-')) return "";
  const std::string word = own.front().substr(0, 40);
  std::string names;
  std::string nearest;
  std::size_t fewest = 3;  // more letters off is no slip
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string name = command->get_name();
    if (name == own.front()) return "";
    names += (names.empty() ? "" : ", ") + name;
    if (const std::size_t off = distance(word, name); off < fewest) {
      fewest = off;
      nearest = name;
    }
  }
  return fmt::format("unknown command '{}'; ", word) +
         (nearest.empty() ? "the commands are " + names : "did you mean " + nearest + "?");
}

}  // namespace

bool ferry::cli::cannot_write(const char* command, const std::string& file) {
  fmt::print(stderr, "ferry {}: cannot write {}: {}\n", command, file, std::strerror(errno));
  return false;
}

bool ferry::cli::may_write(const char* command, const std::string& file) {
  std::error_code ignored;
  const bool there = file.empty() || std::filesystem::exists(file, ignored);
  if (!file.empty() && !std::ofstream(file, std::ios::app)) return cannot_write(command, file);
  if (!there) std::filesystem::remove(file, ignored);
  return true;
}

bool ferry::cli::may_draw(const char* command, const std::string& image) {
  const std::string kind = std::filesystem::path(image).extension().string();
  if (image.empty()) return true;
  const bool known = kind == ".png" || kind == ".svg" || kind == ".pdf";
  if (known && !may_write(command, image)) return false;
  const std::string why =
      known ? no_plot() : fmt::format("got {}; expected a file named .png, .svg or .pdf", image);
  if (!why.empty()) fmt::print(stderr, "ferry {}: --plot: {}\n", command, why);
  return why.empty();
}

int ferry::cli::run_command(int argc, char** argv) try {
  const ferry::cli::CommandLine line = split(argc, argv);
  CLI::App app("Ferry carries Mixture-of-Experts tokens to their experts and back.", "ferry");
  app.set_version_flag("--version", "ferry " + std::string(ferry::version()));
  app.require_subcommand(1);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.footer(
      "Exit codes: 0 done; 1 it did not work (the reason is on stderr); 2 wrong command line.\n"
      "`ferry run` passes on the exit code of the program: see `ferry run --help`.");
  int exit_code = 0;
  ferry::cli::add_run(app, line, exit_code);
  ferry::cli::add_doctor(app, exit_code);
  ferry::cli::add_bench(app, line, exit_code);
  ferry::cli::add_plan(app, exit_code);
  ferry::cli::add_calibrate(app, exit_code);
  ferry::cli::add_simulate(app, exit_code);
  ferry::cli::add_top(app, exit_code);

  if (const std::string words = complaint(app, line.own); !words.empty()) {
    fmt::print(stderr, "ferry: {}\nRun ferry --help for more information.\n", words);
    return ferry::cli::kUsageError;
  }
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
