// Versions of each rank's state in the registered memory of another rank, its keeper
// (ferry/vault.hpp). In one domain a rank writes them there itself, and all read them there. Across
// domains it has a shelf of its own besides, and its keeper takes a copy of each version.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/engine.hpp"
#include "core/vault/table.hpp"
#include "engine/gather.hpp"
#include "engine/growth.hpp"
#include "engine/vault/vault_group.hpp"
#include "protocol/shelf.hpp"

namespace ferry::engine {

class ShelfVault final : public VaultEngine {
 public:
  /// Of this group, which owns it: other ranks write to its shelves as long as the group is there.
  ShelfVault(VaultGroup& group, std::size_t version_bytes);

  /// A new object has it from now on: refuses another size once there are shelves.
  void reopen(std::size_t version_bytes);
  std::optional<std::uint64_t> recover(std::span<const std::int64_t> wanted) override;
  std::vector<std::int64_t> keys() const override;
  void get(std::int64_t key, std::span<const VaultTarget> into,
           const Stream* stream) const override;
  void put(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream) override;

 private:
  using Shelf = protocol::Shelf<>;
  /// The number of a step, plus 1; 0: none.
  using Version = std::uint64_t;
  using Numbers = std::array<Version, protocol::ShelfTraits::kEntries>;

  struct Taken {
    Region region{};
    std::shared_ptr<void> lease{};
  };
  /// A shelf in this rank's memory.
  struct Kept {
    int owner = 0;
    std::uint64_t id = 0;  ///< of the owner's process
    Taken room{};
    bool settled = false;  ///< it was here at the end of an agreement
    Version at = 0;        ///< 0, or the owner was lost then, and this was agreed on
  };
  enum class Role : std::uint64_t {
    present,  ///< its owner puts here from now on
    lost,     ///< its owner was lost since the last agreement
    former,   ///< its owner was lost before that
    over,     ///< its owner puts elsewhere from now on, or never began
  };
  /// The versions of a rank, lost ones too, that it can go on from.
  struct Has {
    int rank;
    protocol::Versions versions;
    Version oldest;
  };
  /// What a keeper tells of a shelf. It crosses: trivially copyable, without padding.
  struct Listed {
    std::uint64_t owner;
    Role role;
    std::uint64_t segment;
    std::uint64_t offset;
    Version newest;
    Version oldest;
    Numbers numbers;
  };
  /// The same, checked; `shelf`: in this process, null outside the domain.
  struct Found {
    int owner;
    int keeper;
    Role role;
    Version newest;
    Version oldest;
    Numbers numbers;
    fabric::Address address;
    std::byte* shelf;
  };
  /// What a rank has put in the version that was agreed on, and with whom it lies: its keeper, or
  /// across domains itself. `version`: null where this rank cannot read it.
  struct Table {
    bool own;
    int owner;
    int keeper;
    const std::byte* version;
    std::vector<VersionPart> parts;
  };
  /// The parts of a key in it.
  struct Source {
    int owner;
    int keeper;
    const std::byte* version;
    std::vector<VersionPart> parts;
  };
  /// A rank of another domain that takes copies of this rank's versions, onto that shelf.
  struct Mirror {
    int keeper = -1;
    fabric::Address shelf{};
    Numbers numbers{};  ///< of the entries there
  };
  /// A rank wants the parts of a key that an owner has put, at that offset of what it granted. It
  /// crosses, as do the next.
  struct Wanted {
    std::uint64_t keeper;
    std::uint64_t owner;
    std::int64_t key;
    std::uint64_t offset;
  };
  /// A version, before its head and its table.
  struct Served {
    std::uint64_t owner;
    std::uint64_t segment;
    std::uint64_t offset;
    std::uint64_t bytes;  ///< of head and table
  };

