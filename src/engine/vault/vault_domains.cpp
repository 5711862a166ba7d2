// The vault across domains. A keeper of another domain takes a copy of each version in the put,
// which all ranks make together: when they have committed once more, all copies are whole. After a
// loss ranks are sent what they want from other domains.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "core/layout.hpp"
#include "engine/vault/vault.hpp"

namespace ferry::engine {
namespace {

constexpr const char* kState = "recover: state";

std::uint64_t room_of(const VersionPart& part) {
  return round_up(part.bytes, 64);
}

}  // namespace

void ShelfVault::put_across(std::uint64_t step, std::span<const VaultPart> parts,
                            const Stream* stream) {
  std::vector<VersionPart> table;
  std::vector<Kept*> from;
  std::optional<Error> invalid;
  try {
    table = table_for(step, parts);
    for (Kept& kept : kept_) {
      if (kept.at != 0) continue;
      shelf_of(kept).begin();  // before its owner hears of it and writes
      from.push_back(&kept);
    }
  } catch (const Error& error) {
    invalid = error;
  }
  StepMessage head;
  head.call = signature(CallKind::put, step);
  agree_on_validity(channel(), "put", head, invalid);
  fetched_ = {};
  write_version(step, table, parts, stream);
  send_version(step + 1, version_bytes(table));
  take_version("put: copies", from, step + 1);
}

/// Owners give their keepers what was agreed on, where those lack it: they keep it anew.
void ShelfVault::send_agreed(const std::vector<Found>& found, Version agreed) {
  const int self = channel().rank();
  shelf_at(own_).drop_newer(agreed);
  mirror_ = {};
  std::vector<Kept*> from;
  StepMessage head;
  head.call = signature(CallKind::recover);
  for (const Found& one : found) {
    if (one.role != Role::present) continue;
    Numbers numbers = one.numbers;
    for (Version& each : numbers) each = each > agreed ? 0 : each;
    const bool lacks =
        agreed != 0 && std::find(numbers.begin(), numbers.end(), agreed) == numbers.end();
    if (one.owner == self) {
      mirror_ = {one.keeper, one.address, numbers};
      const std::byte* whole = lacks ? shelf_at(own_).find(agreed) : nullptr;
      if (whole != nullptr) {
        head.need_bytes = version_bytes(table_of(self, self, whole, entry_bytes_, agreed));
      }
    }
    for (Kept& kept : kept_) {
      if (one.keeper != self || kept.room.region.data != one.shelf) continue;
      shelf_of(kept).drop_newer(agreed);
      if (!lacks) continue;
      shelf_of(kept).begin();
      from.push_back(&kept);
    }
  }
  channel().swap("recover: keepers", head);
  check_same_call(channel(), "recover: keepers", head.call);
  if (head.need_bytes != 0) send_version(agreed, head.need_bytes);
  std::erase_if(from,
                [&](const Kept* kept) { return channel().head(kept->owner).need_bytes == 0; });
  take_version("recover: copies", from, agreed);
}

/// In the generation of a swap since which the keeper expects it.
void ShelfVault::send_version(Version version, std::size_t bytes) {
  if (mirror_.keeper < 0) return;
  const std::uint64_t entry = Shelf::next_of(mirror_.numbers);
  channel().reach().write(
      mirror_.keeper,
      {mirror_.shelf.segment, mirror_.shelf.offset + Shelf::offset_of(entry, entry_bytes_)},
      shelf_at(own_).find(version), bytes, channel().delivery_tag());
  channel().deliver(mirror_.keeper, bytes);
  mirror_.numbers[entry] = version;
}

void ShelfVault::take_version(const char* stage, const std::vector<Kept*>& from, Version version) {
  for (const Kept* kept : from) {
    channel().await_delivered(stage, kept->owner);
    shelf_of(*kept).publish(version);
  }
}

/// What others may want from here, without the bytes of its parts.
std::vector<std::byte> ShelfVault::tables_here() {
  const int self = channel().rank();
  std::vector<std::byte> text;
  here_.clear();
  const auto add = [&](int owner, const Region& shelf) {
    const std::byte* version = shelf_at(shelf.data).find(agreed_);
    if (version == nullptr) return;
    here_.push_back({owner == self, owner, self, version,
                     table_of(owner, self, version, entry_bytes_, agreed_)});
    const std::uint64_t bytes =
        sizeof(VersionHead) + here_.back().parts.size() * sizeof(VersionPart);
    const Served served{static_cast<std::uint64_t>(owner), shelf.address.segment,
                        shelf.address.offset + static_cast<std::uint64_t>(version - shelf.data),
                        bytes};
    const auto head = std::as_bytes(std::span(&served, 1));
    text.insert(text.end(), head.begin(), head.end());
    text.insert(text.end(), version, version + bytes);
  };
  add(self, own_room_.region);
  for (const Kept& kept : kept_) {
    if (kept.at == agreed_) add(kept.owner, kept.room.region);
  }
  return text;
}

std::vector<ShelfVault::Table> ShelfVault::swap_tables() {
  std::vector<Table> all;
  here_.clear();
  if (agreed_ == 0) return all;
  const auto texts = gather("recover: tables", tables_here());
  for (const int keeper : channel().ranks()) {
    std::span<const std::byte> text = texts[static_cast<std::size_t>(keeper)];
    while (!text.empty()) {
      Served served{};
      const bool whole = text.size() >= sizeof(served);
      if (whole) std::memcpy(&served, text.data(), sizeof(served));
      text = text.subspan(std::min(text.size(), sizeof(served)));
      const auto segment = static_cast<fabric::SegmentId>(served.segment);
      if (!whole || served.bytes > text.size() || segment != served.segment ||
          served.owner >= static_cast<std::uint64_t>(channel().size())) {
        channel().throw_violation("recover: tables", keeper,
                                  "tells of " + std::to_string(served.bytes) + " bytes of rank " +
                                      std::to_string(served.owner) + ", where " +
                                      std::to_string(text.size()) + " are left");
      }
      const auto owner = static_cast<int>(served.owner);
      const std::byte* version =
          channel().checked("recover: tables", keeper, {segment, served.offset}, entry_bytes_);
      all.push_back({owner == keeper && keeper == channel().rank(), owner, keeper, version,
                     table_of(owner, keeper, text.data(), served.bytes, agreed_)});
      text = text.subspan(served.bytes);
    }
  }
  return all;
}

/// What this rank wants and cannot read, and the bytes that it takes.
std::vector<ShelfVault::Wanted> ShelfVault::missing(std::span<const std::int64_t> wanted,
                                                    std::size_t& bytes) const {
  std::vector<std::int64_t> keys(wanted.begin(), wanted.end());
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  std::vector<Wanted> all;
  for (const std::int64_t key : keys) {
    const auto found = sources_.find(key);
    if (found == sources_.end() || found->second.version != nullptr) continue;
    const Source& source = found->second;
    all.push_back({static_cast<std::uint64_t>(source.keeper),
                   static_cast<std::uint64_t>(source.owner), key, bytes});
    for (const VersionPart& part : source.parts) bytes += room_of(part);
  }
  return all;
}

void ShelfVault::fetch(std::span<const std::int64_t> wanted) {
  std::size_t bytes = 0;
  const std::vector<Wanted> mine = missing(wanted, bytes);
  fetched_ = {};
  if (agreed_ == 0) return;
  const auto lists = gather("recover: wanted", std::as_bytes(std::span(mine)));
  if (std::all_of(lists.begin(), lists.end(), [](const auto& list) { return list.empty(); })) {
    return;
  }
  StepMessage head;
  head.call = signature(CallKind::recover);
  const auto prepare = [&] {
    if (mine.empty()) return true;
    fetched_ = take(std::max<std::size_t>(bytes, 1), head);  // tensors may have no elements
    head.segment = fetched_.region.address.segment;
    head.offset = fetched_.region.address.offset;
    return fetched_.lease != nullptr;
  };
  agree_on_room(channel(), kState, head, prepare, room("the keys given to recover"));
  for (const int peer : channel().ranks()) {
    send_wanted(peer, lists[static_cast<std::size_t>(peer)]);
  }
  for (const Wanted& one : mine) {
    channel().await_delivered(kState, static_cast<int>(one.keeper));
    Source& source = sources_.at(one.key);
    std::uint64_t offset = one.offset;
    for (VersionPart& part : source.parts) {
      part.offset = offset;
      offset += room_of(part);
    }
    source.version = fetched_.region.data;
  }
}

void ShelfVault::send_wanted(int to, std::span<const std::byte> list) {
  std::uint64_t bytes = 0;
  bool any = false;
  for (; list.size() >= sizeof(Wanted); list = list.subspan(sizeof(Wanted))) {
    Wanted wanted{};
    std::memcpy(&wanted, list.data(), sizeof(wanted));
    if (wanted.keeper != static_cast<std::uint64_t>(channel().rank())) continue;
    bytes += send_parts(to, wanted);
    any = true;
  }
  if (any) channel().deliver(to, bytes);
}

std::uint64_t ShelfVault::send_parts(int to, const Wanted& wanted) {
  const StepMessage theirs = channel().head(to);
  const auto table = std::find_if(here_.begin(), here_.end(), [&](const Table& one) {
    return static_cast<std::uint64_t>(one.owner) == wanted.owner;
  });
  std::uint64_t at = theirs.offset + wanted.offset;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; table != here_.end() && i < table->parts.size(); ++i) {
    const VersionPart& part = table->parts[i];
    if (part.key != wanted.key) continue;
    channel().checked(kState, to, {theirs.segment, at}, part.bytes);
    channel().reach().write(to, {theirs.segment, at}, table->version + part.offset, part.bytes,
                            channel().delivery_tag());
    at += room_of(part);
    bytes += part.bytes;
  }
  return bytes;
}

}  // namespace ferry::engine
