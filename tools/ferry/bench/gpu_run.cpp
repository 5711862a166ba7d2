// The command `ferry bench --backend cuda`, around what its ranks do.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <random>
#include <string_view>

#include "bench/gpu.hpp"
#include "bench/plot.hpp"
#include "doctor/machine.hpp"
#include "run/ranks.hpp"

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

bool write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << '\n';
  file.close();
  if (!file.fail()) return true;
  fmt::print(stderr, "ferry bench: cannot write {}: {}\n", path, std::strerror(errno));
  return false;
}

int report(const GpuBenchSettings& settings, const GpuBoard& board, const GpuOutput& output,
           const std::vector<std::string>& command) {
  const std::vector<GpuResult> results = results_of(settings, board);
  if (!output.json || !output.json_file.empty()) fmt::print("{}", table(settings, results));
  if (!output.json) return 0;
  const std::string json = to_json(settings, results, command).dump(1);
  if (output.json_file.empty()) {
    fmt::print("{}\n", json);
    return 0;
  }
  if (!write_file(output.json_file, json)) return 1;
  if (output.plot_file.empty()) return 0;
  return draw_plot(output.json_file, output.plot_file) ? 0 : 1;
}

}  // namespace

bool draw_plot(const std::string& json_file, const std::string& image) {
  const int code = run_python(kPlotProgram, json_file, image);
  if (code != 0) fmt::print(stderr, "ferry bench: python3 with matplotlib drew no plot\n");
  return code == 0;
}

bool gpus_suffice(const BenchSettings& shape) {
  const int gpus = gpu_count();
  if (gpus == 0) {
    fmt::print(stderr,
               "ferry bench: --backend cuda: there is no GPU, or this build has no CUDA "
               "engine (`ferry doctor` says which)\n");
    return false;
  }
  if (shape.ranks <= gpus) return true;
  if (!shape.processes) {
    fmt::print(stderr, "ferry bench: {} ranks on {} GPUs must be processes\n", shape.ranks, gpus);
    return false;
  }
  fmt::print(stderr, "ferry bench: {} ranks share {} GPUs: the figures say little\n", shape.ranks,
             gpus);
  return true;
}

int run_gpu_bench(GpuBenchSettings settings, const std::string& nccl, const GpuOutput& output,
                  const std::vector<std::string>& command) {
  if (!gpus_suffice(settings.shape)) return 1;
  // Unless the user has said otherwise: an all-to-all uses no multicast, and NCCL may hang while it
  // sets that up.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  try {
    settings.nccl = settings.shape.ranks > gpu_count()
                        ? Nccl{"", "", "ranks share GPUs, which its communicators do not"}
                        : find_nccl(nccl);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ferry bench: {}\n", error.what());
    return 1;
  }
  settings.data_seed = std::random_device{}();
  const GpuBoard board(settings);
  RankRun run;
  run.ranks = settings.shape.ranks;
  run.processes = settings.shape.processes;
  const bool terminal = isatty(STDERR_FILENO) == 1;
  run.tick = [&] {
    const std::size_t done = board.done();
    if (!terminal || done >= board.lines.size()) return;
    fmt::print(stderr, "\r\x1b[K{}/{}  {}", done, board.lines.size(),
               name_of(board.lines[done].which));
    std::fflush(stderr);
  };
  const auto failures = run_ranks(run, [&](int, std::shared_ptr<Bootstrap> bootstrap) {
    bench_gpu(settings, board, std::move(bootstrap));
  });
  if (terminal) fmt::print(stderr, "\r\x1b[K");
  if (failures.empty()) return report(settings, board, output, command);
  fmt::print(stderr, "ferry bench: {}\n", summary(failures));
  return 1;
}

}  // namespace ferry::cli
