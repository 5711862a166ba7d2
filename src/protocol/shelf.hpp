// A shelf: the two newest versions of one rank's state, in the memory of another rank, its keeper.
// The rank may die at any moment while it writes: what has a number is whole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What a shelf relies on, as parameters, so that the explorer can break it.
struct ShelfTraits {
  /// One version stays whole while the next is written.
  static constexpr std::uint64_t kEntries = 2;
  /// An entry that is written has no number.
  static constexpr bool kClears = true;
  static constexpr bool kDropsNewer = true;
  /// Release: who acquires the number sees the whole version.
  static constexpr order kPublish = order::release;
};

/// A line with the number of each entry, 0: none, then the entries; zeroed at first. Its owner
/// alone writes; any number of ranks read. Who reads a version knows that its owner does not begin
/// the one after the next before everybody has read it.
template <class Traits = ShelfTraits>
class Shelf {
 public:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t bytes(std::size_t entry_bytes) {
    return kLine + Traits::kEntries * entry_bytes;
  }

  Shelf(std::byte* base, std::size_t entry_bytes) : base_(base), entry_bytes_(entry_bytes) {}

  /// The memory for the next version, in the place of the older one.
  std::byte* begin() const {
    const std::uint64_t entry = older();
    // relaxed: this thread wrote it. Acquire: no byte is written before the number is gone.
    const std::uint64_t old = number(entry).load(order::relaxed);
    if (Traits::kClears) number(entry).fetch_add(0 - old, order::acquire);
    return data(entry);
  }
  /// The version that `begin` gave memory for is whole; `version` is more than all before.
  void publish(std::uint64_t version) const { number(older()).store(version, Traits::kPublish); }
  /// Versions after `version` are none: others never had them.
  void drop_newer(std::uint64_t version) const {
    for (std::uint64_t entry = 0; entry < Traits::kEntries; ++entry) {
      // relaxed: this thread wrote them.
      if (Traits::kDropsNewer && number(entry).load(order::relaxed) > version) {
        number(entry).store(0, order::relaxed);
      }
    }
  }

  /// Of each entry.
  std::array<std::uint64_t, Traits::kEntries> numbers() const {
    std::array<std::uint64_t, Traits::kEntries> all{};
    for (std::uint64_t entry = 0; entry < Traits::kEntries; ++entry) {
      all[entry] = number(entry).load(order::acquire);
    }
    return all;
  }
  /// The one that `begin` takes next, of a shelf whose entries have these numbers.
  static constexpr std::uint64_t next_of(
      const std::array<std::uint64_t, Traits::kEntries>& numbers) {
    std::uint64_t least = 0;
    for (std::uint64_t entry = 1; entry < Traits::kEntries; ++entry) {
      if (numbers[entry] < numbers[least]) least = entry;
    }
    return least;
  }
  /// Where an entry lies on a shelf.
  static constexpr std::size_t offset_of(std::uint64_t entry, std::size_t entry_bytes) {
    return kLine + static_cast<std::size_t>(entry) * entry_bytes;
  }

  /// 0: there is none.
  std::uint64_t newest() const {
    std::uint64_t most = 0;
    for (std::uint64_t entry = 0; entry < Traits::kEntries; ++entry) {
      const std::uint64_t there = number(entry).load(order::acquire);
      if (there > most) most = there;
    }
    return most;
  }
  /// 0: an entry has none.
  std::uint64_t oldest() const {
    std::uint64_t least = number(0).load(order::acquire);
    for (std::uint64_t entry = 1; entry < Traits::kEntries; ++entry) {
      const std::uint64_t there = number(entry).load(order::acquire);
      if (there < least) least = there;
    }
    return least;
  }
  /// Null: it is not there, or not whole.
  std::byte* find(std::uint64_t version) const {
    for (std::uint64_t entry = 0; entry < Traits::kEntries; ++entry) {
      if (version != 0 && number(entry).load(order::acquire) == version) return data(entry);
    }
    return nullptr;
  }

 private:
  Flag number(std::uint64_t entry) const {
    return Flag{reinterpret_cast<std::uint64_t*>(base_) + entry};
  }
  std::byte* data(std::uint64_t entry) const { return base_ + offset_of(entry, entry_bytes_); }
  std::uint64_t older() const {
    std::array<std::uint64_t, Traits::kEntries> all{};
    // relaxed: this thread wrote them.
    for (std::uint64_t entry = 0; entry < Traits::kEntries; ++entry) {
      all[entry] = number(entry).load(order::relaxed);
    }
    return next_of(all);
  }

  std::byte* base_;
  std::size_t entry_bytes_;
};

/// What is known of the versions of one rank when all that are left agree on one.
struct Versions {
  /// It has taken part in such an agreement before; one that just joined has not.
  bool counts = false;
  /// The newest that is whole, but at least the one agreed on last: what a rank has not put since
  /// then is there from others.
  std::uint64_t newest = 0;
};

/// What the agreement relies on, as parameters for the model.
struct AgreedTraits {
  static constexpr bool kLeast = true;
};

/// The newest version that all have whole; 0: none. `all`: of each rank that is there, and of each
/// that was lost since the last agreement and whose keeper is there. All put the same versions, and
/// each puts one only when all have put the one before: so all that count have the least of them.
template <class Traits = AgreedTraits>
constexpr std::uint64_t agreed_version(std::span<const Versions> all) {
  bool any = false;
  std::uint64_t agreed = 0;
  for (const Versions& one : all) {
    if (!one.counts) continue;
    const bool better = Traits::kLeast ? one.newest < agreed : one.newest > agreed;
    if (!any || better) agreed = one.newest;
    any = true;
  }
  return agreed;
}

}  // namespace ferry::protocol
