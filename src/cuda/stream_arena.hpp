// GPU memory handed out in the order of streams: who gets a piece that others used waits for them
// on the GPU, not on the CPU.
//
// Peers write into a piece only after the entry swap of a kernel on its new user's stream, so that
// this stream's waits protect the earlier user from them, too.
#pragma once
#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "cuda/runtime.hpp"
#include "engine/arena.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::cuda {

/// Who takes memory, and for how long.
struct User {
  cudaStream_t stream = nullptr;
  unsigned long long id = 0;        ///< of the stream
  bool captured = false;            ///< into a graph: the pieces live as long as the graph
  const OnWait* on_wait = nullptr;  ///< for the taking alone
  const char* call = "";            ///< for messages
  int rank = -1;
};

/// Thread-safe: tensors are dropped on any thread.
class StreamArena {
 public:
  /// `deadline` bounds what the CPU waits for.
  StreamArena(std::shared_ptr<EventPool> events, std::chrono::nanoseconds deadline)
      : events_(std::move(events)), deadline_(deadline) {}

  void add(const fabric::Segment& segment) { arena_.add(segment); }
  /// Nothing when no free piece is large enough. For a capture, waits on the CPU for the earlier
  /// users, asking `user.on_wait` (nothing at the deadline).
  std::optional<engine::Region> take(std::size_t bytes, const User& user);
  /// The same, of pieces that nobody uses any more: peers may write there at once.
  std::optional<engine::Region> take_idle(std::size_t bytes, const User& user);
  /// Gives back all but the first `bytes` of a piece, which nobody has used since it was taken.
  void shrink(const engine::Region& region, std::size_t bytes);
  /// The piece goes back; its users so far are waited for by the next one. Never throws.
  void give_back(const engine::Region& region) noexcept;
  /// Nobody uses the piece after this event: saves `give_back` from recording one.
  void settle(const engine::Region& region, const GpuEvent& event);
  /// The piece that holds `pointer` is used on this stream, too. False: there is none.
  bool record_stream(const void* pointer, cudaStream_t stream);
  /// Whether the work that used pieces given back has ended.
  bool at_rest();

  std::optional<fabric::Address> find(const void* pointer, std::size_t bytes) const {
    return arena_.find(pointer, bytes);
  }
  std::size_t total_bytes() const { return arena_.total_bytes(); }
  std::size_t used_bytes() const { return arena_.used_bytes(); }

 private:
  /// A piece that is handed out.
  struct Live {
    std::size_t bytes = 0;
    User user{};
    std::set<cudaStream_t> others{};
    GpuEvent settled{};
  };
  /// A piece that is free for whoever waits for `event`.
  struct Pending {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    unsigned long long stream = 0;  ///< id of the one that needs not wait itself
    GpuEvent event{};
  };
  /// A piece whose streams could not be asked, because they were being captured.
  struct Deferred {
    engine::Region region{};
    std::set<cudaStream_t> streams{};
  };

  void forget_done();
  void retry_deferred();
  void release(const engine::Region& region, const std::set<cudaStream_t>& streams);
  void hand_out(const engine::Region& region, const User& user);
  bool is_idle(const engine::Region& region) const;
  std::vector<GpuEvent> follow(const engine::Region& region, const User& user) const;
  bool await(const std::vector<GpuEvent>& events, const OnWait* on_wait) const;

  std::shared_ptr<EventPool> events_;
  std::chrono::nanoseconds deadline_;
  engine::Arena arena_{};
  std::mutex mutex_;
  std::map<const std::byte*, Live> live_;  // by address
  std::deque<Pending> pending_;            // the oldest first
  std::vector<Deferred> deferred_;
};

}  // namespace ferry::cuda
