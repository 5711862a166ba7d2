#include "host/throughput/vault.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "core/check.hpp"
#include "ferry/dtype.hpp"

namespace ferry::host {
namespace {

constexpr const char* kRecover = "recover";
constexpr std::uint64_t kMostShelves = 4096;  // that a rank may list

/// The neighbour of `rank` in this ascending list, `by` places on.
int neighbour(const std::vector<int>& ranks, int rank, std::size_t by) {
  const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return ranks[(static_cast<std::size_t>(at) + by) % ranks.size()];
}
int keeper_of(const std::vector<int>& ranks, int rank) {
  return neighbour(ranks, rank, 1);
}
int owner_kept_by(const std::vector<int>& ranks, int rank) {
  return neighbour(ranks, rank, ranks.size() - 1);
}

std::string type_text(const std::string& given, const ConstTensorView& tensor) {
  return given.empty() ? std::string(name_of(tensor.dtype)) + to_string(tensor.shape) : given;
}

void check_part(const char* call, const std::string& name, const ConstTensorView& tensor,
                const std::string& type) {
  check_tensor(call, name, tensor, tensor.dims());
  if (type.size() < VersionPart::kTypeBytes && type.find('\0') == std::string::npos) return;
  refuse(call, name + ".type", std::to_string(type.size()) + " characters",
         "at most " + std::to_string(VersionPart::kTypeBytes - 1) + ", none of them 0");
}

std::size_t entry_bytes_of(std::size_t version_bytes) {
  return round_up(std::max(version_bytes, sizeof(VersionHead)), 64);
}

}  // namespace

HostVault::HostVault(HostEngine& engine, std::size_t version_bytes)
    : engine_(engine), entry_bytes_(entry_bytes_of(version_bytes)) {
  std::random_device random;
  id_ = (std::uint64_t{random()} << 32 | random()) | 1;
}

std::shared_ptr<VaultEngine> open_host_vault(std::shared_ptr<HostVault>& vault, HostEngine& engine,
                                             std::size_t version_bytes) {
  if (!vault) {
    vault = std::make_shared<HostVault>(engine, version_bytes);
  } else {
    vault->reopen(version_bytes);
  }
  // The deleter lives as long as the engine's weak pointer, so it lets go of the engine.
  return {vault.get(), [kept = engine.shared_from_this()](VaultEngine*) mutable { kept.reset(); }};
}

void HostVault::reopen(std::size_t version_bytes) {
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

std::optional<std::uint64_t> HostVault::recover() {
  std::scoped_lock lock(mutex_);
  Version agreed = 0;
  engine_.enter(kRecover, nullptr, [&] { agreed = agree(); });
  if (agreed == 0) return std::nullopt;
  return agreed - 1;
}

HostVault::Version HostVault::agree() {
  const std::vector<int>& ranks = channel().ranks();
  const int owner = owner_kept_by(ranks, channel().rank());
  std::vector<Has> all = swap_versions();
  StepMessage head;
  head.call = signature();
  Room list{};
  engine_.agree(
      "recover: shelves", head, [&] { return make_room(owner, head, list); }, "version_bytes");
  const std::vector<Found> found = read_lists();
  for (const Found& one : found) {
    if (one.role == Role::lost) all.push_back({one.owner, {true, one.newest}, one.oldest});
  }
  const Version agreed = version_of(all);
  for (const Found& one : found) {
    if (one.role == Role::present && one.owner == channel().rank()) move_to(one.shelf, agreed);
  }
  StepMessage copied;
  copied.call = signature();
  channel().swap("recover: copies", copied);
  engine::check_same_call(channel(), "recover: copies", copied.call);
  read_sources(found, agreed);
  drop_shelves(owner, agreed);
  epoch_ = engine_.epoch();
  counts_ = true;
  agreed_ = agreed;
  puts_ = 0;
  engine_.go_on_from(agreed == 0 ? 0 : agreed - 1);
  return agreed;
}

CallSignature HostVault::signature() const {
  CallSignature call;
  call.kind = CallKind::recover;
  call.vault = {entry_bytes_, {}};
  return call;
}

/// What all have. Throws on all ranks, and nothing is dropped, when one has gone on twice since.
HostVault::Version HostVault::version_of(const std::vector<Has>& all) {
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
  engine_.all_ranks_throw();
  throw Error(ErrorKind::mismatch,
              "recover: rank " + std::to_string(ahead->rank) + " has " + steps_text(*ahead) +
                  ", but the newest of rank " + std::to_string(behind->rank) + " is " +
                  (agreed == 0 ? std::string("none") : "step " + std::to_string(agreed - 1)) +
                  "; expected puts of the same steps on all ranks. Nothing was dropped: put what "
                  "is missing, or load a checkpoint in a new group",
              {channel().rank(), behind->rank, kRecover, channel().generation(), 0, 0});
}

std::string HostVault::steps_text(const Has& has) {
  const std::string newest = std::to_string(has.versions.newest - 1);
  if (has.oldest == 0 || has.oldest == has.versions.newest) return "step " + newest;
  return "steps " + std::to_string(has.oldest - 1) + " and " + newest;
}

/// What each rank of the group has; in `ids_` whose process it is.
std::vector<HostVault::Has> HostVault::swap_versions() {
  StepMessage head;
  head.call = signature();
  head.side_segment = counts_ ? 1 : 0;
  head.side_offset = std::max(own_ == nullptr ? 0 : shelf_at(own_).newest(), agreed_);
  head.staging_side_offset = std::max(own_ == nullptr ? 0 : shelf_at(own_).oldest(), agreed_);
  head.staging_offset = id_;
  channel().swap("recover: versions", head);
  engine::check_same_call(channel(), "recover: versions", head.call);
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

HostVault::Version HostVault::newest_of(const Kept& kept) const {
  if (kept.at != 0) return kept.at;
  return std::max(shelf_of(kept).newest(), kept.settled ? agreed_ : 0);
}

HostVault::Version HostVault::oldest_of(const Kept& kept) const {
  return std::max(shelf_of(kept).oldest(), kept.settled ? agreed_ : 0);
}

HostVault::Role HostVault::role_of(const Kept& kept, int owner) const {
  if (kept.at != 0) return Role::former;
  if (ids_[static_cast<std::size_t>(kept.owner)] != kept.id) {
    return kept.settled || newest_of(kept) != 0 ? Role::lost : Role::over;
  }
  return kept.owner == owner ? Role::present : Role::over;
}

/// A shelf for `owner`, and the list of all that are here.
bool HostVault::make_room(int owner, StepMessage& head, Room& list) {
  const auto take = [&](std::size_t bytes) {
    head.need_bytes = bytes;
    const auto region = engine_.shared_memory()->arena.allocate(bytes);
    if (!region) return Room{};
    return Room{*region, lease(engine_.shared_memory(), *region)};
  };
  const auto present = [&](const Kept& kept) { return role_of(kept, owner) == Role::present; };
  if (std::none_of(kept_.begin(), kept_.end(), present)) {
    Room room = take(Shelf::bytes(entry_bytes_));
    if (!room.lease) return false;
    std::memset(room.region.data, 0, Shelf::kLine);
    kept_.push_back({owner, ids_[static_cast<std::size_t>(owner)], std::move(room), false, 0});
  }
  list = take(kept_.size() * sizeof(Listed));
  if (!list.lease) return false;
  auto* at = reinterpret_cast<Listed*>(list.region.data);
  for (const Kept& kept : kept_) {
    const fabric::Address& address = kept.room.region.address;
    *at++ = {static_cast<std::uint64_t>(kept.owner),
             role_of(kept, owner),
             address.segment,
             address.offset,
             newest_of(kept),
             oldest_of(kept)};
  }
  head.segment = list.region.address.segment;
  head.offset = list.region.address.offset;
  head.rows = static_cast<std::int64_t>(kept_.size());
  return true;
}

/// All shelves of all ranks, as their lists say after the last swap.
std::vector<HostVault::Found> HostVault::read_lists() {
  std::vector<Found> all;
  for (const int keeper : channel().ranks()) {
    const StepMessage theirs = channel().head(keeper);
    const auto count = static_cast<std::uint64_t>(theirs.rows);
    if (count > kMostShelves) {
      channel().throw_violation(kRecover, keeper, "keeps " + std::to_string(count) + " shelves");
    }
    const std::byte* list = channel().checked(kRecover, keeper, {theirs.segment, theirs.offset},
                                              count * sizeof(Listed));
    for (std::uint64_t i = 0; i < count; ++i) {
      Listed one{};
      std::memcpy(&one, list + i * sizeof(Listed), sizeof(one));
      const auto owner = static_cast<int>(one.owner);
      const bool known = one.owner < static_cast<std::uint64_t>(channel().size());
      const auto segment = static_cast<fabric::SegmentId>(one.segment);
      if (!known || one.role > Role::over || segment != one.segment) {
        channel().throw_violation(kRecover, keeper,
                                  "keeps the state of rank " + std::to_string(one.owner));
      }
      if (one.role == Role::over) continue;
      if (one.role == Role::present && keeper_of(channel().ranks(), owner) != keeper) continue;
      all.push_back(
          {owner, keeper, one.role, one.newest, one.oldest,
           channel().checked(kRecover, keeper, {segment, one.offset}, Shelf::bytes(entry_bytes_))});
    }
  }
  return all;
}

/// From now on this rank puts on that shelf, and has there what was agreed on.
void HostVault::move_to(std::byte* shelf, Version agreed) {
  const std::byte* whole = own_ == nullptr ? nullptr : shelf_at(own_).find(agreed);
  if (shelf != own_ && whole != nullptr) {
    std::string wrong;
    const auto table = read_table(whole, entry_bytes_, agreed, wrong);
    if (!table) channel().throw_violation(kRecover, channel().rank(), wrong);
    std::memcpy(shelf_at(shelf).begin(), whole, version_bytes(*table));
    shelf_at(shelf).publish(agreed);
  }
  own_ = shelf;
  shelf_at(own_).drop_newer(agreed);
}

void HostVault::read_sources(const std::vector<Found>& found, Version agreed) {
  sources_.clear();
  std::vector<const Found*> order;
  for (const Found& one : found) {
    if (one.role != Role::former || one.newest == agreed) order.push_back(&one);
  }
  const auto rank = [&](const Found* one) {  // this rank's own first
    const bool mine = one->owner == channel().rank() && one->role == Role::present;
    return std::pair(!mine, one->owner);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](const Found* a, const Found* b) { return rank(a) < rank(b); });
  for (const Found* one : order) add_source(*one, agreed);
}

void HostVault::add_source(const Found& found, Version agreed) {
  const std::byte* version = shelf_at(found.shelf).find(agreed);
  if (version == nullptr) return;
  std::string wrong;
  const auto table = read_table(version, entry_bytes_, agreed, wrong);
  if (!table) {
    channel().throw_violation(
        kRecover, found.keeper,
        "keeps state of rank " + std::to_string(found.owner) + " that " + wrong);
  }
  std::map<std::int64_t, Source> mine;
  for (const VersionPart& part : *table) {
    Source& source = mine.try_emplace(part.key, Source{found.owner, version, {}}).first->second;
    source.parts.push_back(part);
  }
  sources_.merge(mine);  // keys that are there already stay
}

/// Shelves that nobody reads from here on.
void HostVault::drop_shelves(int owner, Version agreed) {
  for (Kept& kept : kept_) {
    const Role role = role_of(kept, owner);
    if (role == Role::lost && shelf_of(kept).find(agreed) != nullptr) kept.at = agreed;
    if (role == Role::present) kept.settled = true;
  }
  std::erase_if(kept_, [&](const Kept& kept) {
    const Role role = role_of(kept, owner);
    return role == Role::former ? kept.at != agreed : role != Role::present;
  });
}

void HostVault::check_recovered(const char* call) const {
  channel().check_usable(call);
  if (epoch_ == engine_.epoch()) return;
  refuse(call, "vault",
         epoch_ == 0 ? std::string("one that has not recovered")
                     : "one of epoch " + std::to_string(epoch_) + ", in epoch " +
                           std::to_string(engine_.epoch()) + " of the group",
         "recover on all ranks first");
}

std::vector<std::int64_t> HostVault::keys() const {
  std::scoped_lock lock(mutex_);
  check_recovered("keys");
  std::vector<std::int64_t> all;
  for (const auto& [key, source] : sources_) all.push_back(key);
  return all;
}

const HostVault::Source& HostVault::source_of(std::int64_t key) const {
  if (agreed_ == 0 || engine_.step() != agreed_ - 1) {
    refuse("get", "vault",
           agreed_ == 0
               ? std::string("one without a version")
               : "one in which step " + std::to_string(agreed_ - 1) +
                     " was recovered, after commit of step " + std::to_string(engine_.step()),
           "get between recover and commit");
  }
  const auto found = sources_.find(key);
  if (found != sources_.end()) return found->second;
  const GroupView view = engine_.group_view();
  refuse("get", "key",
         std::to_string(key) + ", which no rank has put in step " + std::to_string(agreed_ - 1) +
             (view.lost.empty()
                  ? std::string()
                  : ", or one of " + spell_ranks(view.lost) + " that was lost with its keeper"),
         "one of keys(), or a checkpoint");
}

void HostVault::get(std::int64_t key, std::span<const VaultTarget> into) const {
  std::scoped_lock lock(mutex_);
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
    check_part("get", tensor, into[i].tensor, into[i].type);
    const std::string type = type_text(into[i].type, into[i].tensor);
    const VersionPart& part = source.parts[i];
    if (type == type_of(part) && into[i].tensor.bytes() == part.bytes) continue;
    refuse("get", tensor, type + " of " + std::to_string(into[i].tensor.bytes()) + " bytes",
           printable(type_of(part), VersionPart::kTypeBytes) + " of " + std::to_string(part.bytes) +
               " bytes, as rank " + std::to_string(source.owner) + " has put");
  }
  for (std::size_t i = 0; i < into.size(); ++i) {
    const VersionPart& part = source.parts[i];
    protocol::read_bytes(into[i].tensor.data, source.version + part.offset, part.bytes);
  }
  // Others may have gone on meanwhile, without this rank or after its commit in another thread.
  channel().check_evicted("get");
  check_recovered("get");
  source_of(key);
}

void HostVault::put(std::uint64_t step, std::span<const VaultPart> parts) {
  std::scoped_lock lock(mutex_);
  check_recovered("put");
  const Shelf shelf = shelf_at(own_);
  if (step != engine_.step() || shelf.newest() > step) {
    refuse("put", "step", std::to_string(step),
           shelf.newest() > step ? "a later one than " + std::to_string(shelf.newest() - 1) +
                                       ", which is there already"
                                 : std::to_string(engine_.step()) + ", the newest committed");
  }
  std::vector<std::string> types;
  std::vector<PartOutline> outlines;
  types.reserve(parts.size());
  for (const VaultPart& part : parts) {
    check_part("put", "key " + std::to_string(part.key), part.tensor, part.type);
    types.push_back(type_text(part.type, part.tensor));
    outlines.push_back({part.key, part.tensor.bytes(), types.back()});
  }
  const std::vector<VersionPart> table = lay_out(outlines);
  if (version_bytes(table) > entry_bytes_) {
    throw Error(ErrorKind::exhausted,
                "put: rank " + std::to_string(engine_.rank()) + " has " +
                    std::to_string(version_bytes(table)) +
                    " bytes (bytes_of), but version_bytes is " + std::to_string(entry_bytes_) +
                    "; make a new group, whose vault has more",
                {engine_.rank(), engine_.rank(), "put", 0, 0, 0});
  }
  std::byte* at = shelf.begin();
  const VersionHead head{step + 1, table.size(), {}};
  protocol::write_bytes(at, &head, sizeof(head));
  protocol::write_bytes(at + sizeof(head), table.data(), table.size() * sizeof(VersionPart));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    protocol::write_bytes(at + table[i].offset, parts[i].tensor.data, table[i].bytes);
  }
  shelf.publish(step + 1);
  // All ranks have put what they had from lost ones, in the version before this one.
  if (++puts_ == 2) std::erase_if(kept_, [](const Kept& kept) { return kept.at != 0; });
}

}  // namespace ferry::host
