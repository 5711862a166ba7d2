#include "core/vault/table.hpp"

#include <algorithm>
#include <cstring>

#include "core/layout.hpp"

namespace ferry {
namespace {

constexpr std::uint64_t kPartAlignment = 64;

}  // namespace

std::vector<VersionPart> lay_out(std::span<const PartOutline> parts) {
  std::vector<VersionPart> table;
  table.reserve(parts.size());
  std::uint64_t at = sizeof(VersionHead) + parts.size() * sizeof(VersionPart);
  for (const PartOutline& part : parts) {
    VersionPart entry{part.key, at, part.bytes, {}};
    std::copy_n(part.type.begin(), std::min(part.type.size(), entry.type.size() - 1),
                entry.type.begin());
    table.push_back(entry);
    at += round_up(part.bytes, kPartAlignment);
  }
  return table;
}

std::uint64_t version_bytes(std::span<const VersionPart> parts) {
  if (parts.empty()) return sizeof(VersionHead);
  return parts.back().offset + round_up(parts.back().bytes, kPartAlignment);
}

std::optional<std::vector<VersionPart>> read_table(const std::byte* data, std::uint64_t readable,
                                                   std::uint64_t room, std::uint64_t version,
                                                   std::string& wrong) {
  VersionHead head{};
  if (readable < sizeof(head)) {
    wrong = "has room for " + std::to_string(readable) + " bytes";
    return std::nullopt;
  }
  std::memcpy(&head, data, sizeof(head));
  const std::uint64_t most = (readable - sizeof(head)) / sizeof(VersionPart);
  if (head.version != version || head.parts > most) {
    wrong = "says that it is version " + std::to_string(head.version) + " with " +
            std::to_string(head.parts) + " parts, expected version " + std::to_string(version) +
            " with at most " + std::to_string(most);
    return std::nullopt;
  }
  std::vector<VersionPart> table(head.parts);
  const std::uint64_t begin = sizeof(head) + head.parts * sizeof(VersionPart);
  if (!table.empty()) std::memcpy(table.data(), data + sizeof(head), begin - sizeof(head));
  for (const VersionPart& part : table) {
    const bool inside =
        part.offset >= begin && part.offset <= room && part.bytes <= room - part.offset;
    if (inside && part.type.back() == '\0') continue;
    wrong = "has a part of " + std::to_string(part.bytes) + " bytes at offset " +
            std::to_string(part.offset) + " of " + std::to_string(room) +
            (inside ? ", with a type that does not end" : "");
    return std::nullopt;
  }
  return table;
}

std::string_view type_of(const VersionPart& part) {
  const auto end = std::find(part.type.begin(), part.type.end(), '\0');
  return {part.type.data(), static_cast<std::size_t>(end - part.type.begin())};
}

}  // namespace ferry
