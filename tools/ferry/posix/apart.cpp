// Simulations in processes of their own.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "platform/posix/process_group.hpp"
#include "posix/process_end.hpp"
#include "simulate/network.hpp"

namespace ferry::cli {
namespace {

/// A process that writes what its job returned to a file that only this program knows.
class Apart {
 public:
  explicit Apart(const std::function<std::vector<double>()>& job) : file_(std::tmpfile()) {
    if (!file_) throw std::system_error(errno, std::generic_category(), "tmpfile");
    child_ = fork_process([&] { return write_result(job); });
  }
  Apart(Apart&& other) noexcept
      : file_(std::move(other.file_)), child_(std::exchange(other.child_, -1)) {}
  Apart& operator=(Apart&&) = delete;
  ~Apart() {
    if (child_ > 0) reap(child_);
  }

  bool has_ended() const { return end_of(child_).has_value(); }

  std::vector<double> result() {
    const ProcessEnd end = reap(std::exchange(child_, -1));
    std::rewind(file_.get());
    std::vector<double> values;
    if (!end.failed()) {
      for (double value = 0; std::fread(&value, sizeof(value), 1, file_.get()) == 1;) {
        values.push_back(value);
      }
      return values;
    }
    std::string words;
    for (int c = std::fgetc(file_.get()); c != EOF; c = std::fgetc(file_.get())) {
      words += static_cast<char>(c);
    }
    if (words.empty()) words = fmt::format("a simulation {}", describe(end));
    throw std::runtime_error(words);
  }

 private:
  int write_result(const std::function<std::vector<double>()>& job) {
    int code = 0;
    try {
      const std::vector<double> values = job();
      if (!values.empty()) {
        std::fwrite(values.data(), sizeof(double), values.size(), file_.get());
      }
    } catch (const std::exception& error) {
      code = 1;
      std::fputs(error.what(), file_.get());
    }
    std::fflush(file_.get());
    return code;
  }

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
  std::int64_t child_ = -1;
};

}  // namespace

std::vector<std::vector<double>> run_apart(
    const std::vector<std::function<std::vector<double>()>>& jobs, int at_once,
    const std::function<void(int)>& waits) {
  std::vector<std::vector<double>> results;
  std::vector<Apart> running;
  const auto limit = static_cast<std::size_t>(at_once);
  const auto take = [&] {
    for (auto pause = std::chrono::milliseconds(1); !running[results.size()].has_ended();
         pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
      waits(static_cast<int>(results.size()));
      std::this_thread::sleep_for(pause);
    }
    results.push_back(running[results.size()].result());
  };
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (running.size() - results.size() == limit) take();
    running.emplace_back(jobs[i]);
  }
  while (results.size() < jobs.size()) take();
  return results;
}

}  // namespace ferry::cli
