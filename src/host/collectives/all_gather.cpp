// all_gather: ranks read the windows of their domain; to each other domain a block crosses once, to
// the rank on its rail, in whose inbox the ranks of that domain read it.
#include <algorithm>

#include "host/collectives/lent.hpp"

namespace ferry::host {
namespace {

constexpr const char* kAllGather = "all_gather";

class AllGather {
 public:
  AllGather(HostCollectives& all, const ConstTensorView& x, const TensorView& out)
      : all_(all),
        data_(static_cast<const std::byte*>(x.data)),
        out_(static_cast<std::byte*>(out.data)),
        block_(x.bytes()),
        head_(head_of(CallKind::all_gather, x.dtype, x.shape.product())) {}

  void run() {
    if (block_ + sizeof(StepMessage) <= eager_bytes(all_.size())) {
      all_.meet(kAllGather, head_, {data_, block_});
      for (int r = 0; r < all_.size(); ++r) {
        copy_bytes(out_ + index(r) * block_, all_.channel().body(r), block_);
      }
      return;
    }
    const Lent lent(all_, head_, data_, block_);
    if (!lends(head_)) write_window(0);
    all_.meet(kAllGather, head_);
    const Lenders lenders(all_);
    if (lenders.every) return gather_in_place();
    if (lends(head_)) write_window(0);
    if (lenders.some) all_.meet_members(kAllGather);  // some ranks wrote their windows only now
    for (;;) {
      gather_round();
      const std::size_t next = first_ + bytes_;
      if (next == block_) return;
      write_window(next);
      all_.meet_members(kAllGather);
    }
  }

 private:
  void gather_in_place() {
    {
      const Borrowed borrowed(all_, kAllGather, all_.members(), [this](int) { return block_; });
      for (std::size_t r = 0; r < borrowed.tensors().size(); ++r) {
        copy_result(index(all_.size()) * block_, out_ + r * block_, borrowed.tensors()[r], block_);
      }
    }
    all_.meet_members(kAllGather);
  }

  std::size_t round_bytes() const {
    if (all_.domains().count() == 1) return all_.staging().window_bytes;
    // At worst one rank takes in what all the others have.
    const std::size_t room = all_.staging().inbox_bytes / index(all_.size());
    return std::min(all_.staging().window_bytes, room) / kLineBytes * kLineBytes;
  }

  void write_window(std::size_t first) {
    first_ = first;
    bytes_ = std::min(round_bytes(), block_ - first);
    window_ = all_.next_window();
    all_.show(all_.staged(all_.rank(), window_), data_ + first_, bytes_);
  }

  std::size_t inbox(int rank) const { return all_.staging().inbox() + index(rank) * round_bytes(); }

  void gather_round() {
    all_.begin_round();
    const Domains& domains = all_.domains();
    const bool crosses = domains.count() > 1;
    if (crosses) cross();
    for (int r = 0; r < all_.size(); ++r) {
      const std::byte* from = all_.is_member(r)
                                  ? all_.staged(r, window_)
                                  : all_.staged(domains.rail(r, all_.domain()), inbox(r));
      copy_result(index(all_.size()) * block_, out_ + index(r) * block_ + first_, from, bytes_);
    }
    if (crosses) free_inboxes();
  }

  void cross() {
    const Domains& domains = all_.domains();
    for (int d = 0; d < domains.count(); ++d) {
      if (d == all_.domain()) continue;
      const int to = domains.rail(all_.rank(), d);
      all_.put(to, inbox(all_.rank()), data_ + first_, bytes_);
      all_.tell(to, bytes_);
    }
    for (const int source : domains.feeders(all_.rank())) all_.hear(kAllGather, source);
    all_.meet_members(kAllGather);
  }

  /// Who wrote here may do so again.
  void free_inboxes() {
    const Domains& domains = all_.domains();
    all_.meet_members(kAllGather);
    for (const int source : domains.feeders(all_.rank())) all_.tell(source);
    for (int d = 0; d < domains.count(); ++d) {
      if (d != all_.domain()) all_.hear(kAllGather, domains.rail(all_.rank(), d));
    }
  }

  HostCollectives& all_;
  const std::byte* data_;
  std::byte* out_;
  std::size_t block_;  // bytes
  StepMessage head_;
  std::size_t first_ = 0;   // byte of each block, in this round
  std::size_t bytes_ = 0;   // of each block in this round
  std::size_t window_ = 0;  // of this round, in the staging buffer
};

}  // namespace

void run_all_gather(HostCollectives& all, const ConstTensorView& x, const TensorView& out) {
  AllGather(all, x, out).run();
}

}  // namespace ferry::host
