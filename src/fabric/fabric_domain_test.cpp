// Domains: pointers inside, puts between them, one memory behind both.
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kThreads{"domains", "local+sim", false};
constexpr Setting kProcesses{"copies", "shm+copies", true};

int other_side(int rank) {
  return (rank + 2) % 4;
}

TEST(DomainFabric, NoPointerCrossesTheLine) {
  run_ranks(kThreads, 4, [](Rank& me) {
    const auto fabric = me.make_domains(2);
    const Segment mine = me.connect(*fabric, 4096);
    for (int peer = 0; peer < 4; ++peer) {
      EXPECT_EQ(fabric->pointer(peer, mine.id) != nullptr, peer / 2 == me.rank() / 2) << peer;
      EXPECT_EQ(fabric->bytes(peer, mine.id), 4096u);
      EXPECT_EQ(fabric->peer_state(peer), PeerState::alive);
    }
    me.barrier();
  });
}

TEST(DomainFabric, CopiesHideThePointersThatThereAre) {
  run_ranks(kProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    EXPECT_EQ(fabric->pointer(1 - me.rank(), mine.id), nullptr);
    EXPECT_EQ(fabric->bytes(1 - me.rank(), mine.id), 4096u);
    EXPECT_EQ(fabric->pointer(me.rank(), mine.id), mine.data);
    me.barrier();
  });
}

TEST(DomainFabric, BothWaysLeadToOneMemory) {
  run_ranks(kThreads, 4, [](Rank& me) {
    const auto fabric = me.make_domains(2);
    for (SegmentId id = 0; id < 3; ++id) {  // later segments, too
      const Segment mine = me.connect(*fabric, 4096);
      ASSERT_EQ(mine.id, id);
      const int inside = me.rank() ^ 1;
      fabric->pointer(inside, id)[100] = static_cast<std::byte>(me.rank() + 1);
      const std::uint64_t word = 1000 + static_cast<std::uint64_t>(me.rank());
      fabric->put(other_side(me.rank()), {id, 64}, &word, 8, 1 + id);
      fabric->publish(other_side(me.rank()), {id, 0}, 1, 8, 1 + id);
      ASSERT_TRUE(await_flag(mine, 0, 1));
      me.barrier();
      EXPECT_EQ(flag_value(mine, 64), 1000u + static_cast<unsigned>(other_side(me.rank())));
      EXPECT_EQ(mine.data[100], static_cast<std::byte>((me.rank() ^ 1) + 1));
    }
  });
}

TEST(DomainFabric, CountsWhatCrosses) {
  for (const bool processes : {false, true}) {
    run_ranks(processes ? kProcesses : kThreads, 4, [](Rank& me) {
      const bool pairs = !me.setting.processes;
      const auto fabric = pairs ? me.make_domains(2) : me.make();
      const Segment mine = me.connect(*fabric, 4096);
      EXPECT_EQ(fabric->network_use(), NetworkStats{});
      const Bytes data(300);
      fabric->put(me.rank(), {mine.id, 3072}, data.data(), 300, 1);  // to itself: nothing crosses
      fabric->put(other_side(me.rank()), {mine.id, 0}, data.data(), 300, 2);
      fabric->put(other_side(me.rank()), {mine.id, 512}, data.data(), 7, 2);
      if (pairs) fabric->put(me.rank() ^ 1, {mine.id, 1024}, data.data(), 100, 2);
      fabric->publish(other_side(me.rank()), {mine.id, 2048}, 1, 307, 2);
      EXPECT_EQ(fabric->network_use(), (NetworkStats{307, 2, 1}));
      ASSERT_TRUE(await_flag(mine, 2048, 1));
      me.barrier();
    });
  }
}

TEST(DomainFabric, ADeadRankIsSeenAcrossTheLine) {
  run_ranks(kThreads, 4, [](Rank& me) {
    SimOptions options;
    options.fail_rank = 3;
    const auto fabric = me.make_domains(2, options);
    const Segment mine = me.connect(*fabric, 4096);
    if (me.rank() == 3) fabric->publish(0, {mine.id, 0}, 1, 0, 1);  // vanishes
    me.barrier();
    if (me.rank() < 2) {
      EXPECT_EQ(fabric->peer_state(3), PeerState::dead);
      EXPECT_EQ(fabric->peer_state(2), PeerState::alive);
    }
    fabric->forget(3);
    me.barrier();
  });
}

