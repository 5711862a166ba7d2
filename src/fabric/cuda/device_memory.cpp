#include "fabric/cuda/device_memory.hpp"

#include <array>
#include <atomic>
#include <ferry/error.hpp>
#include <string>
#include <utility>

#include "fabric/cuda/handshake.hpp"
#include "fabric/cuda/sharing.hpp"
#include "fabric/rendezvous.hpp"

namespace ferry::fabric {
namespace {

using Clock = std::chrono::steady_clock;

class RegisteredDeviceMemory final : public DeviceMemory {
 public:
  RegisteredDeviceMemory(std::unique_ptr<Sharing> sharing, std::chrono::nanoseconds deadline)
      : sharing_(std::move(sharing)),
        deadline_(deadline),
        tables_(std::make_unique<Table[]>(sharing_->domain().ranks.size())) {}

  int rank() const override { return sharing_->domain().rank; }
  int size() const override { return sharing_->domain().size(); }
  int device() const override { return sharing_->context().ordinal(); }
  DeviceWay way() const override { return sharing_->way(); }

  Segment register_memory(std::size_t bytes) override;
  std::size_t rounded_bytes(std::size_t bytes) const override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId segment) noexcept override { sharing_->seal(segment); }
  std::byte* pointer(int peer, SegmentId segment) const noexcept override {
    const Entry* entry = find(peer, segment);
    return entry == nullptr ? nullptr : entry->block->data();
  }
  std::shared_ptr<std::byte> hold(int peer, SegmentId segment) const override {
    const Entry* entry = find(peer, segment);
    if (entry == nullptr) return nullptr;
    return {entry->block, entry->block->data()};
  }
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    const Entry* entry = find(peer, segment);
    return entry == nullptr ? 0 : entry->block->bytes();
  }
  std::vector<std::byte> card() const override { return to_bytes(sharing_->card()); }
  void seat(int peer, std::span<const std::byte> card) override;
  bool shares_gpu(int peer) const override { return gpu_of(peer) == sharing_->context().uuid(); }
  std::array<std::uint8_t, 16> gpu_of(int peer) const override {
    return sharing_->domain().of(peer).fixed.uuid;
  }

 private:
  struct Entry {
    std::shared_ptr<DeviceBlock> block{};
    std::atomic<bool> there = false;  // released after `block`
  };
  using Table = std::array<Entry, kMaxDeviceSegments>;

  const Entry* find(int peer, SegmentId segment) const noexcept {
    if (peer < 0 || peer >= size() || segment >= kMaxDeviceSegments) return nullptr;
    const Entry& entry = tables_[static_cast<std::size_t>(peer)][segment];
    return entry.there.load(std::memory_order_acquire) ? &entry : nullptr;
  }
  void add(int peer, SegmentId segment, std::shared_ptr<DeviceBlock> block) {
    Entry& entry = tables_[static_cast<std::size_t>(peer)][segment];
    entry.block = std::move(block);
    entry.there.store(true, std::memory_order_release);
  }
  Sharing::Made made(std::size_t bytes);

  std::unique_ptr<Sharing> sharing_;
  std::chrono::nanoseconds deadline_;
  std::vector<std::shared_ptr<DeviceBlock>> late_;  // still being zeroed at the deadline
  std::unique_ptr<Table[]> tables_;                 // [ranks]
  SegmentId next_ = 0;
};

std::size_t RegisteredDeviceMemory::rounded_bytes(std::size_t bytes) const {
  const std::size_t page = sharing_->context().granularity();
  if (bytes == 0 || bytes > SIZE_MAX - page) {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank()) + ": device memory of " + std::to_string(bytes) +
                    " bytes; expected more than 0 and less than the address space",
                {.rank = rank()});
  }
  return (bytes + page - 1) / page * page;
}

Sharing::Made RegisteredDeviceMemory::made(std::size_t bytes) {
  try {
    return sharing_->make(next_, bytes);
  } catch (const CallRefused& refused) {
    const DeviceContext& context = sharing_->context();
    const bool full = refused.result() == CUDA_ERROR_OUT_OF_MEMORY;
    std::string message = "rank " + std::to_string(rank()) + " cannot register " +
                          std::to_string(bytes) + " bytes of " + context.name() + ": " +
                          refused.what();
    std::size_t free = 0;
    std::size_t total = 0;
    const Current current(context);
    if (full && driver().cuMemGetInfo(&free, &total) == CUDA_SUCCESS) {
      message += "; free " + std::to_string(free) + " of " + std::to_string(total) +
                 " bytes; use smaller batches or free memory (torch keeps what it once had: "
                 "torch.cuda.empty_cache)";
    }
    throw Error(full ? ErrorKind::exhausted : ErrorKind::system, message, {.rank = rank()});
  }
}

