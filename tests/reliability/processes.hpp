// Ranks as forked processes, which report to the test through a pipe.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/test_port.hpp"
#include "ferry/ferry.hpp"

namespace ferry::test {

/// Names in /dev/shm of objects that children of this test made.
std::vector<std::string> shared_memory_names();

/// Seconds of the monotonic clock, the same in all processes.
double now();

/// What a rank tells: one line at a time.
class Reporter {
 public:
  explicit Reporter(int pipe) : pipe_(pipe) {}
  void line(const std::string& text) const;

 private:
  int pipe_;
};

/// `ranks` children that run `body` and then end. The destructor kills and reaps what is left.
class Ranks {
 public:
  using Body = std::function<void(int rank, std::shared_ptr<Bootstrap>, const Reporter&)>;
  Ranks(int ranks, const Body& body);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Another process takes the place of a rank that was killed, with a bootstrap that joins.
  void restart(int rank);
  /// The next line of a rank; empty when it ended or `seconds` passed.
  std::string line(int rank, double seconds);
  void signal(int rank, int number) const;
  /// Waits for a rank's end: its exit code, 128 + signal, or −1 after `seconds`.
  int join(int rank, double seconds);

 private:
  struct Child {
    pid_t pid = -1;
    int pipe = -1;
    std::string buffer{};
    int status = -1;
  };
  void start(int rank, bool join);

  Body body_;
  std::uint16_t port_;
  std::vector<Child> children_;
};

}  // namespace ferry::test
