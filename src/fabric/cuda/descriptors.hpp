// File descriptors of memory on their way from the rank that owns it to its peers.
#pragma once
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/segment_handle.hpp"
#include "platform/process.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry::fabric {

/// Takes a copy of a descriptor out of another process. The kernel asks for the right to trace it:
/// not given under Yama's ptrace_scope 1 or in a container without CAP_SYS_PTRACE. Throws
/// std::runtime_error saying why.
UniqueDescriptor take_descriptor(const ProcessName& owner, int number);

/// Hands this rank's descriptors to processes of this user that know the name: an abstract unix
/// socket, served by a thread.
class DescriptorServer {
 public:
  /// `name` is a secret of the group. Throws std::runtime_error.
  explicit DescriptorServer(const JobKey& name);
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

  void offer(SegmentId segment, int descriptor);  ///< the caller keeps the descriptor
  void withdraw(SegmentId segment) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Client {
    UniqueDescriptor socket;
    Clock::time_point due;
  };
  static constexpr std::size_t kMostClients = 64;  // that have asked nothing yet

  void serve() noexcept;
  void admit(Clock::time_point now) noexcept;
  bool answer(int client) noexcept;

  UniqueDescriptor listener_;
  UniqueDescriptor stop_;
  std::int64_t owner_pid_;
  std::mutex mutex_;
  std::map<SegmentId, int> offers_;
  std::vector<Client> clients_;  // of the thread
  std::thread thread_;
};

/// Asks a DescriptorServer. Throws std::runtime_error saying why it did not give.
UniqueDescriptor ask_for_descriptor(const JobKey& name, SegmentId segment,
                                    std::chrono::nanoseconds deadline);

}  // namespace ferry::fabric
