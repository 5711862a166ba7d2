// A rank that meets the others at the TCP store of rank 0. tcp_join.cpp: how it gets there;
// tcp.cpp: what it does there.
#pragma once
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/wait_notice.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/store_client.hpp"
#include "bootstrap/store_errors.hpp"
#include "bootstrap/store_thread.hpp"
#include "bootstrap/wait.hpp"

namespace ferry::bootstrap {

/// Throws Error(invalid_argument).
void check(const TcpOptions& options);

class TcpBootstrap final : public Bootstrap {
 public:
  explicit TcpBootstrap(const TcpOptions& options);
  ~TcpBootstrap() override;
  TcpBootstrap(const TcpBootstrap&) = delete;
  TcpBootstrap& operator=(const TcpBootstrap&) = delete;

  int rank() const override { return who_.rank; }
  int size() const override { return who_.size; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds deadline,
                                                 const OnWait& on_wait) override;
  std::string own_address() const override { return own_address_; }
  std::string job() const override { return who_.store; }

 private:
  void start_store(const TcpOptions& options, Clock::time_point due);
  /// Between two polls of what comes: the caller's `on_wait`, and a word if this takes long.
  void while_waiting(const TcpOptions& options);
  void connect(const TcpOptions& options, Clock::time_point due);
  bool try_address(const SocketAddress& address, const TcpOptions& options, Clock::time_point due);
  bool shake_hands(const TcpOptions& options, Clock::time_point due);
  void pause(const TcpOptions& options, Clock::time_point due, std::chrono::milliseconds time);
  [[noreturn]] void raise_unreached(const TcpOptions& options) const;

  void pump(Clock::time_point until);
  void read_all();
  void check_usable(std::span<const std::byte> mine) const;
  std::optional<Error> trouble() const;
  void wait_for_parts(std::chrono::nanoseconds deadline, const OnWait& on_wait);
  void say_who_is_missing();
  void say_farewell(Farewell farewell);
  GatherState gather_state() const {
    return {.sequence = client_->sequence(), .arrived = client_->arrived()};
  }

  const Speaker who_;
  const std::int64_t process_;
  const std::chrono::nanoseconds notice_after_;
  std::optional<WaitNotice> notice_;  // of the wait that is under way
  struct Asked {
    Clock::time_point at;
    std::uint64_t answers;  // before
  };
  std::optional<Asked> asked_;          // who is missing, for the notice
  std::unique_ptr<StoreThread> store_;  // rank 0 only
  Socket socket_;
  std::string own_address_;
  std::optional<StoreClient> client_;
  std::vector<std::byte> buffer_;
  std::string last_problem_;     // of the attempts to connect
  bool found_ = false;           // one of them met a Ferry store
  std::optional<Error> broken_;  // what every further call throws
};

}  // namespace ferry::bootstrap
