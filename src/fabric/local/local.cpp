#include "fabric/local/local.hpp"

#include <utility>

#include "fabric/local/thread_hub.hpp"
#include "fabric/mapped_fabric.hpp"
#include "fabric/rendezvous.hpp"

namespace ferry::fabric {
namespace {

class LocalFabric final : public MappedFabric {
 public:
  LocalFabric(int rank, int size, std::shared_ptr<ThreadHub> hub)
      : MappedFabric(rank, size), hub_(std::move(hub)) {}
  ~LocalFabric() override { hub_->withdraw_all(rank()); }

  std::string_view name() const override { return "local"; }
  bool one_address_space() const noexcept override { return true; }

  Segment register_memory(std::size_t bytes) override {
    auto memory = anonymous_memory(bytes, rank());
    const SegmentId id = segments().next();
    Segment segment{id, memory->data(), bytes, hub_->offer(rank(), id, bytes, memory), memory};
    segments().add(rank(), id, std::move(memory), bytes);
    return segment;
  }

  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override {
    check_peer(peer, size(), rank(), "attach");
    if (peer == rank()) return;
    segments().add(peer, segment, hub_->take(rank(), peer, segment, bytes, handle), bytes);
  }

  void seal(SegmentId segment) override { hub_->withdraw(rank(), segment); }
  void forget(int /*peer*/) noexcept override {}

  /// Threads end with their process; one that only leaves says so by its failure broadcast.
  PeerState peer_state(int /*peer*/) noexcept override { return PeerState::alive; }

 private:
  std::shared_ptr<ThreadHub> hub_;
};

}  // namespace

std::unique_ptr<Fabric> make_local_fabric(Bootstrap& bootstrap, std::chrono::nanoseconds deadline,
                                          const OnWait& on_wait) {
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  auto hub = share_between_threads(Wire::local, bootstrap, deadline, on_wait, [&] {
    return std::make_shared<ThreadHub>(Wire::local, size, random_key(rank));
  });
  return std::make_unique<LocalFabric>(rank, size, std::static_pointer_cast<ThreadHub>(hub));
}

}  // namespace ferry::fabric
