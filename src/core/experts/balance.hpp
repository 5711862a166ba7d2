// A default policy: which seat holds which experts, given how much each of them has to do.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/experts/expert_table.hpp"

namespace ferry {

/// What `balance` places, and where.
struct BalanceRequest {
  const Domains* domains = nullptr;    ///< of all seats
  std::span<const std::uint8_t> live;  ///< [seats], 0: a hole
  int slots = 1;                       ///< experts that a seat can hold
  std::span<const double> load;        ///< [experts], 0 or more: tokens of each, say
  int copies = 1;                      ///< of each expert at least, on different seats
  const ExpertTable* old = nullptr;    ///< not null: what need not move stays
};

/// How many copies each expert gets. A copy more goes to the expert with the most load for each of
/// its copies, until all slots of live seats are used; no expert has more copies than there are
/// live seats. If the slots do not suffice for `copies` of each, some experts have fewer.
std::vector<int> copies_for(const BalanceRequest& request);

/// The policy that DeepSeek published as EPLB (github.com/deepseek-ai/EPLB): the heaviest experts
/// are copied (`copies_for`), then copies are packed greedily, heaviest first, domain by domain:
/// onto the least loaded seat of the least loaded domain. Where it differs: seats may be holes and
/// domains uneven, copies of one expert lie on different seats and, if possible, in different
/// domains, and experts have no groups. With `old`, each expert keeps as many of its old places as
/// it has copies now, and only the rest is packed. Every rank computes the same table from the same
/// request. Refuses live seats that have fewer slots than there are experts.
ExpertTable balance(const BalanceRequest& request);

}  // namespace ferry
