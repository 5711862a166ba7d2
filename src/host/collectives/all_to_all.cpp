// all_to_all: short blocks come with the messages. Of the others, ranks read theirs in the windows
// of their domain; blocks for the ranks of other domains are written into their inboxes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "host/collectives/lent.hpp"

namespace ferry::host {
namespace {

constexpr const char* kAllToAll = "all_to_all";
constexpr std::size_t kMostBlockBytes = std::size_t{1} << 60;  // of a block; no tensor is that long

// `need_bytes` of the message: 1 + the elements of every block; 0: the message begins with counts.

class AllToAll {
 public:
  AllToAll(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
           const BlockCounts& counts)
      : all_(all),
        data_(static_cast<const std::byte*>(x.data)),
        out_(static_cast<std::byte*>(out.data)),
        out_bytes_(out.bytes()),
        element_(size_of(x.dtype)),
        counts_(counts),
        head_(head_of(CallKind::all_to_all, x.dtype, 0)) {  // each pair has counts of its own
    if (counts.equal) head_.need_bytes = 1 + index(counts.to.front());
  }

  void run() {
    to_ = offsets(counts_.to);
    from_ = offsets(counts_.from);
    const Lent lent(all_, head_, data_, to_.back() + index(counts_.to.back()) * element_);
    if (!lends(head_)) write_window(0);
    all_.meet(kAllToAll, head_,
              [this](int peer, std::byte* body) { return write_body(peer, body); });
    const std::size_t longest = check_counts();
    take_short_blocks();
    if (longest == 0) return;
    const Lenders lenders(all_);
    if (lenders.every) return read_in_place();
    if (lends(head_)) write_window(0);
    if (lenders.some) all_.meet_members(kAllToAll);  // some ranks wrote their windows only now
    for (std::size_t first = 0; first < longest; first += slot_) {
      if (first > 0) {
        write_window(first);
        all_.meet_members(kAllToAll);
      }
      exchange_round(first);
    }
  }

 private:
  std::vector<std::size_t> offsets(const std::vector<std::int64_t>& counts) const {
    std::vector<std::size_t> before(counts.size());
    for (std::size_t r = 1; r < counts.size(); ++r) {
      before[r] = before[r - 1] + index(counts[r - 1]) * element_;
    }
    return before;
  }

  /// A message: all counts of this rank, unless they are equal, and the peer's block if that is
  /// short.
  std::size_t write_body(int peer, std::byte* body) const {
    const std::size_t counts = counts_bytes(head_);
    if (counts > 0) {
      std::memcpy(body, counts_.to.data(), counts / 2);
      std::memcpy(body + counts / 2, counts_.from.data(), counts / 2);
    }
    const std::size_t block = index(counts_.to[index(peer)]) * element_;
    if (block > most_short_ || peer == all_.rank()) return counts;
    copy_bytes(body + counts, data_ + to_[index(peer)], block);
    return counts + block;
  }

  /// With which a message of this head begins.
  std::size_t counts_bytes(const StepMessage& head) const {
    return head.need_bytes > 0 ? 0 : 2 * index(all_.size()) * sizeof(std::int64_t);
  }

  void take_short_blocks() {
    Channel& channel = all_.channel();
    for (int r = 0; r < all_.size(); ++r) {
      const std::size_t block = index(counts_.from[index(r)]) * element_;
      if (block > most_short_) continue;
      const std::byte* from = r == all_.rank() ? data_ + to_[index(r)]
                                               : channel.body(r) + counts_bytes(channel.head(r));
      copy_bytes(out_ + from_[index(r)], from, block);
    }
  }

  void read_in_place() {
    {
      // Elements of a member's tensor before the block for rank `end`.
      const auto bytes_before = [this](int member, int end) {
        std::size_t bytes = 0;
        for (int r = 0; r < end; ++r) bytes += index(count_of(member, r)) * element_;
        return bytes;
      };
      const Borrowed borrowed(all_, kAllToAll, all_.members(),
                              [&](int member) { return bytes_before(member, all_.size()); });
      for (int r = 0; r < all_.size(); ++r) {
        const std::size_t block = index(counts_.from[index(r)]) * element_;
        if (block <= most_short_) continue;
        copy_result(out_bytes_, out_ + from_[index(r)],
                    borrowed.tensors()[index(r)] + bytes_before(r, all_.rank()), block);
      }
    }
    all_.meet_members(kAllToAll);
  }

  /// What a rank's message says: its elements for rank `at`, or from rank `at` − size.
  std::int64_t count_of(int rank, int at) {
    const std::uint64_t equal = all_.channel().head(rank).need_bytes;
    if (equal > 0) return static_cast<std::int64_t>(equal - 1);
    std::int64_t count = 0;
    std::memcpy(&count, all_.channel().body(rank) + index(at) * sizeof(count), sizeof(count));
    return count;
  }

