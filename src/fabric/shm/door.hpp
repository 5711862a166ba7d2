// A door: a small object in /dev/shm by which processes that come later find a rank and its memory.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fabric/lobby.hpp"
#include "fabric/memory.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/segment_table.hpp"
#include "fabric/shm/object.hpp"
#include "platform/process.hpp"

namespace ferry::fabric {

/// What lies in it; zeroed at first, written by its owner alone.
struct DoorPage {
  static constexpr std::uint64_t kMagic = 0x3252'4f4f'4459'5246;
  static constexpr std::size_t kTextBytes = 4096;
  static constexpr std::size_t kCardBytes = 8192;
  struct Bytes {
    std::uint64_t count;  ///< set last
    std::array<std::byte, kCardBytes> data;
  };
  struct Segment {
    std::int64_t descriptor;  ///< of the owner
    std::uint64_t bytes;
    std::uint64_t inode;
  };

  std::uint64_t magic;  ///< set last
  std::uint64_t closed;
  ProcessName owner;
  JobKey key;  ///< of the group
  std::uint64_t ticket;
  std::uint64_t begun;  ///< 1: by one process alone
  std::uint64_t text_bytes;
  std::array<char, kTextBytes> text;
  Bytes invitation;        ///< written before `magic`
  Bytes card;              ///< lobby.hpp
  std::uint64_t segments;  ///< registered; each is written before it counts
  std::array<Segment, kMaxSegments> segment;
};

/// The names of a group's doors follow from this.
JobKey door_key(const LobbyName& lobby);

/// This rank's own.
class OwnDoor {
 public:
  struct What {
    JobKey door{};  ///< `door_key`
    JobKey group{};
    int rank = 0;
    std::uint64_t ticket = 0;
    bool begun = false;
    std::span<const std::byte> invitation{};
  };
  /// Throws what `create_object` does, and Error(invalid_argument) for a text that is too long.
  OwnDoor(const What& what, const std::string& text);
  ~OwnDoor() { close(); }
  OwnDoor(const OwnDoor&) = delete;
  OwnDoor& operator=(const OwnDoor&) = delete;

  /// Keeps the descriptor, so that later processes can open it.
  void add(SegmentId id, std::size_t bytes, SharedObject& object);
  void show(std::span<const std::byte> card);
  void close() noexcept;

 private:
  void write(DoorPage::Bytes& to, std::span<const std::byte> bytes) const;
  DoorPage& page() const { return *reinterpret_cast<DoorPage*>(object_.memory->data()); }

  std::string name_;
  SharedObject object_;
  std::vector<UniqueDescriptor> kept_;
  std::int64_t owner_pid_;
  int rank_;
};

/// Another process's, as this one sees it.
class Door {
 public:
  Door(int self, int rank, const DoorPage& page, std::shared_ptr<Memory> memory)
      : self_(self), rank_(rank), page_(page), memory_(std::move(memory)), watch_(page.owner) {}

  int rank() const { return rank_; }
  const DoorPage& page() const { return page_; }
  std::string text() const;
  std::vector<std::byte> invitation() const;
  std::vector<std::byte> card() const;
  /// Its process runs, and has not closed it.
  bool open();
  bool closed() const;
  bool ended() { return watch_.state() == PeerState::dead; }
  /// Whether a failure to look at its memory is because it has ended, or is about to.
  bool ends_soon();
  SegmentId segments() const;
  /// Throws Error(system).
  std::shared_ptr<Memory> map(SegmentId id) const;
  /// Segment 0, mapped once.
  const std::shared_ptr<Memory>& control();

 private:
  int self_;
  int rank_;
  const DoorPage& page_;
  std::shared_ptr<Memory> memory_;
  ProcessWatch watch_;
  std::shared_ptr<Memory> control_{};
};

/// All doors of a lobby that lead to a process, by the names of their objects. What other users put
/// there is left out. Throws Error(system) where one cannot be looked at.
class Doors {
 public:
  Doors(const JobKey& key, int self, int ranks);
  /// Those that are open now, `self` left out.
  std::vector<std::shared_ptr<Door>> list();

 private:
  std::shared_ptr<Door> open(const std::string& name, int rank) const;

  JobKey key_;
  int self_;
  int ranks_;
  std::vector<std::pair<std::string, std::shared_ptr<Door>>> known_;
};

}  // namespace ferry::fabric
