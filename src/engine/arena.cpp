#include "engine/arena.hpp"

#include <algorithm>
#include <functional>
#include <iterator>

namespace ferry::engine {

void Arena::add(const fabric::Segment& segment) {
  std::scoped_lock lock(mutex_);
  Pool pool{segment, {}, {}};
  pool.free[0] = segment.bytes / kRegionAlignment * kRegionAlignment;
  pools_.push_back(std::move(pool));
}

std::optional<Region> Arena::allocate(std::size_t bytes) {
  const std::size_t units =
      std::max<std::size_t>(1, (bytes + kRegionAlignment - 1) / kRegionAlignment);
  const std::size_t need = units * kRegionAlignment;
  if (need < bytes) return std::nullopt;  // overflow
  std::scoped_lock lock(mutex_);
  for (Pool& pool : pools_) {
    const auto piece = std::find_if(pool.free.begin(), pool.free.end(),
                                    [&](const auto& free) { return free.second >= need; });
    if (piece == pool.free.end()) continue;
    const auto [offset, size] = *piece;
    pool.free.erase(piece);
    if (size > need) pool.free[offset + need] = size - need;
    used_ += need;
    return Region{{pool.segment.id, offset}, pool.segment.data + offset, need};
  }
  return std::nullopt;
}

Arena::Pool* Arena::pool_of(const Region& region) {
  const auto pool = std::find_if(pools_.begin(), pools_.end(), [&](const Pool& p) {
    return p.segment.id == region.address.segment;
  });
  return pool == pools_.end() ? nullptr : &*pool;
}

void Arena::release(const Region& region) {
  std::scoped_lock lock(mutex_);
  Pool* pool = pool_of(region);
  if (pool == nullptr) return;
  if (holds_back_) {
    const auto after = pool->old.upper_bound(region.address.offset);
    if (after != pool->old.begin() && std::prev(after)->second > region.address.offset) {
      held_.push_back(region);
      return;
    }
  }
  free(*pool, region);
}

void Arena::hold_back() {
  std::scoped_lock lock(mutex_);
  holds_back_ = true;
  for (Pool& pool : pools_) {
    // All that is not free; what is held back already is among it.
    pool.old.clear();
    std::size_t end = 0;
    for (const auto& [offset, bytes] : pool.free) {
      if (offset > end) pool.old[end] = offset;
      end = offset + bytes;
    }
    if (pool.segment.bytes > end) pool.old[end] = pool.segment.bytes;
  }
}

bool Arena::holds_back() const {
  std::scoped_lock lock(mutex_);
  return holds_back_;
}

void Arena::free_held() {
  std::scoped_lock lock(mutex_);
  holds_back_ = false;
  for (const Region& region : held_) free(*pool_of(region), region);
  held_.clear();
}

void Arena::free(Pool& pool, const Region& region) {
  used_ -= region.bytes;
  auto at = pool.free.emplace(region.address.offset, region.bytes).first;
  if (const auto next = std::next(at);
      next != pool.free.end() && at->first + at->second == next->first) {
    at->second += next->second;
    pool.free.erase(next);
  }
  if (at != pool.free.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      pool.free.erase(at);
    }
  }
}

std::optional<fabric::Address> Arena::find(const void* pointer, std::size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  std::scoped_lock lock(mutex_);
  for (const Pool& pool : pools_) {
    const std::byte* begin = pool.segment.data;
    const std::byte* end = begin + pool.segment.bytes;
    if (std::less_equal<>{}(begin, at) && std::less<>{}(at, end) &&
        bytes <= static_cast<std::size_t>(end - at)) {
      return fabric::Address{pool.segment.id, static_cast<std::uint64_t>(at - begin)};
    }
  }
  return std::nullopt;
}

std::size_t Arena::total_bytes() const {
  std::scoped_lock lock(mutex_);
  std::size_t total = 0;
  for (const Pool& pool : pools_) total += pool.segment.bytes;
  return total;
}

std::size_t Arena::used_bytes() const {
  std::scoped_lock lock(mutex_);
  return used_;
}

}  // namespace ferry::engine
