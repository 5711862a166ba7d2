// The staging buffer of a rank whose tokens cross between domains: host memory that the fabric
// knows and the GPU reads and writes. It grows by agreement, never shrinks, and every rank knows
// how much each of the others has.
#pragma once
#include <memory>
#include <vector>

#include "engine/channel.hpp"
#include "engine/memory.hpp"

namespace ferry::cuda {

/// Host memory that this GPU reads and writes, at the address that the CPU has. Throws.
void pin_for_gpu(const fabric::Segment& segment, int device);
void unpin(std::byte* data, int device) noexcept;

class StagingBuffers {
 public:
  StagingBuffers(engine::Channel& channel, std::shared_ptr<engine::Memory> memory, int device);
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  /// Which memory: what this rank sends, what others write for its GPU, and what they write for its
  /// CPU.
  enum Area { kOut, kIn, kRoutes, kAreas };

  /// All that was agreed is over: a rank may have failed before it knew of it. `renew`: a rank that
  /// was lost may still write there or read, so this memory is used no more.
  void begin_epoch(bool renew);
  /// The ranks tell each other what they have, once in an epoch, before anything else is asked; on
  /// the thread that talks to the peers, on all ranks alike.
  void agree(const char* call);

  /// Whether `needs`, [ranks] bytes that peers write on each rank, and `out`, that this rank sends,
  /// are there already. The same on all ranks but for `out`.
  bool has(Area area, const std::vector<std::size_t>& needs) const;
  bool has_out(std::size_t bytes) const { return bytes <= memory_[kOut].bytes; }
  /// Makes room; on the thread that talks to the peers, on all ranks alike.
  void grow(const char* call, Area area, const std::vector<std::size_t>& needs);
  void grow_out(std::size_t bytes);

  std::byte* data(Area area) const { return memory_[area].data; }
  fabric::SegmentId segment(Area area) const { return memory_[area].id; }
  std::size_t bytes() const { return registered_; }

 private:
  void pin(const fabric::Segment& segment);

  engine::Channel& channel_;
  std::shared_ptr<engine::Memory> wire_;
  int device_;
  fabric::Segment memory_[kAreas]{};
  std::vector<std::size_t> sizes_[kAreas]{};  // [ranks] of kIn and kRoutes
  std::vector<std::byte*> pinned_{};
  std::size_t registered_ = 0;
  bool agreed_ = true;
};

}  // namespace ferry::cuda