TEST(DomainFabric, RefusesAHandleThatIsNotOfTwo) {
  run_ranks(kThreads, 2, [](Rank& me) {
    const auto fabric = me.make_domains(1);
    const Segment mine = fabric->register_memory(4096);
    const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, {});
    const int peer = 1 - me.rank();
    Bytes longer = handles[std::size_t(peer)];
    longer[0] = std::byte{200};  // the first one would be longer than both
    for (const Bytes& bad : {Bytes{}, Bytes(3), longer}) {
      expect_error(ErrorKind::system,
                   {"cannot attach segment 0", "of rank " + std::to_string(peer)},
                   [&] { fabric->attach(peer, 0, 4096, bad); });
    }
    fabric->attach(peer, 0, 4096, handles[std::size_t(peer)]);
    me.barrier();
  });
}

TEST(DomainFabric, NotEveryFabricSharesMemory) {
  run_ranks(kThreads, 1, [](Rank& me) {
    const auto local = make_local_fabric(me.bootstrap, kDeadline);
    const Segment mine = local->register_memory(4096);
    expect_error(ErrorKind::unsupported, {"rank 0", "local", "segment 0"},
                 [&] { local->adopt(mine); });
    const auto sim = make_sim_fabric(me.bootstrap, {}, kDeadline);
    Segment later = mine;
    later.id = 7;  // numbers may be left out, not used twice
    sim->adopt(later);
    expect_error(ErrorKind::unsupported, {"rank 0", "segment 7"}, [&] { sim->adopt(later); });
  });
}

/// A network that cannot share the second segment.
class Refusing final : public Fabric {
 public:
  explicit Refusing(std::unique_ptr<Fabric> network) : network_(std::move(network)) {}
  std::string_view name() const override { return network_->name(); }
  int rank() const override { return network_->rank(); }
  int size() const override { return network_->size(); }
  Segment register_memory(std::size_t bytes) override { return network_->register_memory(bytes); }
  Segment adopt(const Segment& segment) override {
    if (++adopted_ == 2) throw Error(ErrorKind::exhausted, "no room", {.rank = rank()});
    return network_->adopt(segment);
  }
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override {
    network_->attach(peer, segment, bytes, handle);
  }
  void seal(SegmentId segment) override { network_->seal(segment); }
  void forget(int peer) noexcept override { network_->forget(peer); }
  std::byte* pointer(int peer, SegmentId segment) const noexcept override {
    return network_->pointer(peer, segment);
  }
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    return network_->bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) override {
    network_->put(peer, to, from, bytes, tag);
  }
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override {
    network_->publish(peer, flag, value, bytes, tag);
  }
  PeerState peer_state(int peer) noexcept override { return network_->peer_state(peer); }
  NetworkStats network_use() const noexcept override { return network_->network_use(); }

 private:
  std::unique_ptr<Fabric> network_;
  int adopted_ = 0;
};

TEST(DomainFabric, ASegmentThatTheNetworkRefusesDoesNotSpoilTheNext) {
  for (const bool ofi : {false, true}) {
    if (ofi && !no_ofi().empty()) continue;
    run_ranks(kThreads, 2, [ofi](Rank& me) {
      auto inside = make_local_fabric(me.bootstrap, kDeadline);
      auto network = ofi ? make_ofi_fabric(me.bootstrap, ofi_options(), kDeadline)
                         : make_sim_fabric(me.bootstrap, {}, kDeadline);
      const auto fabric = make_domain_fabric(Domains::blocks(2, 1), std::move(inside),
                                             std::make_unique<Refusing>(std::move(network)));
      me.connect(*fabric, 4096);
      expect_error(ErrorKind::exhausted, {"no room"}, [&] { fabric->register_memory(8192); });
      const Segment mine = me.connect(*fabric, 4096);
      const int peer = 1 - me.rank();
      const std::uint64_t word = 21;
      fabric->put(peer, {mine.id, 64}, &word, 8, 1);
      fabric->publish(peer, {mine.id, 0}, 1, 8, 1);
      ASSERT_TRUE(await_flag(mine, 0, 1));
      EXPECT_EQ(flag_value(mine, 64), 21u);
      me.barrier();
    });
  }
}

}  // namespace
}  // namespace ferry::fabric::test
