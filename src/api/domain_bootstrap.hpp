// The bootstrap of the ranks of one domain, or of another part of a group, on that of all.
#pragma once
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/domains.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/error.hpp"

namespace ferry {

/// Every domain goes through steps of its own, and may have more of them than the others: whoever
/// is done takes part in the rounds of the rest until all are (`finish`).
class DomainBootstrap final : public Bootstrap {
 public:
  /// `whole` is used by this object alone until `finish` returns.
  DomainBootstrap(Bootstrap& whole, const Domains& domains)
      : whole_(whole),
        members_(domains.members(domains.of(whole.rank()))),
        rank_(domains.index(whole.rank())) {}
  /// Of these ranks, in this order, this one among them; every rank is of one such part.
  DomainBootstrap(Bootstrap& whole, std::vector<int> members)
      : whole_(whole),
        members_(std::move(members)),
        rank_(static_cast<int>(std::find(members_.begin(), members_.end(), whole.rank()) -
                               members_.begin())) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds deadline,
                                                 const OnWait& on_wait) override;
  /// Collective among all ranks. `failed`: why this rank's steps ended early; it throws that, the
  /// others Error(peer_failed) naming the first such rank.
  void finish(const std::optional<Error>& failed, std::chrono::nanoseconds deadline,
              const OnWait& on_wait);

 private:
  Bootstrap& whole_;
  std::vector<int> members_;
  int rank_;
};

}  // namespace ferry
