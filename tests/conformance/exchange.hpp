// One plan with its reference, for tests that are not cells of the matrix: rank-major or
// expert-major, dispatched and combined as often and in whatever order a test likes.
#pragma once
#include <memory>
#include <vector>

#include "case.hpp"
#include "ferry/ferry.hpp"
#include "fleet.hpp"
#include "inputs.hpp"
#include "reference.hpp"

namespace ferry::conformance {

class Exchange {
 public:
  /// Makes the plan of the case's routes. Uses of the case: ranks, hidden, topk, routes, dtype
  /// (f32, bf16 or f16), order, alignment, tokens, experts, special values, seed.
  Exchange(Rank& rank, Group& group, const Case& c, Stream* stream = nullptr);

  /// Dispatches the values of `round`, with weights. `max_recv_rows`: 0 or the size of the
  /// output.
  Received dispatch(std::uint64_t round, std::int64_t max_recv_rows = 0);
  void check(const Received& received, std::uint64_t round);
  Received dispatch_and_check(std::uint64_t round) {
    Received received = dispatch(round);
    check(received, round);
    return received;
  }
  /// Combines rows of its own making, from ordinary memory, with weights.
  Combined combine(std::uint64_t round);
  void check(const Combined& combined, std::uint64_t round);
  void combine_and_check(std::uint64_t round) { check(combine(round), round); }
  /// All of it once.
  void run(std::uint64_t round = 0) {
    const Received received = dispatch_and_check(round);
    combine_and_check(round);
  }

  const Plan& plan() const { return plan_; }
  std::int64_t expected_rows() const { return expected_.rows; }
  const World& world(std::uint64_t round);

 private:
  /// Where calls of this rank read; kept as long as the exchange.
  ConstTensorView put(const ConstTensorView& tensor);
  void fill(std::uint64_t round, int rank, std::int64_t row, std::byte* out) const;
  float weight(std::uint64_t round, int rank, std::int64_t row, int slot) const;

  Rank& rank_;
  Group& group_;
  Case case_;
  Stream* stream_;
  std::vector<std::unique_ptr<World>> worlds_{};
  ExpectedDispatch expected_{};  // of round 0: the routes
  Plan plan_{};
  std::vector<std::shared_ptr<void>> inputs_{};  // held until the end, for streams
  std::vector<Tensor> arrays_{};
};

/// A small case: 4 experts a rank and one more, bf16, topk 3, hidden 64.
Case small_case(const Rank& rank, std::uint64_t seed);

}  // namespace ferry::conformance
