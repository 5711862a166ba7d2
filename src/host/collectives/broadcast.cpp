// broadcast: the ranks of the root's domain read its window. Each of them sends a share of it to
// every other domain, whose ranks read it there.
#include <algorithm>

#include "host/collectives/lent.hpp"

namespace ferry::host {
namespace {

constexpr const char* kBroadcast = "broadcast";

class Broadcast {
 public:
  Broadcast(HostCollectives& all, const TensorView& x, int root)
      : all_(all),
        data_(static_cast<std::byte*>(x.data)),
        bytes_all_(x.bytes()),
        root_(root),
        head_(head_of(CallKind::broadcast, x.dtype, x.shape.product())) {
    head_.call.collective.root = static_cast<std::uint32_t>(root);
  }

  void run() {
    const bool mine = all_.rank() == root_;
    if (bytes_all_ + sizeof(StepMessage) <= eager_bytes(all_.size())) {
      all_.meet(kBroadcast, head_, {data_, mine ? bytes_all_ : 0});
      if (!mine) copy_bytes(data_, all_.channel().body(root_), bytes_all_);
      return;
    }
    const Lent lent(all_, head_, data_, bytes_all_);
    if (!mine || !lends(head_)) write_window(0);
    all_.meet(kBroadcast, head_);
    if (lends(all_.channel().head(root_))) return read_in_place();
    for (;;) {
      spread_round();
      const std::size_t next = first_ + bytes_;
      if (next == bytes_all_) return;
      write_window(next);
      all_.meet_members(kBroadcast);
    }
  }

 private:
  void read_in_place() {
    if (all_.rank() != root_) {
      const Borrowed borrowed(all_, kBroadcast, {&root_, 1}, [this](int) { return bytes_all_; });
      copy_bytes(data_, borrowed.tensors()[0], bytes_all_);
    }
    all_.meet_members(kBroadcast);
  }

  void write_window(std::size_t first) {
    first_ = first;
    bytes_ = std::min(all_.staging().window_bytes, bytes_all_ - first);
    window_ = all_.next_window();
    if (all_.rank() == root_) {
      all_.show(all_.staged(root_, window_), data_ + first_, bytes_);
    }
  }

  /// In each domain as many as the root's has ranks, one behind the other.
  std::vector<Share> shares() const {
    const Domains& domains = all_.domains();
    const auto parts = static_cast<std::int64_t>(domains.members(domains.of(root_)).size());
    const auto bytes = static_cast<std::int64_t>(bytes_);
    const auto bound = [&](std::int64_t i) { return bytes * i / parts / 64 * 64; };
    std::vector<Share> made;
    for (std::int64_t i = 0; i < parts; ++i) {
      made.push_back({bound(i), i + 1 == parts ? bytes : bound(i + 1), domains.of(root_),
                      static_cast<int>(i)});
    }
    return made;
  }

  void spread_round() {
    all_.begin_round();
    const Domains& domains = all_.domains();
    const bool at_root = all_.is_member(root_);
    if (at_root) {
      const std::byte* from = all_.staged(root_, window_);
      for (int d = 0; d < domains.count(); ++d) {
        if (d != all_.domain()) send(d, from);
      }
      if (all_.rank() != root_) copy_bytes(data_ + first_, from, bytes_);
      for (int d = 0; d < domains.count(); ++d) {
        if (d != all_.domain()) hear_freed(d);
      }
      return;
    }
    const auto mine = [&](const Share& share) {
      return rank_of(share, all_.domain(), domains) == all_.rank();
    };
    const std::vector<Share> parts = shares();
    for (const Share& share : parts) {
      if (mine(share)) all_.hear(kBroadcast, rank_of(share, share.domain, domains));
    }
    all_.meet_members(kBroadcast);
    for (const Share& share : parts) {
      copy_bytes(data_ + first_ + index(share.first),
                 all_.staged(rank_of(share, all_.domain(), domains),
                             all_.staging().inbox() + index(share.first)),
                 index(share.count()));
    }
    all_.meet_members(kBroadcast);
    for (const Share& share : parts) {
      if (mine(share)) all_.tell(rank_of(share, share.domain, domains));
    }
  }

  void send(int domain, const std::byte* from) {
    const Domains& domains = all_.domains();
    for (const Share& share : shares()) {
      if (rank_of(share, share.domain, domains) != all_.rank()) continue;
      const int to = rank_of(share, domain, domains);
      all_.put(to, all_.staging().inbox() + index(share.first), from + share.first,
               index(share.count()));
      all_.tell(to, index(share.count()));
    }
  }

  void hear_freed(int domain) {
    const Domains& domains = all_.domains();
    for (const Share& share : shares()) {
      if (rank_of(share, share.domain, domains) == all_.rank()) {
        all_.hear(kBroadcast, rank_of(share, domain, domains));
      }
    }
  }

  HostCollectives& all_;
  std::byte* data_;
  std::size_t bytes_all_;
  int root_;
  StepMessage head_;
  std::size_t first_ = 0;   // byte of the tensor, in this round
  std::size_t bytes_ = 0;   // of this round
  std::size_t window_ = 0;  // of this round, in the staging buffer
};

}  // namespace

void run_broadcast(HostCollectives& all, const TensorView& x, int root) {
  Broadcast(all, x, root).run();
}

}  // namespace ferry::host
