// The GPU memory of one rank, shared by the engine and by every tensor that lies in it.
#pragma once
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/runtime/runtime.hpp"
#include "cuda/runtime/stream_arena.hpp"
#include "fabric/cuda/block.hpp"
#include "fabric/cuda/device_memory.hpp"
#include "ferry/tensor.hpp"

namespace ferry::cuda {

/// A piece of memory with its owner: it goes back with the last copy.
struct Held {
  engine::Region region{};
  std::shared_ptr<void> owner{};
  explicit operator bool() const { return owner != nullptr; }
  std::byte* data() const { return region.data; }
};

/// Registered memory, which peers read and write, and local memory, which only this GPU uses: plans
/// and results. Tensors keep it alive, so they stay valid after the group is destroyed.
class GpuMemory : public std::enable_shared_from_this<GpuMemory> {
 public:
  /// That device must be current. `deadline` bounds what the CPU waits for.
  GpuMemory(std::unique_ptr<fabric::DeviceMemory> registered, std::chrono::nanoseconds deadline);
  /// Waits for work that used tensors. Of what does not end in time, the memory is never given
  /// back, and a line on stderr says so.
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  int device() const { return device_; }
  const std::shared_ptr<EventPool>& events() const { return events_; }
  /// The stream of calls without one. It lives as long as the tensors that were made on it.
  const User& own() const { return own_; }
  fabric::DeviceMemory& wire() { return *wire_; }
  StreamArena& registered() { return registered_; }
  StreamArena& local() { return local_; }

  /// Nothing when there is no room; the engine can make some.
  Held take_registered(std::size_t bytes, const User& user);
  /// The same, where peers may write at once.
  Held take_idle(std::size_t bytes, const User& user);
  /// Grows as needed. Throws Error(exhausted).
  Held take_local(std::size_t bytes, const User& user);
  /// Gives back all but the first `bytes` of registered memory, which nobody has used yet.
  void shrink(const Held& held, std::size_t bytes) { registered_.shrink(held.region, bytes); }
  void settle(const Held& held, const GpuEvent& event);
  /// False: the pointer is not in this memory.
  bool record_stream(const void* pointer, cudaStream_t stream);
  /// What keeps the piece that holds `pointer` for a graph, which may drop it on any thread, when
  /// its streams are gone. Null: memory of others.
  std::shared_ptr<void> hold(const void* pointer);
  /// Of memory of others: nothing.
  void record_use(const void* pointer, unsigned long long stream, const std::shared_ptr<Use>& use);

 private:
  Held hold(StreamArena& arena, const engine::Region& region);
  std::string grow_local(std::size_t bytes);
  bool await_rest();
  void keep_for_ever();

  int device_;
  std::chrono::nanoseconds deadline_;
  std::shared_ptr<EventPool> events_;
  User own_{};
  std::unique_ptr<fabric::DeviceMemory> wire_;
  std::shared_ptr<fabric::DeviceContext> context_;
  std::mutex mutex_;  // of blocks_
  std::vector<std::shared_ptr<fabric::DeviceBlock>> blocks_;
  StreamArena registered_;
  StreamArena local_;
};

}  // namespace ferry::cuda