  /// Returns the bytes of the longest block of all, 0 if that is short.
  std::size_t check_counts() {
    const std::int64_t longest = all_equal() ? counts_.to.front() : longest_checked();
    const std::size_t bytes = index(longest) * element_;
    return bytes > most_short_ ? bytes : 0;
  }

  bool all_equal() {
    for (int r = 0; r < all_.size(); ++r) {
      if (all_.channel().head(r).need_bytes != head_.need_bytes) return false;
    }
    return counts_.equal;
  }

  /// Every rank knows all counts, so all throw where two ranks differ.
  std::int64_t longest_checked() {
    const int ranks = all_.size();
    std::int64_t longest = 0;
    for (int source = 0; source < ranks; ++source) {
      for (int target = 0; target < ranks; ++target) {
        const std::int64_t sent = count_of(source, target);
        const std::int64_t awaited = count_of(target, ranks + source);
        if (sent != awaited) {
          all_.channel().all_ranks_throw();
          throw Error(ErrorKind::mismatch,
                      "all_to_all: rank " + std::to_string(source) + " sends " +
                          std::to_string(sent) + " elements to rank " + std::to_string(target) +
                          ", which expects " + std::to_string(awaited),
                      {all_.rank(), source == all_.rank() ? target : source, kAllToAll,
                       all_.channel().generation(), 0, 0});
        }
        if (sent < 0 || index(sent) > kMostBlockBytes / element_) {
          all_.channel().throw_violation(
              kAllToAll, source,
              "sends " + std::to_string(sent) + " elements to rank " + std::to_string(target));
        }
        longest = std::max(longest, sent);
      }
    }
    return longest;
  }

  /// What a message holds besides the counts.
  std::size_t short_block_bytes() const {
    return all_.channel().max_body_bytes() - 2 * index(all_.size()) * sizeof(std::int64_t);
  }

  /// Bytes of a block in a round.
  std::size_t slot_bytes() const {
    std::size_t room = all_.staging().window_bytes;
    if (all_.domains().count() > 1) room = std::min(room, all_.staging().inbox_bytes);
    return room / index(all_.size()) / kLineBytes * kLineBytes;
  }

  /// Of a block of so many elements, from byte `first`, in a round.
  std::size_t part(std::int64_t count, std::size_t first) const {
    const std::size_t bytes = index(count) * element_;
    return bytes > most_short_ && bytes > first ? std::min(slot_, bytes - first) : 0;
  }

  /// The blocks for the others of the domain.
  void write_window(std::size_t first) {
    window_ = all_.next_window();
    for (const int member : all_.members()) {
      if (member == all_.rank()) continue;
      all_.show(all_.staged(all_.rank(), window_ + index(member) * slot_),
                data_ + to_[index(member)] + first, part(counts_.to[index(member)], first));
    }
  }

  void exchange_round(std::size_t first) {
    all_.begin_round();
    const auto sent = [&](int peer) { return part(counts_.to[index(peer)], first); };
    const auto got = [&](int peer) { return part(counts_.from[index(peer)], first); };
    for (int i = 1; i < all_.size(); ++i) {
      const int peer = (all_.rank() + i) % all_.size();  // each starts elsewhere
      if (all_.is_member(peer)) continue;
      const std::size_t bytes = sent(peer);
      if (bytes > 0) {
        all_.put(peer, all_.staging().inbox() + index(all_.rank()) * slot_,
                 data_ + to_[index(peer)] + first, bytes);
      }
      all_.tell(peer, bytes);
    }
    for (int r = 0; r < all_.size(); ++r) {
      const bool inside = all_.is_member(r);
      if (!inside) all_.hear(kAllToAll, r);
      const std::byte* from =
          r == all_.rank() ? data_ + to_[index(r)] + first
          : inside         ? all_.staged(r, window_ + index(all_.rank()) * slot_)
                           : all_.staged(all_.rank(), all_.staging().inbox() + index(r) * slot_);
      copy_result(out_bytes_, out_ + from_[index(r)] + first, from, got(r));
      if (!inside) all_.tell(r);  // who wrote here may do so again
    }
    for (int r = 0; r < all_.size(); ++r) {
      if (!all_.is_member(r)) all_.hear(kAllToAll, r);
    }
  }

  HostCollectives& all_;
  const std::byte* data_;
  std::byte* out_;
  std::size_t out_bytes_;
  std::size_t element_;  // bytes
  const BlockCounts& counts_;
  StepMessage head_;
  const std::size_t most_short_ = short_block_bytes();
  const std::size_t slot_ = slot_bytes();
  std::vector<std::size_t> to_{};  // [R]: byte of the block for that rank
  std::vector<std::size_t> from_{};
  std::size_t window_ = 0;  // of this round, in the staging buffer
};

}  // namespace

void run_all_to_all(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
                    const BlockCounts& counts) {
  AllToAll(all, x, out, counts).run();
}

}  // namespace ferry::host
