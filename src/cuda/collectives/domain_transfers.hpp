// send and recv between ranks of different domains, beside the order of calls. What crosses lies in
// pinned memory and goes by the transfers of the host engine. The caller starts all that the GPU
// does, on its own stream: a send copies there and tells so by a word; a receive tells that the
// stream has come so far, waits for a word, and copies from there. A thread looks at the words,
// moves, and makes no CUDA call (domain_gpus.hpp says why).
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "base/kept_error.hpp"
#include "core/stream_state.hpp"
#include "cuda/collectives/domain_gpus.hpp"

namespace ferry::cuda {

/// One under way; its event's state. All but `done` is of the thread, but before it is listed.
struct CrossingTransfer final : Event::State {
  /// In pinned memory, in front of the bytes; each is written by one side alone.
  struct Words {
    alignas(64) std::uint64_t told = 0;      ///< how far the stream is
    alignas(64) std::uint64_t released = 0;  ///< 1: a receive may copy
  };

  bool sends = false;
  int peer = 0;
  int tag = 0;
  std::size_t bytes = 0;
  std::shared_ptr<std::byte> memory{};
  bool begun = false;
  Event moving{};      ///< once begun, of the host engine
  bool moved = false;  ///< that has ended, well or not
  KeptError error{};
  std::atomic<bool> abandoned{false};  ///< the stream will not come to the end
  std::atomic<bool> done{false};

  Words& words() const { return *reinterpret_cast<Words*>(memory.get()); }
  TensorView data() const;
  std::uint64_t told() const;
  void release() const;
  const char* call() const { return sends ? "send" : "recv"; }
  void end();
  bool ready() override { return done.load(std::memory_order_acquire); }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override;

 private:
  std::mutex mutex_{};
  std::condition_variable ended_{};
};

class DomainTransfers {
 public:
  /// What they need of the collectives whose they are; all outlives them.
  struct Owner {
    DomainGpus& gpus;
    CollectivesEngine& all;  ///< of the host, among all ranks
    /// Why nothing moves any more; none: it does.
    std::function<std::optional<Error>()> dead;
    /// Fails the collectives of all ranks; what to tell.
    std::function<Error(const char* call, const Error& error)> fail;
  };

  explicit DomainTransfers(Owner owner) : owner_(std::move(owner)) {}
  ~DomainTransfers();
  DomainTransfers(const DomainTransfers&) = delete;
  DomainTransfers& operator=(const DomainTransfers&) = delete;

  /// With no stream it has ended.
  Event transfer(bool sends, const TensorView& x, int peer, int tag, Stream* stream);
  /// Waits until none is under way, so long at most.
  void settle(std::chrono::nanoseconds most);
  /// Those that have not begun to move never will.
  void stop();

 private:
  using Held = std::shared_ptr<CrossingTransfer>;
  /// Transfers that match each other in the order of their calls.
  using Order = std::set<std::tuple<bool, int, int>>;

  Held make(bool sends, const TensorView& x, int peer, int tag);
  void start_on(Stream& stream, const CrossingTransfer& one, const TensorView& x);
  Event move(const CrossingTransfer& one, Stream* stream);
  // On the thread.
  void run();
  bool step(CrossingTransfer& one, Order& waiting);
  void begin(CrossingTransfer& one);
  void lose(CrossingTransfer& one, const Error& error);
  void give_up();

  Owner owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Held> open_;
  std::atomic<bool> stopped_{false};
  bool ends_ = false;
  std::thread thread_;  // started by the first that has a stream
};

}  // namespace ferry::cuda
