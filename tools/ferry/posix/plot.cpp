#include "bench/plot.hpp"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ferry::cli {
namespace {

/// python3 reads the program from its standard input. Returns its exit code.
int run_python(std::string_view program, const std::string& json, const std::string& image) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[0], STDIN_FILENO);
    close(ends[0]);
    close(ends[1]);
    execlp("python3", "python3", "-", json.c_str(), "--out", image.c_str(), nullptr);
    _exit(127);
  }
  close(ends[0]);
  auto* before = std::signal(SIGPIPE, SIG_IGN);
  while (pid > 0 && !program.empty()) {
    const ssize_t written = write(ends[1], program.data(), program.size());
    if (written < 0 && errno != EINTR) break;
    if (written > 0) program.remove_prefix(static_cast<std::size_t>(written));
  }
  close(ends[1]);
  std::signal(SIGPIPE, before);
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace

bool draw_plot(std::string_view program, const std::string& json_file, const std::string& image) {
  const int code = run_python(program, json_file, image);
  if (code != 0) fmt::print(stderr, "ferry: python3 with matplotlib drew no plot\n");
  return code == 0;
}

bool draw_text(std::string_view program, const std::string& json, const std::string& image) {
  std::string file = (std::filesystem::temp_directory_path() / "ferry-XXXXXX").string();
  const int opened = mkstemp(file.data());
  if (opened < 0) {
    fmt::print(stderr, "ferry: no file can be made in {}\n", file);
    return false;
  }
  close(opened);
  std::ofstream(file) << json;
  const bool drawn = draw_plot(program, file, image);
  std::filesystem::remove(file);
  return drawn;
}

}  // namespace ferry::cli
