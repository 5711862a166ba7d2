// What the kernel does by which a rank rejoins, without a GPU, a poll at a time.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "cuda/latency/proxy/test_rank.hpp"

namespace ferry::cuda::test {

/// Offers and answers inside domains, [2, ranks]: there a rank writes into others' memory.
using RejoinBoard = std::array<std::array<std::atomic<std::uint64_t>, 8>, 2>;

class FakeRejoin {
 public:
  /// `board` null: every rank is a domain.
  explicit FakeRejoin(FakeRank& rank, std::shared_ptr<RejoinBoard> board = {})
      : rank_(rank), board_(std::move(board)) {}

  /// A new attempt. `used`: the newest generation that this rank used.
  void begin(Generation used);
  /// True: the rank has rejoined, and goes on after `agreed`.
  bool poll();
  Generation agreed() const { return agreed_; }
  /// Whose word was missing in the last poll.
  int missing() const { return missing_; }

 private:
  std::uint64_t word(Generation generation) const { return round_ << kRejoinShift | generation; }
  bool is_beyond(int peer) const;
  std::size_t lines(bool answers) const;
  void publish(Generation generation);
  /// The newest of a rank's offers or answers.
  std::uint64_t heard(bool answer, int peer) const;
  void go_on() const;

  FakeRank& rank_;
  std::shared_ptr<RejoinBoard> board_;
  std::uint64_t round_ = 0;
  bool answering_ = false;
  Generation used_ = 0, agreed_ = 0;
  int missing_ = -1;
};

}  // namespace ferry::cuda::test
