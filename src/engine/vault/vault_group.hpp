// What a vault asks of the engine whose group it serves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/call.hpp"
#include "core/domains.hpp"
#include "engine/agreement.hpp"
#include "engine/channel.hpp"
#include "engine/membership/current_view.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/memory.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry::engine {

/// Of a tensor on a device, to memory of this process or from there.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  bool from_device = false;
};

class VaultGroup {
 public:
  virtual ~VaultGroup() = default;
  /// Keeps the engine.
  virtual std::shared_ptr<void> kept() = 0;
  /// Of the ranks' CPUs, by which they swap.
  virtual Channel& channel() = 0;
  /// Registered memory that all ranks of a domain read and write, on CPUs.
  virtual const std::shared_ptr<Memory>& shared_memory() const = 0;
  /// Of all ranks, lost ones, too.
  virtual int domains() const = 0;
  /// The domains of the ranks of this epoch.
  virtual const Domains& topology() const = 0;
  virtual CurrentView& now() = 0;
  /// By the thread whose turn it is; null: the membership was never changed.
  virtual Regroup* membership_if_changed() = 0;
  /// Runs `work` in the order of this rank's calls. Whatever it throws fails the group, unless it
  /// said `all_ranks_throw`.
  virtual void in_turn(const char* call, const std::function<void()>& work) = 0;
  /// Where the caller's tensors may lie beside CPU memory; the CPU: nowhere else.
  virtual Device device() const { return {}; }
  /// Makes these copies after what is on `stream` (null: at once); they have ended on return.
  virtual void copy(std::span<const DeviceCopy> /*copies*/, const Stream* /*stream*/) {}

  /// All ranks have the state of this step again: by the thread whose turn it is.
  void go_on_from(std::uint64_t step);
  /// Before memory grows: see Room.
  void free_held();

 protected:
  /// Runs `work` as this call, on the thread that has the channel. Whatever it throws fails the
  /// group, unless it said `all_ranks_throw`.
  void run_call(const char* call, const std::function<void()>& work);
};

}  // namespace ferry::engine
