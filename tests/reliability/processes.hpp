// Ranks as processes, which report to the test line by line.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/test_port.hpp"
#include "ferry/ferry.hpp"
#include "platform/test_child.hpp"

namespace ferry::test {

/// Names in /dev/shm of objects that children of this test made.
std::vector<std::string> shared_memory_names();

/// Seconds of the monotonic clock, the same in all processes.
double now();

/// What a rank tells: one line at a time.
class Reporter {
 public:
  explicit Reporter(const Lines& lines) : lines_(lines) {}
  void line(const std::string& text) const { lines_.say(text); }

 private:
  const Lines& lines_;
};

/// `ranks` children that run `body` and then end. The destructor kills and reaps what is left.
class Ranks {
 public:
  using Body = std::function<void(int rank, std::shared_ptr<Bootstrap>, const Reporter&)>;
  Ranks(int ranks, const Body& body);

  /// Another process takes the place of a rank that was killed, with a bootstrap that joins.
  void restart(int rank);
  /// The next line of a rank; empty when it ended or `seconds` passed.
  std::string line(int rank, double seconds);
  void signal(int rank, int number);
  /// Waits for a rank's end: its exit code, 128 + signal, or −1 after `seconds`.
  int join(int rank, double seconds);

 private:
  struct Seat {
    std::unique_ptr<Lines> lines{};
    std::unique_ptr<Child> child{};
    int status = -1;
  };
  void start(int rank, bool join);
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  Body body_;
  std::uint16_t port_;
  std::vector<Seat> seats_;
};

}  // namespace ferry::test
