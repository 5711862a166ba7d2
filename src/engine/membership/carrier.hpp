// What ranks tell each other of the membership where they cannot read each other's memory: texts
// over the network between domains.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "engine/membership/seating.hpp"
#include "fabric/fabric.hpp"

namespace ferry::engine {

/// Takes texts from the network's threads and rings this rank's bell; a Regroup reads them. It
/// exists as long as the group, for peers may speak before this rank calls regroup.
class Carrier {
 public:
  using Said = Member::Said;

  /// Null where all ranks read each other's memory, or no fabric carries texts.
  static std::shared_ptr<Carrier> make(fabric::Fabric& fabric, const Domains& domains,
                                       std::byte* control, const ControlLayout& layout);

  /// Whether the rank is of another domain.
  bool far(int peer) const { return !domains_.together(rank_, peer); }
  const Domains& domains() const { return domains_; }

  // To far ranks; never block.

  void say(int peer, const Said& said);
  /// A process of this domain waits for a seat: what it says, and how it is reached; or this rank
  /// does, without a card. `epoch`: in which it may be taken in.
  void tell_waits(int peer, protocol::Epoch epoch, int seat, const Said& said,
                  std::span<const std::byte> card);
  /// To a process with that ticket, which has a seat from now on: how this rank's memory is reached
  /// now. It may have grown since it answered that process.
  void tell_memory(int peer, std::uint64_t ticket, std::span<const std::byte> card);
  /// Of a rank of this domain that has ended: what it said last.
  void tell_last(int peer, int seat, const Said& said);
  /// This rank has left, and says nothing more: the same of itself, to all far ranks.
  void leave();
  /// The others went on without it.
  void evict(int peer, protocol::Epoch epoch);

  /// What a far rank said, unless `seen` counts it; then `seen` does.
  std::optional<Said> heard(int peer, std::uint64_t& seen);
  /// What a far rank said last, which has ended.
  std::optional<Said> last(int seat);
  /// A process that waits for a far seat, as a rank of its domain says.
  struct Waiting {
    protocol::Epoch epoch = 0;
    Said said{};
    std::vector<std::byte> card{};
  };
  std::optional<Waiting> waiting(int seat);
  /// The same, as it says itself.
  std::optional<Waiting> asks(int seat);

  /// What a far rank told of its memory, to the process with this ticket.
  std::optional<std::vector<std::byte>> memory(int peer, std::uint64_t ticket);

  /// From now on the seat is the process with this ticket: nothing counts that another one said.
  void seat(int seat, std::uint64_t ticket);

 private:
  enum class Kind : std::uint64_t { statement = 1, last = 2, evicted = 3, waits = 4, memory = 5 };
  struct Text {
    Kind kind{};
    std::uint64_t seat = 0;
    std::uint64_t about =
        0;  // last: the ticket of who had the seat; waits: the epoch; memory: whose
    Said said{};
  };
  struct Seat {
    std::uint64_t count = 0;  // statements that were newer than the one before
    Said newest{};
    std::optional<Said> last{};
    std::uint64_t ticket = 0;  // of the process that has the seat
    std::optional<Waiting> waiting{};
    std::optional<Waiting> asks{};
    std::uint64_t memory_for = 0;  // a ticket
    std::vector<std::byte> memory{};
  };

  Carrier(fabric::Fabric& fabric, const Domains& domains, std::byte* control,
          const ControlLayout& layout);
  void send(int peer, const Text& text, std::span<const std::byte> card = {});
  void take(Seat& seat, const Text& text, std::span<const std::byte> card);
  void take(int peer, std::span<const std::byte> bytes);
  bool sound(int peer, const Text& text) const;

  fabric::Fabric& fabric_;
  Domains domains_;
  std::byte* control_;  // of this rank
  ControlLayout layout_;
  int rank_;
  std::mutex mutex_;
  std::vector<Seat> seats_;
};

}  // namespace ferry::engine
