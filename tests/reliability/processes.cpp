#include "processes.hpp"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <thread>

namespace ferry::test {

namespace {

/// Every child so far: other jobs on this machine have names of their own.
std::vector<pid_t>& children_so_far() {
  static std::vector<pid_t> pids;
  return pids;
}

}  // namespace

std::vector<std::string> shared_memory_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("ferry")) continue;
    for (pid_t pid : children_so_far()) {
      if (name.find("." + std::to_string(pid) + ".") != std::string::npos) names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Reporter::line(const std::string& text) const {
  const std::string whole = text + "\n";
  if (write(pipe_, whole.data(), whole.size()) < 0) _exit(3);
}

Ranks::Ranks(int ranks, const Body& body)
    : body_(body), port_(free_port()), children_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) start(rank, false);
}

void Ranks::start(int rank, bool join) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    int code = 0;
    const Reporter reporter(ends[1]);
    try {
      TcpOptions options;
      options.rank = rank;
      options.size = static_cast<int>(children_.size());
      options.port = port_;
      options.secret = "secret of " + std::to_string(port_);
      options.deadline = std::chrono::seconds(30);
      options.join = join;
      body_(rank, tcp_bootstrap(options), reporter);
    } catch (const std::exception& error) {
      reporter.line(std::string("uncaught: ") + error.what());
      code = 2;
    }
    _exit(code);
  }
  close(ends[1]);
  children_so_far().push_back(pid);
  children_[static_cast<std::size_t>(rank)] = {pid, ends[0], {}, -1};
}

void Ranks::restart(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.status < 0) waitpid(child.pid, nullptr, 0);
  close(child.pipe);
  start(rank, true);
}

Ranks::~Ranks() {
  for (Child& child : children_) {
    if (child.status < 0) {
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
    close(child.pipe);
  }
}

std::string Ranks::line(int rank, double seconds) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  const double end = now() + seconds;
  while (true) {
    if (const auto at = child.buffer.find('\n'); at != std::string::npos) {
      std::string text = child.buffer.substr(0, at);
      child.buffer.erase(0, at + 1);
      return text;
    }
    const double left = std::max(end - now(), 0.0);
    pollfd waiting{child.pipe, POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(std::ceil(left * 1000))) <= 0) return {};
    char bytes[4096];
    const ssize_t got = read(child.pipe, bytes, sizeof(bytes));
    if (got <= 0) return {};
    child.buffer.append(bytes, static_cast<std::size_t>(got));
  }
}

void Ranks::signal(int rank, int number) const {
  kill(children_[static_cast<std::size_t>(rank)].pid, number);
}

int Ranks::join(int rank, double seconds) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  const double end = now() + seconds;
  while (child.status < 0) {
    int status = 0;
    if (waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    } else if (now() > end) {
      return -1;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  return child.status;
}

}  // namespace ferry::test
