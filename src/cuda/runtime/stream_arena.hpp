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

#include "cuda/runtime/runtime.hpp"
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

/// Work that uses a piece. Its stream may be gone before the piece is given back, so the arena asks
/// the work, not the stream. Must hold no piece itself.
class Use {
 public:
  virtual ~Use() = default;
  /// What a stream can wait for. Null: the work has ended, or nothing can be recorded now.
  virtual GpuEvent end(EventPool& events) = 0;
  /// Never blocks.
  virtual bool has_ended() const = 0;
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
  /// The piece that holds `pointer`, if there is one, is used by work on the stream of that id.
  void record_use(const void* pointer, unsigned long long stream, std::shared_ptr<Use> use);
  /// The piece that holds `pointer` stays as long as a graph, too; `let_go` must follow, on any
  /// thread and at any time: it asks no stream. False: there is none.
  bool hold(const void* pointer);
  void let_go(const void* pointer) noexcept;
  /// Whether the work that used pieces given back has ended.
  bool at_rest();

  std::optional<fabric::Address> find(const void* pointer, std::size_t bytes) const {
    return arena_.find(pointer, bytes);
  }
  std::size_t total_bytes() const { return arena_.total_bytes(); }
  std::size_t used_bytes() const { return arena_.used_bytes(); }

 private:
  /// Who used a piece, beside the stream that took it.
  struct Others {
    std::set<cudaStream_t> streams{};                           // of the caller, who keeps them
    std::map<unsigned long long, std::shared_ptr<Use>> uses{};  // the last one, by id of the stream
  };
  /// A piece that is handed out.
  struct Live {
    std::size_t bytes = 0;
    User user{};
    Others others{};
    GpuEvent settled{};
    int graphs = 0;                           // that hold it
    std::optional<engine::Region> dropped{};  // given back, while graphs hold it
  };
  /// A piece that is free for whoever waits for `event`.
  struct Pending {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    unsigned long long stream = 0;  ///< id of the one that needs not wait itself
    GpuEvent event{};
  };
  /// A piece whose users could not be asked, because their streams were being captured.
  struct Deferred {
    engine::Region region{};
    Others others{};
    bool held = false;  // by graphs
  };

  void forget_done();
  void retry_deferred();
  void release(const engine::Region& region, Others others, bool held);
  bool can_be_asked(const Others& others) const;
  void await_on_gpu(const engine::Region& region, unsigned long long stream, GpuEvent event);
  std::map<const std::byte*, Live>::iterator live_at(const void* pointer);
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
