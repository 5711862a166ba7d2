// What arrives at a rank, by whichever NIC: pieces are counted together, and then raise flags.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/lobby.hpp"
#include "fabric/ofi/message.hpp"
#include "protocol/counted_signal.hpp"
#include "protocol/reach.hpp"

namespace ferry::fabric::ofi {

/// For the endpoints of one endpoint set. Thread-safe; calls nothing that takes a lock.
class Arrivals {
 public:
  explicit Arrivals(int ranks)
      : signals_(ranks),
        fences_(static_cast<std::size_t>(ranks)),
        link_messages_(static_cast<std::size_t>(ranks)),
        knocks_(static_cast<std::size_t>(ranks)) {}

  /// Memory of this rank that may be written from now on; nothing: no longer.
  void expose(SegmentId segment, std::byte* data, std::size_t bytes);

  /// A write of this stream is in this rank's memory.
  void piece(int source, std::uint32_t stream);
  /// Of a rank of this job; what it says is checked.
  void signal(const Message& message, const std::byte* payload);
  /// Signals that it pre-announces; checked, too.
  void forecast(const Message& message);
  /// Pieces that no signal will count.
  void cancel(const Message& message);

  void set_on_text(Fabric::OnText on_text);
  void text(int source, std::span<const std::byte> text);
  /// What a source says that has linked this rank in that epoch, or under that ticket.
  void take_link_message(int source, std::uint64_t since, Fabric::LinkMessage link_message);
  std::optional<Fabric::LinkMessage> link_message(int source, std::uint64_t since);
  std::optional<Fabric::Knock> knock(int source);
  /// The source is another process from now on: nothing of the former one counts.
  void begin_anew(int source);

  /// The source has written so many pieces in all when it ended this epoch.
  void fence(int source, std::uint64_t epoch, std::uint64_t pieces);
  /// It has all that this rank had written.
  void fenced(int source, std::uint64_t epoch);
  /// Whether `fenced` has come from there.
  bool is_fenced(int source, std::uint64_t epoch);
  /// The epoch whose fence has come from there with all pieces, if it was not asked for before.
  std::optional<std::uint64_t> complete_fence(int source);
  /// Whether it ever was.
  bool has_fence(int source, std::uint64_t epoch);

 private:
  using Place = protocol::Place;
  using Signal = protocol::ArrivedSignal<Place>;
  struct Own {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  /// Of one source.
  struct Fence {
    std::uint64_t landed = 0;    // pieces so far
    std::uint64_t epoch = 0;     // of the last fence that came
    std::uint64_t pieces = 0;    // that go before it
    std::uint64_t answered = 0;  // epoch for which all pieces were here
    std::uint64_t told = 0;      // epoch for which it has all of this rank's
  };

  Fence& fence_of(int source) { return fences_[static_cast<std::size_t>(source)]; }
  bool may_raise(const Message& message) const;
  void take(int from, const Signal& signal);
  void release(const Signal& signal);
  std::byte* own_bytes(SegmentId segment, std::uint64_t offset, std::uint64_t bytes) const;

  std::mutex mutex_;
  std::vector<Own> own_;  // by segment
  protocol::CountedSignals<Place> signals_;
  std::vector<Fence> fences_;  // by source
  struct LastMessage {
    std::uint64_t since = 0;
    Fabric::LinkMessage link_message{};
  };
  LastMessage& last_message(int source, std::uint64_t since) {
    auto& all = (since & kTicketBit) != 0 ? knocks_ : link_messages_;
    return all[static_cast<std::size_t>(source)];
  }
  std::vector<LastMessage> link_messages_;  // by source: the last
  std::vector<LastMessage> knocks_;         // those under tickets
  Fabric::OnText on_text_{};
};

}  // namespace ferry::fabric::ofi
