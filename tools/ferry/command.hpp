// The subcommands of `ferry`. Each registers itself and, when chosen, sets the exit code.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace ferry::cli {

/// Exit code of a wrong command line, for every subcommand.
inline constexpr int kUsageError = 2;

/// The command line cut in two: what `ferry` reads, and the program that `ferry run` starts
/// (everything after the first `--`).
struct CommandLine {
  std::vector<std::string> own;
  std::vector<std::string> program;
  bool separated = false;  ///< there was a `--`
};

/// Whether a result can be written into the file, before anything is measured for it. False, and
/// says so. "": there is none.
bool may_write(const char* command, const std::string& file);
/// The same of an image, whose name says what it is; and whether anything here can draw it.
bool may_draw(const char* command, const std::string& image);
/// Says so, with errno's reason; false.
bool cannot_write(const char* command, const std::string& file);

void add_run(CLI::App& app, const CommandLine& line, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_simulate(CLI::App& app, int& exit_code);
void add_calibrate(CLI::App& app, int& exit_code);
void add_top(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, const CommandLine& line, int& exit_code);

}  // namespace ferry::cli
