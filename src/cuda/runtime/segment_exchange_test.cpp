// What a rank offers in one epoch is taken in that epoch alone, whoever has its seat later.
#include "cuda/runtime/segment_exchange.hpp"

#include <initializer_list>
#include <optional>

#include "engine/test_groups.hpp"
#include "fabric/local/local.hpp"

namespace ferry::cuda {
namespace {

using namespace engine::test;

class Offering {
 public:
  explicit Offering(Bootstrap& bootstrap) {
    config_.deadline = 20s;
    memory_ = std::make_shared<engine::Memory>(fabric::make_local_fabric(bootstrap, 20s));
    layout_ = make_control_layout(bootstrap.size(), sizeof(StepMessage) + fabric::kMaxHandleBytes);
    control_ = memory_->fabric->register_memory(layout_.bytes);
    const auto handles = bootstrap.all_gather(control_.handle, 20s);
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      if (peer == bootstrap.rank()) continue;
      memory_->fabric->attach(peer, 0, layout_.bytes, handles[static_cast<std::size_t>(peer)]);
    }
    channel_.emplace(memory_, config_, control_, layout_);
    start(1);
  }
  /// As a process that joins does, or a rank in a next epoch.
  void start(std::uint64_t epoch) {
    segments.emplace(*channel_, control_, layout_);
    segments->begin_epoch(epoch);
  }
  engine::Channel& channel() { return *channel_; }

  std::optional<SegmentExchange> segments{};

 private:
  GroupConfig config_{};
  std::shared_ptr<engine::Memory> memory_{};
  ControlLayout layout_{};
  fabric::Segment control_{};
  std::optional<engine::Channel> channel_{};
};

fabric::Segment segment_of(fabric::SegmentId id) {
  fabric::Segment segment;
  segment.id = id;
  segment.bytes = 4096;
  segment.handle.resize(16, std::byte{7});
  return segment;
}

SegmentExchange::Offer next(SegmentExchange& segments) {
  for (;;) {
    if (const auto offer = segments.next()) return *offer;
    std::this_thread::yield();
  }
}

/// Rank 0 offers segments one after the other, and rank 1 takes them.
void exchange(SegmentExchange& segments, int rank, std::initializer_list<fabric::SegmentId> ids) {
  for (const fabric::SegmentId id : ids) {
    if (rank == 0) {
      segments.offer("test", segment_of(id));
      continue;
    }
    const SegmentExchange::Offer offer = next(segments);
    EXPECT_EQ(offer.peer, 0);
    EXPECT_EQ(offer.segment, id);
    EXPECT_EQ(offer.bytes, 4096u);
    segments.taken(offer);
  }
}

TEST(SegmentExchange, AnOfferIsTakenOnce) {
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(2, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    Offering own(bootstrap);
    for (const fabric::SegmentId id : {2u, 3u}) {
      exchange(*own.segments, rank, {id});
      bootstrap.all_gather({}, 20s);
      EXPECT_FALSE(own.segments->next());
      bootstrap.all_gather({}, 20s);
    }
  });
}

/// Rank 0 offers two segments and a third that nobody takes; then another process has its seat, and
/// it offers its first.
TEST(SegmentExchange, OffersOfAnEarlierEpochAreOver) {
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(2, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    Offering own(bootstrap);
    exchange(*own.segments, rank, {2, 3});
    std::thread untaken;
    if (rank == 0) {
      untaken = std::thread([&] { EXPECT_ANY_THROW(own.segments->offer("test", segment_of(4))); });
    } else {
      EXPECT_EQ(next(*own.segments).segment, 4u);
    }
    bootstrap.all_gather({}, 20s);
    own.channel().fail("test", "it is lost");
    if (untaken.joinable()) untaken.join();
    own.channel().begin_epoch({.number = 2, .first = 9, .ranks = {0, 1}, .step = 0, .deaths = 0});
    if (rank == 0) {
      own.start(2);
    } else {
      own.segments->begin_epoch(2);
      EXPECT_FALSE(own.segments->next());
    }
    bootstrap.all_gather({}, 20s);
    exchange(*own.segments, rank, {1});
    bootstrap.all_gather({}, 20s);
  });
}

}  // namespace
}  // namespace ferry::cuda