  Channel& channel() const { return group_.channel(); }
  Shelf shelf_at(std::byte* base) const { return {base, entry_bytes_}; }
  Shelf shelf_of(const Kept& kept) const { return shelf_at(kept.room.region.data); }
  CallSignature signature(CallKind kind, std::uint64_t step = 0) const;
  int keeper_of(int owner) const;
  std::vector<int> owners_kept_here() const;
  Version agree(std::span<const std::int64_t> wanted);
  Version version_of(const std::vector<Has>& all);
  static std::string steps_text(const Has& has);
  std::vector<Has> swap_versions();
  Version newest_of(const Kept& kept) const;
  Version oldest_of(const Kept& kept) const;
  Role role_of(const Kept& kept, const std::vector<int>& owners) const;
  Taken take(std::size_t bytes, StepMessage& head);
  Room room(const char* sized_by) {
    return {*group_.shared_memory(), sized_by, [this] { group_.free_held(); }};
  }
  bool make_rooms(const std::vector<int>& owners, StepMessage& head);
  std::vector<std::vector<std::byte>> gather(const char* stage, std::span<const std::byte> mine) {
    return engine::gather(channel(), stage, signature(CallKind::recover), mine);
  }
  std::vector<Found> swap_lists(const std::vector<int>& owners);
  void move_to(std::byte* shelf, Version agreed);
  std::vector<Table> read_tables(const std::vector<Found>& found, Version agreed);
  std::vector<VersionPart> table_of(int owner, int keeper, const std::byte* version,
                                    std::size_t readable, Version agreed);
  void order_sources(std::vector<Table> tables);
  void drop_shelves(const std::vector<int>& owners, Version agreed);
  std::vector<VersionPart> table_for(std::uint64_t step, std::span<const VaultPart> parts) const;
  void write_version(std::uint64_t step, const std::vector<VersionPart>& table,
                     std::span<const VaultPart> parts, const Stream* stream);

  // Across domains (vault_domains.cpp).

  void put_across(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream);
  void send_agreed(const std::vector<Found>& found, Version agreed);
  void send_version(Version version, std::size_t bytes);
  void take_version(const char* stage, const std::vector<Kept*>& from, Version version);
  std::vector<std::byte> tables_here();
  std::vector<Table> swap_tables();
  std::vector<Wanted> missing(std::span<const std::int64_t> wanted, std::size_t& bytes) const;
  void fetch(std::span<const std::int64_t> wanted);
  void send_wanted(int to, std::span<const std::byte> list);
  std::uint64_t send_parts(int to, const Wanted& wanted);
  void check_recovered(const char* call) const;
  const Source& source_of(std::int64_t key) const;
  void check_stream_of(const char* call, const Stream* stream) const;

  VaultGroup& group_;
  std::size_t entry_bytes_;
  bool across_;       // domains
  std::uint64_t id_;  // of this process, for its peers
  mutable std::mutex mutex_;
  std::uint64_t epoch_ = 0;  // of the last `recover` of this object; 0: there was none
  bool counts_ = false;      // this rank has recovered, with any object
  Version agreed_ = 0;       // in it
  int puts_ = 0;             // since then
  // This rank's shelf: in its keeper's memory, mapped also when that died; across domains in its
  // own.
  std::byte* own_ = nullptr;
  Taken own_room_{};           // across domains
  Mirror mirror_{};            // then
  std::vector<Table> here_{};  // then: what others may want
  Taken fetched_{};            // then: what was wanted from other domains
  std::vector<Kept> kept_;
  std::vector<std::uint64_t> ids_;  // [R], as told in the last `recover`; 0: a hole
  std::map<std::int64_t, Source> sources_;
};

/// The vault of one group, whether a program has it open or not.
class GroupVault {
 public:
  /// Makes the vault, or takes up the one that is there. What it returns keeps the engine alive.
  std::shared_ptr<VaultEngine> open(VaultGroup& group, std::size_t version_bytes);

 private:
  std::unique_ptr<ShelfVault> vault_{};
  std::weak_ptr<VaultEngine> open_{};
};

}  // namespace ferry::engine
