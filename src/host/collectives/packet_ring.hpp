// The slots and flags of packets (protocol/packets.hpp) in registered memory, and their heads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/layout.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/packets.hpp"

namespace ferry::host {

/// What a packet is.
enum class PacketKind : std::uint32_t {
  message = 1,  ///< a send, with all its bytes if they fit, else with none
  accept,       ///< a receive for it is there
  refuse,       ///< that one expects `bytes` bytes
  data,         ///< the next bytes of a message that was accepted without them
};

/// Trivially copyable: it crosses.
struct PacketHead {
  PacketKind kind = PacketKind::message;
  std::int32_t tag = 0;       ///< of a message
  std::uint64_t message = 0;  ///< its number: how many its sender has sent to its receiver
  std::uint64_t bytes = 0;    ///< of the whole message
  std::uint64_t carried = 0;  ///< bytes that follow
};

/// In the memory of each rank, at the same place on all.
struct PacketLayout {
  std::size_t posted = 0;   ///< [R] lines
  std::size_t taken = 0;    ///< [R] lines
  std::size_t bell = 0;     ///< one line: raised by ranks of the domain that have news
  std::size_t slots = 0;    ///< [R, kSlots, slot_bytes]
  std::size_t carried = 0;  ///< bytes behind a head, at most
  std::size_t bytes = 0;

  static PacketLayout of(int ranks);
  std::size_t slot_bytes() const { return kLineBytes + carried; }
};

class PacketRing {
 public:
  /// `base`: where the layout begins.
  PacketRing(HostEngine& engine, const engine::Region& base);

  std::size_t most_carried() const { return layout_.carried; }

  bool may_write(int peer) const { return packets_.may_write(peer, sent_[index(peer)] + 1); }
  /// May block for a network that takes nothing, and throw then.
  void write(int peer, PacketHead head, const std::byte* data);

  /// The next packet of a peer, or nothing; its data stay until `take`.
  struct Packet {
    PacketHead head;
    const std::byte* data;
  };
  std::optional<Packet> next(int peer) const;
  void take(int peer);
  /// Tells the peer what was taken; wakes it if it is in the domain and has news.
  void settle(int peer);

  /// Grows when a rank of the domain, or `wake`, has news. Loaded before looking for them, it tells
  /// a later `sleep` whether there were any since.
  std::uint64_t bell() const;
  void wake() const;
  void sleep(std::uint64_t seen, std::chrono::nanoseconds longest) const;

 private:
  std::byte* own(std::size_t offset) const { return base_.data + offset; }
  protocol::FlagLayout flags(std::size_t offset) const;
  std::size_t slot(int writer, std::uint64_t number) const;
  static protocol::Flag bell_at(std::byte* line);
  static void ring(protocol::Flag bell);

  HostEngine& engine_;
  engine::Region base_;
  PacketLayout layout_;
  protocol::Packets<> packets_;
  std::vector<std::uint64_t> sent_;   // [R]
  std::vector<std::uint64_t> taken_;  // [R]
  std::vector<std::uint64_t> told_;   // [R], of what was taken
  std::vector<bool> news_;            // [R]: written since the last `settle`
};

}  // namespace ferry::host
