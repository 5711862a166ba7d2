#include "cuda/throughput/quarantine.hpp"

#include <algorithm>
#include <functional>

namespace ferry::cuda {

void Quarantine::add(const std::vector<engine::Region>& granted) {
  std::scoped_lock lock(mutex_);
  granted_.insert(granted_.end(), granted.begin(), granted.end());
}

bool Quarantine::empty() const {
  std::scoped_lock lock(mutex_);
  return granted_.empty();
}

bool Quarantine::keeps(const Held& held) {
  const std::less<> before{};
  const std::byte* begin = held.region.data;
  const std::byte* end = begin + held.region.bytes;
  std::scoped_lock lock(mutex_);
  const bool overlaps =
      std::any_of(granted_.begin(), granted_.end(), [&](const engine::Region& granted) {
        return before(begin, granted.data + granted.bytes) && before(granted.data, end);
      });
  if (overlaps) kept_.push_back(held);
  return overlaps;
}

void Quarantine::end() {
  std::vector<Held> kept;  // dropped without the lock
  std::scoped_lock lock(mutex_);
  granted_.clear();
  kept.swap(kept_);
}

}  // namespace ferry::cuda
