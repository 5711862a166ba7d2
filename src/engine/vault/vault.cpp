#include "engine/vault/vault.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "base/text.hpp"
#include "core/check.hpp"
#include "fabric/lobby.hpp"
#include "ferry/dtype.hpp"

namespace ferry::engine {
namespace {

constexpr const char* kRecover = "recover";
constexpr const char* kPut = "put";

/// The one after `rank` in this ascending list.
int next_of(const std::vector<int>& ranks, int rank) {
  const auto next = std::upper_bound(ranks.begin(), ranks.end(), rank);
  return next == ranks.end() ? ranks.front() : *next;
}

std::string type_text(const std::string& given, const ConstTensorView& tensor) {
  return given.empty() ? std::string(name_of(tensor.dtype)) + to_string(tensor.shape) : given;
}

/// `device`: where it may lie beside CPU memory.
void check_part(const char* call, const std::string& name, const ConstTensorView& tensor,
                const std::string& type, const Device& device) {
  const bool here = tensor.device.kind == DeviceKind::cpu;
  check_tensor(call, name, tensor, tensor.dims(), here ? Device{} : device);
  if (type.size() < VersionPart::kTypeBytes && type.find('\0') == std::string::npos) return;
  refuse(call, name + ".type", std::to_string(type.size()) + " characters",
         "at most " + std::to_string(VersionPart::kTypeBytes - 1) + ", none of them 0");
}

std::size_t entry_bytes_of(std::size_t version_bytes) {
  return round_up(std::max(version_bytes, sizeof(VersionHead)), 64);
}

}  // namespace

ShelfVault::ShelfVault(VaultGroup& group, std::size_t version_bytes)
    : group_(group), entry_bytes_(entry_bytes_of(version_bytes)), across_(group.domains() > 1) {
  std::random_device random;
  id_ = (std::uint64_t{random()} << 32 | random()) | 1;
  // Until the next `recover` this rank's versions lie with their keeper, also when another process
  // has taken its place.
  if (fabric::Lobby* lobby = group.shared_memory()->fabric->lobby()) lobby->keep_former();
}

std::shared_ptr<VaultEngine> GroupVault::open(VaultGroup& group, std::size_t version_bytes) {
  if (!open_.expired()) refuse("Vault", "group", "one that has a vault", "one vault a group");
  if (!vault_) {
    vault_ = std::make_unique<ShelfVault>(group, version_bytes);
  } else {
    vault_->reopen(version_bytes);
  }
  // The deleter lives as long as the engine's weak pointer, so it lets go of the engine.
  std::shared_ptr<VaultEngine> opened(
      vault_.get(), [kept = group.kept()](VaultEngine*) mutable { kept.reset(); });
  open_ = opened;
  return opened;
}

void ShelfVault::reopen(std::size_t version_bytes) {
  std::scoped_lock lock(mutex_);
  const std::size_t bytes = entry_bytes_of(version_bytes);
  if (!kept_.empty() && bytes != entry_bytes_) {
    refuse("Vault", "version_bytes", std::to_string(bytes) + ", rounded up to 64",
           std::to_string(entry_bytes_) +
               ", as the group's vault had before: its versions stay; or a new group");
  }
  entry_bytes_ = bytes;
  epoch_ = 0;
}

/// The next rank of the view; where it has several domains, the rank on the same rail of the next.
int ShelfVault::keeper_of(int owner) const {
  const Domains& domains = group_.topology();
  if (domains.count() == 1) return next_of(channel().ranks(), owner);
  return domains.rail(owner, (domains.of(owner) + 1) % domains.count());
}

/// Those whose keeper this rank is. A rank that has its own shelf beside keeps none for itself.
std::vector<int> ShelfVault::owners_kept_here() const {
  std::vector<int> owners;
  for (const int owner : channel().ranks()) {
    const bool own = across_ && owner == channel().rank();
    if (keeper_of(owner) == channel().rank() && !own) owners.push_back(owner);
  }
  return owners;
}

std::optional<std::uint64_t> ShelfVault::recover(std::span<const std::int64_t> wanted) {
  std::scoped_lock lock(mutex_);
  Version agreed = 0;
  group_.in_turn(kRecover, [&] { agreed = agree(wanted); });
  if (agreed == 0) return std::nullopt;
  return agreed - 1;
}

ShelfVault::Version ShelfVault::agree(std::span<const std::int64_t> wanted) {
  std::vector<Has> all = swap_versions();
  const std::vector<int> owners = owners_kept_here();
  StepMessage head;
  head.call = signature(CallKind::recover);
  agree_on_room(
      channel(), "recover: shelves", head, [&] { return make_rooms(owners, head); },
      room("version_bytes"));
  const std::vector<Found> found = swap_lists(owners);
  for (const Found& one : found) {
    if (one.role == Role::lost) all.push_back({one.owner, {true, one.newest}, one.oldest});
  }
  const Version agreed = version_of(all);
  if (across_) {
    send_agreed(found, agreed);
  } else {
    for (const Found& one : found) {
      if (one.role == Role::present && one.owner == channel().rank()) move_to(one.shelf, agreed);
    }
  }
  StepMessage copied;
  copied.call = signature(CallKind::recover);
  channel().swap("recover: copies", copied);
  check_same_call(channel(), "recover: copies", copied.call);
  if (fabric::Lobby* lobby = group_.shared_memory()->fabric->lobby()) lobby->give_back();
  std::vector<Table> tables = across_ ? std::vector<Table>{} : read_tables(found, agreed);
  drop_shelves(owners, agreed);
  epoch_ = 0;  // until this rank has everything
  counts_ = true;
  agreed_ = agreed;
  puts_ = 0;
  group_.go_on_from(agreed == 0 ? 0 : agreed - 1);
  if (across_) tables = swap_tables();
  order_sources(std::move(tables));
  if (across_) fetch(wanted);
  epoch_ = group_.now().epoch();
  return agreed;
}

CallSignature ShelfVault::signature(CallKind kind, std::uint64_t step) const {
  CallSignature call;
  call.kind = kind;
  call.vault = {entry_bytes_, step, {}};
  return call;
}

/// What all have. Throws on all ranks, and nothing is dropped, when one has gone on twice since.
ShelfVault::Version ShelfVault::version_of(const std::vector<Has>& all) {
  std::vector<protocol::Versions> versions;
  for (const Has& one : all) versions.push_back(one.versions);
  const Version agreed = protocol::agreed_version(std::span<const protocol::Versions>(versions));
  const auto lacks = [&](const Has& one) {
    return one.versions.counts && one.versions.newest != agreed && one.oldest != agreed;
  };
  const auto ahead = std::find_if(all.begin(), all.end(), lacks);
  if (ahead == all.end()) return agreed;
  const auto behind = std::find_if(all.begin(), all.end(), [&](const Has& one) {
    return one.versions.counts && one.versions.newest == agreed;
  });
  channel().all_ranks_throw();
  throw Error(ErrorKind::mismatch,
              "recover: rank " + std::to_string(ahead->rank) + " has " + steps_text(*ahead) +
                  ", but the newest of rank " + std::to_string(behind->rank) + " is " +
                  (agreed == 0 ? std::string("none") : "step " + std::to_string(agreed - 1)) +
                  "; expected puts of the same steps on all ranks. Nothing was dropped: put what "
                  "is missing, or load a checkpoint in a new group",
              {channel().rank(), behind->rank, kRecover, channel().generation(), 0, 0});
}

std::string ShelfVault::steps_text(const Has& has) {
  const std::string newest = std::to_string(has.versions.newest - 1);
  if (has.oldest == 0 || has.oldest == has.versions.newest) return "step " + newest;
  return "steps " + std::to_string(has.oldest - 1) + " and " + newest;
}

/// What each rank of the group has; in `ids_` whose process it is.
std::vector<ShelfVault::Has> ShelfVault::swap_versions() {
  StepMessage head;
  head.call = signature(CallKind::recover);
  head.side_segment = counts_ ? 1 : 0;
  head.side_offset = std::max(own_ == nullptr ? 0 : shelf_at(own_).newest(), agreed_);
  head.staging_side_offset = std::max(own_ == nullptr ? 0 : shelf_at(own_).oldest(), agreed_);
  head.staging_offset = id_;
  channel().swap("recover: versions", head);
  check_same_call(channel(), "recover: versions", head.call);
  std::vector<Has> all;
  ids_.assign(static_cast<std::size_t>(channel().size()), 0);
  for (const int peer : channel().ranks()) {
    const StepMessage theirs = channel().head(peer);
    all.push_back(
        {peer, {theirs.side_segment != 0, theirs.side_offset}, theirs.staging_side_offset});
    ids_[static_cast<std::size_t>(peer)] = theirs.staging_offset;
  }
  return all;
}

ShelfVault::Version ShelfVault::newest_of(const Kept& kept) const {
  if (kept.at != 0) return kept.at;
  return std::max(shelf_of(kept).newest(), kept.settled ? agreed_ : 0);
}

ShelfVault::Version ShelfVault::oldest_of(const Kept& kept) const {
  return std::max(shelf_of(kept).oldest(), kept.settled ? agreed_ : 0);
}

ShelfVault::Role ShelfVault::role_of(const Kept& kept, const std::vector<int>& owners) const {
  if (kept.at != 0) return Role::former;
  if (ids_[static_cast<std::size_t>(kept.owner)] != kept.id) {
    return kept.settled || newest_of(kept) != 0 ? Role::lost : Role::over;
  }
  const bool here = std::binary_search(owners.begin(), owners.end(), kept.owner);
  return here ? Role::present : Role::over;
}

ShelfVault::Taken ShelfVault::take(std::size_t bytes, StepMessage& head) {
  head.need_bytes = bytes;
  const auto region = group_.shared_memory()->arena.allocate(bytes);
  if (!region) return {};
  return {*region, lease(group_.shared_memory(), *region)};
}

/// A shelf for each of these owners; across domains one for this rank as well.
bool ShelfVault::make_rooms(const std::vector<int>& owners, StepMessage& head) {
  const auto take_shelf = [&] {
    Taken room = take(Shelf::bytes(entry_bytes_), head);
    if (room.lease) std::memset(room.region.data, 0, Shelf::kLine);
    return room;
  };
  if (across_ && !own_room_.lease) {
    own_room_ = take_shelf();
    if (!own_room_.lease) return false;
    own_ = own_room_.region.data;
  }
  for (const int owner : owners) {
    const auto present = [&](const Kept& kept) {
      return kept.owner == owner && role_of(kept, owners) == Role::present;
    };
    if (std::any_of(kept_.begin(), kept_.end(), present)) continue;
    Taken room = take_shelf();
    if (!room.lease) return false;
    kept_.push_back({owner, ids_[static_cast<std::size_t>(owner)], std::move(room), false, 0});
  }
  return true;
}

/// All shelves of all ranks.
std::vector<ShelfVault::Found> ShelfVault::swap_lists(const std::vector<int>& owners) {
  std::vector<Listed> mine;
  for (const Kept& kept : kept_) {
    const fabric::Address& address = kept.room.region.address;
    mine.push_back({static_cast<std::uint64_t>(kept.owner), role_of(kept, owners), address.segment,
                    address.offset, newest_of(kept), oldest_of(kept), shelf_of(kept).numbers()});
  }
  const auto lists = gather("recover: lists", std::as_bytes(std::span(mine)));
  std::vector<Found> all;
  for (const int keeper : channel().ranks()) {
    const std::vector<std::byte>& list = lists[static_cast<std::size_t>(keeper)];
    for (std::size_t at = 0; at + sizeof(Listed) <= list.size(); at += sizeof(Listed)) {
      Listed one{};
      std::memcpy(&one, list.data() + at, sizeof(one));
      const auto owner = static_cast<int>(one.owner);
      const bool known = one.owner < static_cast<std::uint64_t>(channel().size());
      const auto segment = static_cast<fabric::SegmentId>(one.segment);
      if (!known || one.role > Role::over || segment != one.segment) {
        channel().throw_violation(kRecover, keeper,
                                  "keeps the state of rank " + std::to_string(one.owner));
      }
      if (one.role == Role::over) continue;
      if (one.role == Role::present && (!channel().has(owner) || keeper_of(owner) != keeper)) {
        continue;
      }
      const fabric::Address address{segment, one.offset};
      all.push_back({owner, keeper, one.role, one.newest, one.oldest, one.numbers, address,
                     channel().checked(kRecover, keeper, address, Shelf::bytes(entry_bytes_))});
    }
  }
  return all;
}

/// From now on this rank puts on that shelf, and has there what was agreed on.
void ShelfVault::move_to(std::byte* shelf, Version agreed) {
  const std::byte* whole = own_ == nullptr ? nullptr : shelf_at(own_).find(agreed);
  if (shelf != own_ && whole != nullptr) {
    std::string wrong;
    const auto table = read_table(whole, entry_bytes_, entry_bytes_, agreed, wrong);
    if (!table) channel().throw_violation(kRecover, channel().rank(), wrong);
    std::memcpy(shelf_at(shelf).begin(), whole, version_bytes(*table));
    shelf_at(shelf).publish(agreed);
  }
  own_ = shelf;
  shelf_at(own_).drop_newer(agreed);
}

/// The parts of what was agreed on, read where they lie.
std::vector<ShelfVault::Table> ShelfVault::read_tables(const std::vector<Found>& found,
                                                       Version agreed) {
  std::vector<Table> all;
  for (const Found& one : found) {
    if (one.role == Role::former && one.newest != agreed) continue;
    const std::byte* version = shelf_at(one.shelf).find(agreed);
    if (version == nullptr) continue;
    const bool own = one.owner == channel().rank() && one.role == Role::present;
    all.push_back({own, one.owner, one.keeper, version,
                   table_of(one.owner, one.keeper, version, entry_bytes_, agreed)});
  }
  return all;
}

/// Checked. `readable`: bytes at `version` in this process.
std::vector<VersionPart> ShelfVault::table_of(int owner, int keeper, const std::byte* version,
                                              std::size_t readable, Version agreed) {
  std::string wrong;
  auto table = read_table(version, readable, entry_bytes_, agreed, wrong);
  if (table) return std::move(*table);
  channel().throw_violation(kRecover, keeper,
                            "keeps state of rank " + std::to_string(owner) + " that " + wrong);
}

/// Of several for a key this rank's own comes first, then one that it can read, then the lowest.
void ShelfVault::order_sources(std::vector<Table> tables) {
  sources_.clear();
  const auto place = [](const Table& table) {
    return std::tuple(!table.own, table.version == nullptr, table.owner);
  };
  std::stable_sort(tables.begin(), tables.end(),
                   [&](const Table& a, const Table& b) { return place(a) < place(b); });
  for (Table& table : tables) {
    std::map<std::int64_t, Source> its;
    for (const VersionPart& part : table.parts) {
      const Source none{table.owner, table.keeper, table.version, {}};
      its.try_emplace(part.key, none).first->second.parts.push_back(part);
    }
    sources_.merge(its);  // keys that are there already stay
  }
}

/// Shelves that nobody reads from here on.
void ShelfVault::drop_shelves(const std::vector<int>& owners, Version agreed) {
  for (Kept& kept : kept_) {
    const Role role = role_of(kept, owners);
    if (role == Role::lost && shelf_of(kept).find(agreed) != nullptr) kept.at = agreed;
    if (role == Role::present) kept.settled = true;
  }
  std::erase_if(kept_, [&](const Kept& kept) {
    const Role role = role_of(kept, owners);
    return role == Role::former ? kept.at != agreed : role != Role::present;
  });
}

void ShelfVault::check_recovered(const char* call) const {
  channel().check_usable(call);
  if (epoch_ == group_.now().epoch()) return;
  refuse(call, "vault",
         epoch_ == 0 ? std::string("one that has not recovered")
                     : "one of epoch " + std::to_string(epoch_) + ", in epoch " +
                           std::to_string(group_.now().epoch()) + " of the group",
         "recover on all ranks first");
}

std::vector<std::int64_t> ShelfVault::keys() const {
  std::scoped_lock lock(mutex_);
  check_recovered("keys");
  std::vector<std::int64_t> all;
  for (const auto& [key, source] : sources_) all.push_back(key);
  return all;
}

const ShelfVault::Source& ShelfVault::source_of(std::int64_t key) const {
  if (agreed_ == 0 || group_.now().step() != agreed_ - 1) {
    refuse("get", "vault",
           agreed_ == 0
               ? std::string("one without a version, as recover found none")
               : "one in which step " + std::to_string(agreed_ - 1) +
                     " was recovered, after commit of step " + std::to_string(group_.now().step()),
           "get between recover and commit");
  }
  const auto found = sources_.find(key);
  if (found != sources_.end() && found->second.version != nullptr) return found->second;
  if (found != sources_.end()) {
    refuse("get", "key",
           std::to_string(key) + ", which lies in another domain, with rank " +
               std::to_string(found->second.keeper),
           "one of the keys that this rank has given to recover");
  }
  const GroupView view = group_.now().get();
  refuse("get", "key",
         std::to_string(key) + ", which no rank has put in step " + std::to_string(agreed_ - 1) +
             (view.lost.empty()
                  ? std::string()
                  : ", or one of " + spell_ranks(view.lost) + " that was lost with its keeper"),
         "one of keys(), or a checkpoint");
}

void ShelfVault::check_stream_of(const char* call, const Stream* stream) const {
  if (stream == nullptr) return;
  if (group_.device().kind == DeviceKind::cpu) {
    refuse(call, "stream", "one in a group with backend host",
           "none: its tensors are copied at once");
  }
  check_stream(call, stream, group_.device());
}

void ShelfVault::get(std::int64_t key, std::span<const VaultTarget> into,
                     const Stream* stream) const {
  std::scoped_lock lock(mutex_);
  check_stream_of("get", stream);
  check_recovered("get");
  const Source& source = source_of(key);
  const std::string name = "key " + std::to_string(key);
  if (into.size() != source.parts.size()) {
    refuse("get", name, std::to_string(into.size()) + " tensors",
           std::to_string(source.parts.size()) + ", as rank " + std::to_string(source.owner) +
               " has put");
  }
  for (std::size_t i = 0; i < into.size(); ++i) {
    const std::string tensor = name + ", tensor " + std::to_string(i);
    check_part("get", tensor, into[i].tensor, into[i].type, group_.device());
    const std::string type = type_text(into[i].type, into[i].tensor);
    const VersionPart& part = source.parts[i];
    if (type == type_of(part) && into[i].tensor.bytes() == part.bytes) continue;
    refuse("get", tensor, type + " of " + std::to_string(into[i].tensor.bytes()) + " bytes",
           printable(type_of(part), VersionPart::kTypeBytes) + " of " + std::to_string(part.bytes) +
               " bytes, as rank " + std::to_string(source.owner) + " has put");
  }
  std::vector<DeviceCopy> on_device;
  for (std::size_t i = 0; i < into.size(); ++i) {
    const VersionPart& part = source.parts[i];
    const std::byte* from = source.version + part.offset;
    if (into[i].tensor.device.kind != DeviceKind::cpu) {
      on_device.push_back({into[i].tensor.data, from, part.bytes, false});
    } else {
      protocol::read_bytes(into[i].tensor.data, from, part.bytes);
    }
  }
  if (!on_device.empty()) group_.copy(on_device, stream);
  // Others may have gone on meanwhile, without this rank or after its commit in another thread.
  channel().check_evicted("get");
  check_recovered("get");
  source_of(key);
}

void ShelfVault::put(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream) {
  std::scoped_lock lock(mutex_);
  check_stream_of(kPut, stream);
  if (across_) {
    group_.in_turn(kPut, [&] { put_across(step, parts, stream); });
  } else {
    write_version(step, table_for(step, parts), parts, stream);
  }
  // All ranks have put what they had from lost ones, in the version before this one.
  if (++puts_ == 2) std::erase_if(kept_, [](const Kept& kept) { return kept.at != 0; });
}

/// Throws when this cannot be put now.
std::vector<VersionPart> ShelfVault::table_for(std::uint64_t step,
                                               std::span<const VaultPart> parts) const {
  check_recovered(kPut);
  const Version newest = std::max(shelf_at(own_).newest(), across_ ? agreed_ : 0);
  if (step != group_.now().step() || newest > step) {
    refuse(kPut, "step", std::to_string(step),
           newest > step
               ? "a later one than " + std::to_string(newest - 1) + ", which is there already"
               : std::to_string(group_.now().step()) + ", the newest committed");
  }
  std::vector<std::string> types;
  std::vector<PartOutline> outlines;
  types.reserve(parts.size());
  for (const VaultPart& part : parts) {
    check_part(kPut, "key " + std::to_string(part.key), part.tensor, part.type, group_.device());
    types.push_back(type_text(part.type, part.tensor));
    outlines.push_back({part.key, part.tensor.bytes(), types.back()});
  }
  std::vector<VersionPart> table = lay_out(outlines);
  if (version_bytes(table) > entry_bytes_) {
    throw Error(ErrorKind::exhausted,
                "put: rank " + std::to_string(channel().rank()) + " has " +
                    std::to_string(version_bytes(table)) +
                    " bytes (bytes_of), but version_bytes is " + std::to_string(entry_bytes_) +
                    "; make a new group, whose vault has more",
                {channel().rank(), channel().rank(), kPut, 0, 0, 0});
  }
  return table;
}

/// On this rank's shelf.
void ShelfVault::write_version(std::uint64_t step, const std::vector<VersionPart>& table,
                               std::span<const VaultPart> parts, const Stream* stream) {
  const Shelf shelf = shelf_at(own_);
  std::byte* at = shelf.begin();
  const VersionHead head{step + 1, table.size(), {}};
  protocol::write_bytes(at, &head, sizeof(head));
  protocol::write_bytes(at + sizeof(head), table.data(), table.size() * sizeof(VersionPart));
  std::vector<DeviceCopy> on_device;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const ConstTensorView& tensor = parts[i].tensor;
    if (tensor.device.kind != DeviceKind::cpu) {
      on_device.push_back({at + table[i].offset, tensor.data, table[i].bytes, true});
    } else {
      protocol::write_bytes(at + table[i].offset, tensor.data, table[i].bytes);
    }
  }
  if (!on_device.empty()) group_.copy(on_device, stream);
  shelf.publish(step + 1);
}

}  // namespace ferry::engine
