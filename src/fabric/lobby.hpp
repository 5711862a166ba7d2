// Where processes that want the places of lost ranks find the group, and it finds them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ferry::fabric {

/// A process that shows itself: a rank of the group, or one that waits for a place.
struct Visitor {
  int rank = -1;             ///< whose place it has or wants
  std::uint64_t ticket = 0;  ///< 0: the group was made with it; otherwise no other has the same
  std::int64_t pid = 0;      ///< for messages
  std::string text{};        ///< what it was given, where all must be given the same
  std::vector<std::byte> invitation{};  ///< what a process that joins needs to know
  std::vector<std::byte> card{};        ///< of one that joins: for ranks of other domains
  bool begun = false;                   ///< its group was begun by one process alone
  std::byte* control = nullptr;         ///< its segment 0, mapped here
};

/// Tickets are numbers that no epoch is.
inline constexpr std::uint64_t kTicketBit = std::uint64_t{1} << 63;

/// A process of another domain, and how it is reached.
struct Elsewhere {
  int rank = -1;
  std::vector<std::byte> card{};
};

/// By what processes find a group. Together they name it; messages show `text` alone.
struct LobbyName {
  LobbyName(std::string shown = {}, std::string hidden = {})
      : text(std::move(shown)), key(std::move(hidden)) {}
  std::string text;
  std::string key;
};

/// Of one thread at a time, like registering and attaching.
class Lobby {
 public:
  virtual ~Lobby() = default;
  /// Whether `open` was called.
  virtual bool is_open() const = 0;
  struct Opening {
    LobbyName name{};
    std::string text{};
    std::uint64_t ticket = 0;
    std::vector<std::byte> invitation{};
    bool begun = false;
  };
  /// This rank shows itself under a name; called before it registers memory. Throws Error(refused)
  /// where another group has that name and one of both was begun alone, so that processes that join
  /// would find two.
  virtual void open(const Opening& opening) = 0;
  /// What this rank was opened with.
  virtual const Opening& opening() const = 0;
  /// What only ranks of this group know.
  virtual std::array<std::uint64_t, 2> group() const = 0;
  /// Shows this rank's card (fabric.hpp): to ranks of this domain, which send on that of a process
  /// that joins, and to processes of other domains on this host.
  virtual void show(std::span<const std::byte> card) = 0;
  /// Whether the seat is of those that meet here: of this rank's domain.
  virtual bool has(int /*rank*/) const { return true; }
  /// Nobody finds this rank any more. From any thread.
  virtual void close() noexcept = 0;
  /// All others that run now. Throws Error(system) where one cannot be looked at.
  virtual std::vector<Visitor> visitors() = 0;
  /// Those of other domains that show themselves on this host.
  virtual std::vector<Elsewhere> elsewhere() { return {}; }
  /// From now on `rank` is that process, with all that it has registered. One that has ended: as
  /// `vacate`. Throws Error(system) where its memory cannot be mapped.
  virtual void seat(int rank, std::uint64_t ticket) = 0;
  /// Whether a process still runs whose seat another has taken, but for those of which `at_rest`
  /// holds, by their segment 0. From any thread.
  using AtRest = std::function<bool(std::byte* control)>;
  virtual bool former_runs(const AtRest& /*at_rest*/) { return false; }
  /// `rank` is a process that has ended: its memory is zeros.
  virtual void vacate(int rank) = 0;
  /// From now on the memory of processes whose places others take stays until `give_back`, as this
  /// rank has something there.
  virtual void keep_former() {}
  /// No rank needs it any more: it is given back, for all of them.
  virtual void give_back() {}
};

}  // namespace ferry::fabric
