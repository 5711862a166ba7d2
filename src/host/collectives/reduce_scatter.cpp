// reduce_scatter: each rank reduces its own block, from the windows of its domain and from what the
// other domains have summed.
#include <algorithm>

#include "host/collectives/lent.hpp"

namespace ferry::host {
namespace {

constexpr const char* kReduceScatter = "reduce_scatter";

class ReduceScatter {
 public:
  ReduceScatter(HostCollectives& all, const ConstTensorView& x, const TensorView& out, ReduceOp op,
                ReduceFormat format)
      : all_(all),
        data_(static_cast<const std::byte*>(x.data)),
        out_(static_cast<std::byte*>(out.data)),
        block_(out.shape.product()),
        reduction_{op, x.dtype, all.mean_ranks()},
        format_(format),
        head_(head_of(CallKind::reduce_scatter, x.dtype, block_, op, format)) {}

  void run() {
    const Lent lent(all_, head_, data_, bytes(block_ * all_.size()));
    if (!lends(head_)) write_window(0);
    all_.meet(kReduceScatter, head_,
              std::as_bytes(std::span(&all_.compression_state().last_tally, 1)));
    coded_.emplace(all_, kReduceScatter, format_, bytes(block_ * all_.size()));
    const Lenders lenders(all_);
    if (lenders.every) return reduce_in_place();
    if (lends(head_)) write_window(0);
    if (lenders.some) all_.meet_members(kReduceScatter);  // some ranks wrote their windows only now
    while (block_ > 0) {
      reduce_round();
      const std::int64_t next = first_ + elements_;
      if (next == block_) return;
      write_window(next);
      all_.meet_members(kReduceScatter);
    }
  }

 private:
  std::size_t bytes(std::int64_t elements) const { return reduction_.bytes(elements); }
  std::size_t partial(std::int64_t elements) const { return reduction_.partial_bytes(elements); }

  void reduce_in_place() {
    {
      const Borrowed borrowed(all_, kReduceScatter, all_.members(),
                              [this](int) { return bytes(block_ * all_.size()); });
      std::vector<const void*> rows;
      for (const std::byte* x : borrowed.tensors()) rows.push_back(x + bytes(block_ * all_.rank()));
      void* const out[] = {out_};
      reduce_all(reduction_, rows, block_, out);
    }
    all_.meet_members(kReduceScatter);
  }

  /// Elements of each block in a round.
  std::int64_t round_elements() const {
    auto elements = all_.staging().window_bytes / size_of(reduction_.dtype) / index(all_.size());
    if (all_.domains().count() > 1) {
      elements = std::min(
          elements, all_.staging().inbox_bytes / partial(1) / index(all_.domains().count() - 1));
    }
    return static_cast<std::int64_t>(elements) / kShareUnit * kShareUnit;
  }

  /// Elements from `first` of every block, one block behind the other.
  void write_window(std::int64_t first) {
    first_ = first;
    elements_ = std::min(round_elements(), block_ - first);
    window_ = all_.next_window();
    for (int r = 0; r < all_.size() && elements_ > 0; ++r) {
      if (r == all_.rank()) continue;  // nobody else reads it
      all_.show(window(all_.rank(), r), data_ + bytes(r * block_ + first_), bytes(elements_));
    }
  }

  std::byte* window(int member, int block) {
    return all_.staged(member, window_ + bytes(block * elements_));
  }

  std::vector<const void*> rows(int block) {
    std::vector<const void*> rows;
    for (const int member : all_.members()) {
      const bool own = member == all_.rank() && block == all_.rank();
      rows.push_back(own ? data_ + bytes(block * block_ + first_) : window(member, block));
    }
    return rows;
  }

  std::size_t inbox(int domain, int own) const {
    const int before = domain < own ? domain : domain - 1;
    return all_.staging().inbox() +
           (coded_->codes() ? index(before) * coded_room(elements_) : partial(before * elements_));
  }

  void reduce_round() {
    all_.begin_round();
    const Domains& domains = all_.domains();
    std::vector<std::byte> own(domains.count() > 1 ? partial(elements_) : 0);
    void* const out[] = {out_ + bytes(first_)};
    // For each rank of another domain one rank here sums.
    for (int r = 0; r < all_.size(); ++r) {
      if (all_.is_member(r) || domains.rail(r, all_.domain()) != all_.rank()) continue;
      reduce_ranks(reduction_, rows(r), elements_, own.data());
      const std::size_t to = inbox(all_.domain(), domains.of(r));
      if (coded_->codes()) {
        const auto* sum = static_cast<const float*>(static_cast<const void*>(own.data()));
        coded_->send_all(r, to, sum, elements_);
        continue;
      }
      all_.put(r, to, own.data(), partial(elements_));
      all_.tell(r, partial(elements_));
    }
    if (domains.count() == 1) {
      reduce_all(reduction_, rows(all_.rank()), elements_, out);
      return;
    }
    std::vector<const void*> partials;
    std::vector<std::vector<float>> decoded(coded_->codes() ? index(domains.count()) : 0);
    for (int d = 0; d < domains.count(); ++d) {
      const int rail = domains.rail(all_.rank(), d);
      if (d == all_.domain()) {
        reduce_ranks(reduction_, rows(all_.rank()), elements_, own.data());
        partials.push_back(own.data());
      } else if (coded_->codes()) {
        decoded[index(d)].resize(index(elements_));
        coded_->receive_all(rail, inbox(d, all_.domain()), elements_, decoded[index(d)].data());
        partials.push_back(decoded[index(d)].data());
      } else {
        all_.hear(kReduceScatter, rail);
        partials.push_back(all_.staged(all_.rank(), inbox(d, all_.domain())));
      }
    }
    reduce_domains(reduction_, partials, elements_, out);
    free_inboxes();
  }

  /// Who wrote here may do so again.
  void free_inboxes() {
    const Domains& domains = all_.domains();
    for (int d = 0; d < domains.count(); ++d) {
      if (d != all_.domain()) all_.tell(domains.rail(all_.rank(), d));
    }
    for (int r = 0; r < all_.size(); ++r) {
      if (!all_.is_member(r) && domains.rail(r, all_.domain()) == all_.rank())
        all_.hear(kReduceScatter, r);
    }
  }

  HostCollectives& all_;
  const std::byte* data_;
  std::byte* out_;
  std::int64_t block_;  // elements
  Reduction reduction_;
  ReduceFormat format_;
  StepMessage head_;
  std::optional<CodedSums> coded_{};
  std::int64_t first_ = 0;     // of each block, in this round
  std::int64_t elements_ = 0;  // of each block in this round
  std::size_t window_ = 0;     // of this round, in the staging buffer
};

}  // namespace

void run_reduce_scatter(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
                        ReduceOp op, ReduceFormat format) {
  ReduceScatter(all, x, out, op, format).run();
}

}  // namespace ferry::host
