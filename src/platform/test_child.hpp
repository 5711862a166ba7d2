// For tests: processes that run a part of this test, memory that they share with it, and what they
// tell it.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "platform/child_process.hpp"
#include "platform/socket.hpp"

namespace ferry::test {

/// Zeroed memory that the children started later share.
std::shared_ptr<void> shared_block(std::size_t bytes);

/// A process that runs `body` and ends with what it returns, or is killed after `longest_life`.
/// POSIX: forked. Windows: this program anew with this test alone, which makes its blocks and
/// starts its children in the same order; the child whose turn it is runs its body there and ends.
/// So what a test does before it starts children must be the same each time.
class Child {
 public:
  explicit Child(const std::function<int()>& body,
                 std::chrono::seconds longest_life = std::chrono::seconds(60));
  /// Kills it.
  ~Child();
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  std::int64_t pid() const { return process_.pid; }
  void kill();
  /// POSIX: a signal, by its number.
  void signal(int number);
  /// Whether it has ended; it stays a zombie.
  bool ended() const;

  struct End {
    bool killed = false;
    int code = 0;  ///< POSIX, killed: the signal's number
    bool good() const { return !killed && code == 0; }
  };
  /// Waits for its end.
  End wait();

 private:
  Process process_{};
  bool waited_ = false;
};

/// POSIX: lines that a child tells its parent. Made before the child.
class Lines {
 public:
  Lines();
  /// Of the child. Ends it when nobody listens.
  void say(const std::string& line) const;
  /// Of the parent: from now on the child alone says something, so its end is heard.
  void listen() { child_.reset(); }
  /// The next one; what has come of it when the child has ended or the time is over.
  std::string next(std::chrono::nanoseconds within);

 private:
  Socket parent_{};
  Socket child_{};
  std::string heard_{};
};

}  // namespace ferry::test
