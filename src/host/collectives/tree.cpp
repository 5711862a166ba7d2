// all_reduce by a binary tree: partial results go up, piece after piece, and results come down. In
// each domain a tree of its ranks, whose roots form a tree of the domains.
#include <algorithm>

#include "host/collectives/algorithms.hpp"

namespace ferry::host {
namespace {

constexpr const char* kTreeCall = "all_reduce";
constexpr int kMostChildren = 4;         // two in the domain, and of its root two domains
constexpr std::int64_t kUnderWay = 4;    // pieces that have gone up and not come down
constexpr std::int64_t kPieceUnit = 16;  // elements

/// Piece k lands in place k modulo kUnderWay. A rank sends piece k + kUnderWay up when piece k has
/// come down: then the rank above has used what came up before, and has had no reason to send more
/// down. So no other signal is needed.
class Tree {
 public:
  Tree(HostCollectives& all, const TensorView& x, ReduceOp op)
      : all_(all),
        data_(static_cast<std::byte*>(x.data)),
        count_(x.shape.product()),
        reduction_{op, x.dtype, all.mean_ranks()},
        above_(tree_parent(all.rank(), all.domains())),
        below_(tree_children(all.rank(), all.domains())) {
    const std::size_t element = kMostChildren * partial(1) + reduction_.bytes(1);
    const auto most = static_cast<std::int64_t>(all.staging().bytes() / kUnderWay / element);
    piece_ = most / kPieceUnit * kPieceUnit;
    if (above_ < 0) return;
    const std::vector<int> siblings = tree_children(above_, all.domains());
    child_ = std::find(siblings.begin(), siblings.end(), all.rank()) - siblings.begin();
  }

  void run() {
    const std::int64_t pieces = (count_ + piece_ - 1) / piece_;
    const std::int64_t ahead = above_ < 0 ? 1 : kUnderWay;  // the root finishes a piece at once
    for (std::int64_t k = 0; k < std::min(ahead, pieces); ++k) go_up(k);
    for (std::int64_t k = 0; k < pieces; ++k) {
      come_down(k);
      if (k + ahead < pieces) go_up(k + ahead);
    }
  }

 private:
  std::size_t partial(std::int64_t elements) const { return reduction_.partial_bytes(elements); }
  std::int64_t count(std::int64_t piece) const { return std::min(piece_, count_ - piece * piece_); }
  std::byte* element(std::int64_t piece) { return data_ + reduction_.bytes(piece * piece_); }

  std::size_t up_place(std::int64_t child, std::int64_t piece) const {
    return index(child * kUnderWay + piece % kUnderWay) * partial(piece_);
  }
  std::size_t down_place(std::int64_t piece) const {
    return up_place(kMostChildren, 0) + index(piece % kUnderWay) * reduction_.bytes(piece_);
  }

  void go_up(std::int64_t piece) {
    const std::int64_t some = count(piece);
    std::vector<const void*> rows{sums_.own(reduction_, element(piece), some)};
    for (std::size_t i = 0; i < below_.size(); ++i) {
      all_.hear(kTreeCall, below_[i]);
      rows.push_back(all_.staged(all_.rank(), up_place(static_cast<std::int64_t>(i), piece)));
    }
    void* const out[] = {element(piece)};
    if (above_ < 0) return reduce_domains(reduction_, rows, some, out);
    const void* sum = below_.empty() ? rows[0] : sums_.sum(reduction_, rows, some);
    all_.put(above_, up_place(child_, piece), sum, partial(some));
    all_.tell(above_, partial(some));
  }

  void come_down(std::int64_t piece) {
    const std::size_t bytes = reduction_.bytes(count(piece));
    if (above_ >= 0) {
      all_.hear(kTreeCall, above_);
      copy_bytes(element(piece), all_.staged(all_.rank(), down_place(piece)), bytes);
    }
    for (const int rank : below_) {
      all_.put(rank, down_place(piece), element(piece), bytes);
      all_.tell(rank, bytes);
    }
  }

  HostCollectives& all_;
  std::byte* data_;
  std::int64_t count_;
  Reduction reduction_;
  int above_;
  std::vector<int> below_;
  std::int64_t child_ = 0;  // the place of this rank among those below the one above
  std::int64_t piece_ = 0;  // elements
  PartialSums sums_{};
};

}  // namespace

void reduce_by_tree(HostCollectives& all, const TensorView& x, ReduceOp op) {
  Tree(all, x, op).run();
}

}  // namespace ferry::host