Segment RegisteredDeviceMemory::register_memory(std::size_t bytes) {
  const std::size_t whole = rounded_bytes(bytes);
  if (next_ >= kMaxDeviceSegments) {
    throw Error(ErrorKind::exhausted,
                "rank " + std::to_string(rank()) + " has registered " + std::to_string(next_) +
                    " device segments, the most that a rank can have; register more memory at "
                    "once (GroupConfig::memory_bytes)",
                {.rank = rank()});
  }
  Sharing::Made made = this->made(whole);
  DeviceContext& context = sharing_->context();
  try {
    const Current current(context);
    if (!context.zero(made.block->address(), whole, Clock::now() + deadline_)) {
      late_.push_back(made.block);
      throw Error(ErrorKind::deadline,
                  "rank " + std::to_string(rank()) + ": zeroing " + std::to_string(whole) +
                      " bytes of " + context.name() + " did not end before the deadline",
                  {.rank = rank(), .peer = -1, .stage = "register memory"});
    }
  } catch (const CallRefused& refused) {
    sharing_->forget(next_);
    throw Error(ErrorKind::system,
                "rank " + std::to_string(rank()) + " cannot zero " + std::to_string(whole) +
                    " bytes of " + context.name() + ": " + refused.what(),
                {.rank = rank()});
  } catch (...) {
    sharing_->forget(next_);
    throw;
  }
  Segment segment{next_, made.block->data(), whole, to_bytes(made.handle)};
  add(rank(), next_++, std::move(made.block));
  return segment;
}

void RegisteredDeviceMemory::attach(int peer, SegmentId segment, std::size_t bytes,
                                    std::span<const std::byte> handle) {
  const DeviceAttachment attachment{way(), rank(), peer, segment, bytes, sharing_->domain().job};
  if (peer < 0 || peer >= size()) throw_attach(attachment, "there is no such rank");
  if (peer == rank()) return;
  if (segment >= kMaxDeviceSegments) throw_attach(attachment, "beyond the last possible segment");
  if (find(peer, segment) != nullptr) throw_attach(attachment, "it is attached already");
  const DeviceHandle checked = checked_handle(handle, attachment);
  try {
    add(peer, segment, sharing_->open(peer, checked, deadline_));
  } catch (const std::runtime_error& error) {
    throw_attach(attachment, error.what());
  }
}

void RegisteredDeviceMemory::seat(int peer, std::span<const std::byte> card) {
  if (!sharing_->seat(peer, device_handshake_from(card, rank(), peer))) return;
  for (Entry& entry : tables_[static_cast<std::size_t>(peer)]) {
    entry.there.store(false, std::memory_order_relaxed);
    entry.block.reset();
  }
}

}  // namespace

std::string_view name_of(DeviceWay way) {
  switch (way) {
    case DeviceWay::automatic: return "automatic";
    case DeviceWay::local: return "local";
    case DeviceWay::vmm_pidfd: return "vmm-pidfd";
    case DeviceWay::vmm_socket: return "vmm-socket";
    case DeviceWay::ipc: return "ipc";
    case DeviceWay::vmm_fabric: return "vmm-fabric";
  }
  return "unknown";
}

std::unique_ptr<DeviceMemory> make_device_memory(Bootstrap& bootstrap,
                                                 const DeviceMemoryOptions& options) {
  const Countdown countdown(options.deadline);
  std::shared_ptr<DeviceContext> context;
  const DeviceDomain domain = exchange_handshakes(bootstrap, options, context);
  DeviceMemoryOptions rest = options;
  rest.deadline = countdown.left();
  return std::make_unique<RegisteredDeviceMemory>(choose_sharing(bootstrap, domain, context, rest),
                                                  options.deadline);
}

std::unique_ptr<DeviceMemory> join_device_memory(int rank, int size,
                                                 const DeviceMemoryOptions& options,
                                                 std::span<const std::byte> card) {
  return std::make_unique<RegisteredDeviceMemory>(join_sharing(rank, size, options, card),
                                                  options.deadline);
}

}  // namespace ferry::fabric
