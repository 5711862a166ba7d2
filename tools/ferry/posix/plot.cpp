#include "bench/plot.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "platform/posix/process_group.hpp"
#include "platform/process.hpp"

namespace ferry::cli {

namespace {

/// True when it ran and did not fail.
bool run_python(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "python3");
  const ProcessSpec python{.command = std::move(arguments),
                           .environment = own_environment(),
                           .output = Output::inherited};
  int refused = 0;
  const Process started = start_process(python, refused);
  return refused == 0 && !reap(started.pid).failed();
}

}  // namespace

std::string no_plot() {
  // Only looked for: an import takes a second.
  constexpr const char* kFind =
      "import importlib.util as util, sys; sys.exit(util.find_spec('matplotlib') is None)";
  if (run_python({"-c", kFind})) return {};
  return "no python3 with matplotlib in PATH, which draws; install it (pip install matplotlib), "
         "or leave --plot out";
}

bool draw_plot(std::string_view program, const std::string& json_file, const std::string& image) {
  const bool drawn = run_python({"-c", std::string(program), json_file, "--out", image});
  if (!drawn) fmt::print(stderr, "ferry: python3 with matplotlib drew no plot\n");
  return drawn;
}

bool draw_text(std::string_view program, const std::string& json, const std::string& image) {
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("ferry-{}.json", process_id()))
          .string();
  std::FILE* const file = std::fopen(path.c_str(), "wx");  // nobody else's
  if (file == nullptr) {
    fmt::print(stderr, "ferry: the file {} cannot be made\n", path);
    return false;
  }
  std::fputs(json.c_str(), file);
  std::fclose(file);
  const bool drawn = draw_plot(program, path, image);
  std::filesystem::remove(path);
  return drawn;
}

}  // namespace ferry::cli
