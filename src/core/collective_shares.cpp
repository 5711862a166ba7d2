#include "core/collective_shares.hpp"

#include <algorithm>

namespace ferry {

std::vector<Share> equal_shares(std::int64_t count, const Domains& domains) {
  std::size_t most = 1;
  for (int d = 0; d < domains.count(); ++d) most = std::max(most, domains.members(d).size());
  const auto indices = static_cast<std::int64_t>(most);
  const std::int64_t shares = indices * domains.count();
  const std::int64_t units = (count + kShareUnit - 1) / kShareUnit;
  std::vector<Share> made;
  for (std::int64_t s = 0; s < shares; ++s) {
    const auto bound = [&](std::int64_t i) {
      return std::min(count, units * i / shares * kShareUnit);
    };
    const Share share{bound(s), s + 1 == shares ? count : bound(s + 1),
                      static_cast<int>(s / indices), static_cast<int>(s % indices)};
    if (share.count() > 0) made.push_back(share);
  }
  return made;
}

}  // namespace ferry
