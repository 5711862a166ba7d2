#include "processes.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>

namespace ferry::test {

namespace {

/// Every child so far: other jobs on this machine have names of their own.
std::vector<std::int64_t>& children_so_far() {
  static std::vector<std::int64_t> pids;
  return pids;
}

}  // namespace

std::vector<std::string> shared_memory_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("ferry")) continue;
    for (std::int64_t pid : children_so_far()) {
      if (name.find("." + std::to_string(pid) + ".") != std::string::npos) names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Ranks::Ranks(int ranks, const Body& body)
    : body_(body), port_(free_port()), seats_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) start(rank, false);
}

void Ranks::start(int rank, bool join) {
  constexpr auto kForEver = std::chrono::seconds(0);
  Seat& own = seat(rank);
  own = {.lines = std::make_unique<Lines>()};
  const auto run = [&] {
    const Reporter reporter(*own.lines);
    try {
      TcpOptions options;
      options.rank = rank;
      options.size = static_cast<int>(seats_.size());
      options.port = port_;
      options.secret = "secret of " + std::to_string(port_);
      options.deadline = std::chrono::seconds(30);
      options.join = join;
      body_(rank, tcp_bootstrap(options), reporter);
      return 0;
    } catch (const std::exception& error) {
      reporter.line(std::string("uncaught: ") + error.what());
      return 2;
    }
  };
  own.child = std::make_unique<Child>(run, kForEver);
  own.lines->listen();
  children_so_far().push_back(own.child->pid());
}

void Ranks::restart(int rank) {
  join(rank, 60);
  start(rank, true);
}

std::string Ranks::line(int rank, double seconds) {
  return seat(rank).lines->next(
      std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds)));
}

void Ranks::signal(int rank, int number) {
  seat(rank).child->signal(number);
}

int Ranks::join(int rank, double seconds) {
  Seat& own = seat(rank);
  const double end = now() + seconds;
  while (own.status < 0) {
    if (own.child->ended()) {
      const Child::End how = own.child->wait();
      own.status = how.killed ? 128 + how.code : how.code;
    } else if (now() > end) {
      return -1;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  return own.status;
}

}  // namespace ferry::test
