// Forked processes, process groups and signals.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "platform/child_process.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry {

/// A child of fork that runs `body` and ends with what it returns, without the exit handlers of
/// this process; the kernel kills it when this thread ends. Throws std::system_error.
std::int64_t fork_process(const std::function<int()>& body);

/// As `end_of` a Process.
std::optional<ProcessEnd> end_of(std::int64_t pid);
/// Waits for the end of a child.
ProcessEnd reap(std::int64_t pid);

void kill_process(std::int64_t pid);
/// Sends a signal to all of a group. No error when it is gone.
void signal_group(std::int64_t group, int signal);
/// True while any process of the group remains. Reaps those that were handed to this process.
bool group_remains(std::int64_t group);
/// From now on what its children leave behind is handed to this process.
void adopt_orphans();

/// Zeroed memory that this process shares with those forked after. Throws std::system_error.
std::shared_ptr<void> forked_block(std::size_t bytes);

/// Signals of this process as something to read. To be made before any thread.
class SignalQueue {
 public:
  /// Blocks them. Throws std::system_error.
  explicit SignalQueue(std::initializer_list<int> signals);
  /// For `wait_for`.
  int descriptor() const { return queue_.get(); }
  /// The next one; 0: none has come.
  int next();

 private:
  UniqueDescriptor queue_{};
};

/// Runs another program in the place of this one. Returns only if that failed: its errno.
int become_program(const std::vector<std::string>& command);

/// This process is on that host from now on: a network namespace that `ip netns` has named. What it
/// has opened before stays where it is. Throws std::system_error.
void enter_network_namespace(const std::string& name);

}  // namespace ferry
