// Rank 0's store: one thread, one poll, nonblocking sockets around a StoreServer.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/socket.hpp"
#include "bootstrap/store_server.hpp"

namespace ferry::bootstrap {

class StoreThread {
 public:
  struct Config {
    StoreServer::Config server{};
    Socket listener;
    Socket own;           ///< rank 0's own connection
    std::string place{};  ///< where it listens, as in StoreAddress::text
    /// How long the end may take while answers are still on their way to slow ranks.
    std::chrono::nanoseconds linger = std::chrono::seconds(60);
  };
  /// Throws Error(system) if there is no descriptor or thread left.
  explicit StoreThread(Config config);
  /// Ends in good order: every answer is delivered first, within `linger`. Not to be called in a
  /// forked child, which has no such thread.
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  /// Makes room for a new store at that place: the store of this process that listens there, if its
  /// ranks have met or failed to, stops listening. It serves its ranks as before.
  static void free_place(const std::string& place);

  /// Why the last visitor could not be let in (an errno, such as EMFILE); 0: it could.
  int accept_error() const { return accept_error_.load(std::memory_order_relaxed); }
  /// Whether the store ended because there was no memory.
  bool out_of_memory() const { return out_of_memory_.load(std::memory_order_relaxed); }

 private:
  using Connection = StoreServer::Connection;
  using Clock = std::chrono::steady_clock;
  struct Link {
    Socket socket;
    bool ended = false;      // the peer closed, or the connection broke
    bool shut_down = false;  // we said everything
  };

  void run();
  void answer();
  void serve(std::chrono::milliseconds longest);
  void end();
  void accept_some();
  void make_room();
  void read(Connection id, Link& link);
  void write(Connection id, Link& link);
  void settle();
  bool delivered() const;

  enum class Place { quiet, asked_for, answered };

  StoreServer server_;
  const std::string place_;
  const std::int64_t process_;
  Socket listener_;
  int wakeup_error_ = 0;
  Wakeup wakeup_;
  const std::chrono::nanoseconds linger_;
  std::map<Connection, Link> links_;
  std::vector<std::byte> buffer_;
  Clock::time_point accept_again_{};  // after the process ran out of descriptors
  std::atomic<int> accept_error_{0};  // relaxed: nothing else is read on the strength of it
  std::atomic<bool> out_of_memory_{false};
  std::atomic<bool> stop_{false};
  std::atomic<Place> asked_{Place::quiet};
  std::thread thread_;
};

}  // namespace ferry::bootstrap
