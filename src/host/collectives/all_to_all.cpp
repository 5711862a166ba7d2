// all_to_all: ranks read their blocks in the windows of their domain; blocks for the ranks of other
// domains are written into their inboxes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "host/collectives/engine.hpp"

namespace ferry::host {
namespace {

constexpr const char* kCall = "all_to_all";

class AllToAll {
 public:
  AllToAll(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
           BlockCounts counts)
      : all_(all),
        data_(static_cast<const std::byte*>(x.data)),
        out_(static_cast<std::byte*>(out.data)),
        element_(size_of(x.dtype)),
        counts_(std::move(counts)),
        head_(head_of(CallKind::all_to_all, x.dtype, 0)) {}  // each pair has counts of its own

  void run() {
    std::vector<std::int64_t> said(counts_.to);
    said.insert(said.end(), counts_.from.begin(), counts_.from.end());
    all_.meet(kCall, head_, std::as_bytes(std::span(said)));
    longest_ = check_counts();
    to_ = offsets(counts_.to);
    from_ = offsets(counts_.from);
    const std::size_t slot = slot_bytes();
    for (std::size_t first = 0; first < longest_; first += slot) exchange_round(first, slot);
  }

 private:
  std::vector<std::size_t> offsets(const std::vector<std::int64_t>& counts) const {
    std::vector<std::size_t> before(counts.size());
    for (std::size_t r = 1; r < counts.size(); ++r) {
      before[r] = before[r - 1] + index(counts[r - 1]) * element_;
    }
    return before;
  }

  /// Every rank knows all counts, so all throw where two ranks differ. Returns the bytes of the
  /// longest block.
  std::size_t check_counts() {
    const int ranks = all_.size();
    const auto count_of = [&](int rank, int at) {
      std::int64_t count = 0;
      std::memcpy(&count, all_.channel().body(rank) + index(at) * sizeof(count), sizeof(count));
      return count;
    };
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
                      {all_.rank(), source == all_.rank() ? target : source, kCall,
                       all_.channel().generation(), 0, 0});
        }
        longest = std::max(longest, sent);
      }
    }
    return index(longest) * element_;
  }

  /// Bytes of a block in a round.
  std::size_t slot_bytes() const {
    std::size_t room = all_.stage().window_bytes;
    if (all_.domains().count() > 1) room = std::min(room, all_.stage().inbox_bytes);
    return room / index(all_.size()) / kLineBytes * kLineBytes;
  }

  static std::size_t part(std::int64_t count, std::size_t element, std::size_t first,
                          std::size_t slot) {
    const std::size_t bytes = index(count) * element;
    return bytes > first ? std::min(slot, bytes - first) : 0;
  }

  void exchange_round(std::size_t first, std::size_t slot) {
    const std::size_t window = all_.next_window();
    const auto sent = [&](int peer) {
      return part(counts_.to[index(peer)], element_, first, slot);
    };
    const auto got = [&](int peer) {
      return part(counts_.from[index(peer)], element_, first, slot);
    };
    for (int r = 0; r < all_.size(); ++r) {
      if (const std::size_t bytes = sent(r); all_.is_member(r) && bytes > 0) {
        std::memcpy(all_.stage_of(all_.rank(), window + index(r) * slot),
                    data_ + to_[index(r)] + first, bytes);
      }
    }
    all_.meet_members(kCall);
    all_.begin_round();
    for (int i = 1; i < all_.size(); ++i) {
      const int peer = (all_.rank() + i) % all_.size();  // each starts elsewhere
      if (all_.is_member(peer)) continue;
      const std::size_t bytes = sent(peer);
      if (bytes > 0) {
        all_.put(peer, all_.stage().inbox() + index(all_.rank()) * slot,
                 data_ + to_[index(peer)] + first, bytes);
      }
      all_.tell(peer, bytes);
    }
    for (int r = 0; r < all_.size(); ++r) {
      const bool inside = all_.is_member(r);
      if (!inside) all_.hear(kCall, r);
      const std::byte* from =
          inside ? all_.stage_of(r, window + index(all_.rank()) * slot)
                 : all_.stage_of(all_.rank(), all_.stage().inbox() + index(r) * slot);
      if (const std::size_t bytes = got(r); bytes > 0) {
        std::memcpy(out_ + from_[index(r)] + first, from, bytes);
      }
      if (!inside) all_.tell(r);  // who wrote here may do so again
    }
    for (int r = 0; r < all_.size(); ++r) {
      if (!all_.is_member(r)) all_.hear(kCall, r);
    }
  }

  HostCollectives& all_;
  const std::byte* data_;
  std::byte* out_;
  std::size_t element_;  // bytes
  BlockCounts counts_;
  StepMessage head_;
  std::size_t longest_ = 0;        // bytes of the longest block of all
  std::vector<std::size_t> to_{};  // [R]: byte of the block for that rank
  std::vector<std::size_t> from_{};
};

}  // namespace

void run_all_to_all(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
                    BlockCounts counts) {
  AllToAll(all, x, out, std::move(counts)).run();
}

}  // namespace ferry::host
