// For tests: processes that run a part of this test, and memory that they share with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "platform/unique_descriptor.hpp"

namespace ferry::test {

/// Zeroed memory that the children started later share.
std::shared_ptr<void> shared_block(std::size_t bytes);

/// A process that runs `body` and ends with what it returns. POSIX: forked. Windows: this program
/// anew with this test alone, which makes its blocks and starts its children in the same order; the
/// child whose turn it is runs its body there and ends. So what a test does before it starts
/// children must be the same each time.
class Child {
 public:
  explicit Child(const std::function<int()>& body);
  /// Kills it.
  ~Child();
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  std::int64_t pid() const { return pid_; }
  void kill();
  /// Whether it has ended; it stays a zombie.
  bool ended() const;

  struct End {
    bool killed = false;
    int code = 0;
  };
  /// Waits for its end.
  End wait();

 private:
  std::int64_t pid_ = 0;       // 0: waited for
  UniqueDescriptor handle_{};  // Windows
};

}  // namespace ferry::test
