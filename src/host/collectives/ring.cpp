// all_reduce along a ring of the ranks, domain after domain: partial results of a share pass all
// ranks and are finished on the last, then the result passes them all again. Every link carries as
// much, 2 (R − 1) / R of the tensor.
#include <algorithm>

#include "host/collectives/algorithms.hpp"

namespace ferry::host {
namespace {

constexpr const char* kRingCall = "all_reduce";
constexpr std::int64_t kStepUnit = 16;  // elements: a cache line of the narrowest partial results

/// Rounds of one step of every share each. Where a step lands depends on the round's parity and the
/// step alone. A rank that has ended a round has had something that its next rank sent in it, so
/// all have ended the round before: places of two rounds are enough, without any other signal.
class Ring {
 public:
  Ring(HostCollectives& all, const TensorView& x, ReduceOp op)
      : all_(all),
        data_(static_cast<std::byte*>(x.data)),
        count_(x.shape.product()),
        reduction_{op, x.dtype, all.mean_ranks()} {
    for (int d = 0; d < all.domains().count(); ++d) {
      const std::vector<int>& members = all.domains().members(d);
      order_.insert(order_.end(), members.begin(), members.end());
    }
    const auto self = std::find(order_.begin(), order_.end(), all.rank()) - order_.begin();
    place_ = static_cast<int>(self);
    const std::size_t step = index(ranks() - 1) * (partial(1) + reduction_.bytes(1));
    step_ = static_cast<std::int64_t>(half_bytes() / step) / kStepUnit * kStepUnit;
  }

  void run() {
    const std::int64_t longest = (count_ / kShareUnit / ranks() + 1) * kShareUnit;
    for (std::int64_t at = 0; at < std::min(longest, count_); at += step_) {
      reduce_round(at);
      gather_round(at);
      ++round_;
    }
  }

 private:
  struct Part {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  int ranks() const { return all_.size(); }
  std::size_t partial(std::int64_t elements) const { return reduction_.partial_bytes(elements); }
  std::size_t half_bytes() const { return all_.staging().bytes() / 2 / kLineBytes * kLineBytes; }
  int neighbour(int by) const { return order_[index((place_ + by + ranks()) % ranks())]; }
  int share_before(int steps) const { return (place_ - steps + 2 * ranks()) % ranks(); }

  /// The step from `at` of a share.
  Part part(int share, std::int64_t at) const {
    const auto bound = [&](std::int64_t s) { return ring_bound(count_, ranks(), s); };
    const std::int64_t first = std::min(bound(share) + at, bound(share + 1));
    return {first, std::min(step_, bound(share + 1) - first)};
  }

  std::size_t summed(int step) const {
    return round_ % 2 * half_bytes() + index(step) * partial(step_);
  }
  std::size_t finished(int step) const {
    return summed(ranks() - 1) + index(step) * reduction_.bytes(step_);
  }
  std::byte* element(std::int64_t i) { return data_ + reduction_.bytes(i); }

  void send(std::size_t to, const void* data, std::size_t bytes) {
    if (bytes > 0) all_.put(neighbour(1), to, data, bytes);
    all_.tell(neighbour(1), bytes);
  }

  void reduce_round(std::int64_t at) {
    Part p = part(share_before(1), at);
    send(summed(0), sums_.own(reduction_, element(p.first), p.count), partial(p.count));
    for (int step = 0; step < ranks() - 1; ++step) {
      p = part(share_before(step + 2), at);
      all_.hear(kRingCall, neighbour(-1));
      const void* rows[] = {all_.staged(all_.rank(), summed(step)),
                            sums_.own(reduction_, element(p.first), p.count)};
      if (step + 1 == ranks() - 1) {
        void* const out[] = {element(p.first)};
        reduce_domains(reduction_, rows, p.count, out);
      } else {
        send(summed(step + 1), sums_.sum(reduction_, rows, p.count), partial(p.count));
      }
    }
  }

  void gather_round(std::int64_t at) {
    Part p = part(place_, at);
    send(finished(0), element(p.first), reduction_.bytes(p.count));
    for (int step = 0; step < ranks() - 1; ++step) {
      p = part(share_before(step + 1), at);
      all_.hear(kRingCall, neighbour(-1));
      copy_bytes(element(p.first), all_.staged(all_.rank(), finished(step)),
                 reduction_.bytes(p.count));
      if (step + 1 < ranks() - 1) {
        send(finished(step + 1), element(p.first), reduction_.bytes(p.count));
      }
    }
  }

  HostCollectives& all_;
  std::byte* data_;
  std::int64_t count_;
  Reduction reduction_;
  std::vector<int> order_{};  // ranks, domain after domain
  int place_ = 0;             // of this rank in it
  std::int64_t step_ = 0;     // elements of a share in a round
  std::size_t round_ = 0;
  PartialSums sums_{};
};

}  // namespace

void reduce_along_ring(HostCollectives& all, const TensorView& x, ReduceOp op) {
  Ring(all, x, op).run();
}

}  // namespace ferry::host
