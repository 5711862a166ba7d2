// Versions of each rank's state in the registered memory of the next rank (ferry/vault.hpp).
#pragma once
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
#include "host/throughput/engine.hpp"
#include "protocol/shelf.hpp"

namespace ferry::host {

class HostVault final : public VaultEngine {
 public:
  /// Of this engine, which owns it: other ranks write to its shelves as long as the group is there.
  HostVault(HostEngine& engine, std::size_t version_bytes);

  /// A new object has it from now on: refuses another size once there are shelves.
  void reopen(std::size_t version_bytes);
  std::optional<std::uint64_t> recover() override;
  std::vector<std::int64_t> keys() const override;
  void get(std::int64_t key, std::span<const VaultTarget> into) const override;
  void put(std::uint64_t step, std::span<const VaultPart> parts) override;

 private:
  using Shelf = protocol::Shelf<>;
  /// The number of a step, plus 1; 0: none.
  using Version = std::uint64_t;

  struct Room {
    Region region{};
    std::shared_ptr<void> lease{};
  };
  /// A shelf in this rank's memory.
  struct Kept {
    int owner = 0;
    std::uint64_t id = 0;  ///< of the owner's process
    Room room{};
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
  };
  /// The same, checked, where it lies in this process.
  struct Found {
    int owner;
    int keeper;
    Role role;
    Version newest;
    Version oldest;
    std::byte* shelf;
  };
  /// The parts of a key in the version that was agreed on.
  struct Source {
    int owner;
    const std::byte* version;
    std::vector<VersionPart> parts;
  };

  Channel& channel() const { return engine_.channel(); }
  Shelf shelf_at(std::byte* base) const { return {base, entry_bytes_}; }
  Shelf shelf_of(const Kept& kept) const { return shelf_at(kept.room.region.data); }
  CallSignature signature() const;
  Version agree();
  Version version_of(const std::vector<Has>& all);
  static std::string steps_text(const Has& has);
  std::vector<Has> swap_versions();
  Version newest_of(const Kept& kept) const;
  Version oldest_of(const Kept& kept) const;
  Role role_of(const Kept& kept, int owner) const;
  bool make_room(int owner, StepMessage& head, Room& list);
  std::vector<Found> read_lists();
  void move_to(std::byte* shelf, Version agreed);
  void read_sources(const std::vector<Found>& found, Version agreed);
  void add_source(const Found& found, Version agreed);
  void drop_shelves(int owner, Version agreed);
  void check_recovered(const char* call) const;
  const Source& source_of(std::int64_t key) const;

  HostEngine& engine_;
  std::size_t entry_bytes_;
  std::uint64_t id_;  // of this process, for its peers
  mutable std::mutex mutex_;
  std::uint64_t epoch_ = 0;  // of the last `recover` of this object; 0: there was none
  bool counts_ = false;      // this rank has recovered, with any object
  Version agreed_ = 0;       // in it
  int puts_ = 0;             // since then
  std::byte* own_ =
      nullptr;  // this rank's shelf, in its keeper's memory, mapped also when that died
  std::vector<Kept> kept_;
  std::vector<std::uint64_t> ids_;  // [R], as told in the last `recover`; 0: a hole
  std::map<std::int64_t, Source> sources_;
};

}  // namespace ferry::host
