// Makes memory of one rank and opens that of its peers, in one way of sharing.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "fabric/cuda/block.hpp"
#include "fabric/cuda/descriptors.hpp"
#include "fabric/cuda/handshake.hpp"

namespace ferry::fabric {

/// What every rank knows of all ranks after the handshake.
struct DeviceDomain {
  int rank = 0;
  JobKey job{};
  std::vector<DeviceHandshake> ranks{};

  int size() const { return static_cast<int>(ranks.size()); }
  const DeviceHandshake& of(int peer) const { return ranks[static_cast<std::size_t>(peer)]; }
  bool one_process(int a, int b) const;
  bool one_host(int a, int b) const;
  /// Whether all ranks have GPUs with VMM, and with handles for other hosts.
  bool all_vmm() const;
  bool all_fabric() const;
  /// CUDA ordinals of the GPUs that ranks of this process use, once each.
  std::vector<int> users() const;
};

class Sharing {
 public:
  /// Throws std::runtime_error (the socket of vmm_socket).
  Sharing(DeviceDomain domain, std::shared_ptr<DeviceContext> context, DeviceWay way);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;

  struct Made {
    std::shared_ptr<DeviceBlock> block{};
    DeviceHandle handle{};
  };
  /// `bytes`: whole pages. Throws CallRefused.
  Made make(SegmentId segment, std::size_t bytes);
  /// No peer opens it any more from now on, unless in this process.
  void seal(SegmentId segment) noexcept;
  /// Takes back what make did, but for the block.
  void forget(SegmentId segment) noexcept;
  /// `handle` is checked. Throws std::runtime_error saying why not, CallRefused among them.
  std::shared_ptr<DeviceBlock> open(int peer, const DeviceHandle& handle,
                                    std::chrono::nanoseconds deadline) const;

  /// DeviceMemory has the words.
  DeviceHandshake card() const;
  bool seat(int peer, const DeviceHandshake& card);

  const DeviceDomain& domain() const noexcept { return domain_; }
  DeviceContext& context() const noexcept { return *context_; }
  DeviceWay way() const noexcept { return way_; }

 private:
  const JobKey& key_of(int peer) const { return domain_.of(peer).fixed.socket; }
  std::shared_ptr<DeviceBlock> borrow(int peer, SegmentId segment) const;
  std::shared_ptr<DeviceBlock> import_ipc(int peer, const DeviceHandle& handle) const;

  DeviceDomain domain_;
  std::shared_ptr<DeviceContext> context_;
  DeviceWay way_;
  std::int64_t owner_pid_ = process_id();
  std::map<SegmentId, UniqueDescriptor> descriptors_;
  std::unique_ptr<DescriptorServer> server_;  // ends before the descriptors that it sends
};

/// The ranks exchange handshakes; `context` becomes this rank's GPU. Throws Error(unsupported) or
/// Error(mismatch) on every rank alike.
DeviceDomain exchange_handshakes(Bootstrap& bootstrap, const DeviceMemoryOptions& options,
                                 std::shared_ptr<DeviceContext>& context);

/// Tries the ways in turn, or the forced one, with a small segment of every rank; the same choice
/// on every rank. Throws Error(unsupported) on every rank alike.
std::unique_ptr<Sharing> choose_sharing(Bootstrap& bootstrap, const DeviceDomain& domain,
                                        const std::shared_ptr<DeviceContext>& context,
                                        const DeviceMemoryOptions& options);

/// Of a process that joins: in the way of the group, as that rank's card says. Without a card it
/// begins a group. Throws Error(unsupported) or Error(mismatch).
std::unique_ptr<Sharing> join_sharing(int rank, int size, const DeviceMemoryOptions& options,
                                      std::span<const std::byte> card);

/// One all-gather of how a step went. The bytes are the same build's on all ranks.
std::vector<DeviceOutcome> gather_outcomes(Bootstrap& bootstrap, const DeviceOutcome& mine,
                                           std::chrono::nanoseconds deadline,
                                           const OnWait& on_wait);

}  // namespace ferry::fabric
