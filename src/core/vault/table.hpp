// What lies in one version of a rank's state: a table of parts, then their bytes. Whoever reads it
// did not write it, so everything in it is checked.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

/// One part as it crosses: trivially copyable, without padding.
struct VersionPart {
  static constexpr std::size_t kTypeBytes = 104;
  std::int64_t key;
  std::uint64_t offset;  ///< from the version's first byte
  std::uint64_t bytes;
  std::array<char, kTypeBytes> type;  ///< dtype and shape in words; ends with a zero
};
static_assert(sizeof(VersionPart) == 128);

/// What goes into a version.
struct PartOutline {
  std::int64_t key = 0;
  std::uint64_t bytes = 0;
  std::string_view type{};
};

/// The table of these parts in this order. Their bytes begin at multiples of 64.
std::vector<VersionPart> lay_out(std::span<const PartOutline> parts);
/// Bytes of a version: its table and all parts.
std::uint64_t version_bytes(std::span<const VersionPart> parts);
/// A version's first bytes, before the table.
struct VersionHead {
  std::uint64_t version;
  std::uint64_t parts;
  std::array<std::uint64_t, 6> reserved;
};
static_assert(sizeof(VersionHead) == 64);

/// A copy of the table of a version that lies in `room` bytes, of which the first `readable` are at
/// `data`. When it cannot be the table of `version`, nothing, and `wrong` says why.
std::optional<std::vector<VersionPart>> read_table(const std::byte* data, std::uint64_t readable,
                                                   std::uint64_t room, std::uint64_t version,
                                                   std::string& wrong);

/// The words, without what follows their end.
std::string_view type_of(const VersionPart& part);

}  // namespace ferry
