// How the ranks that are left of a group in shared memory agree on its next epoch
// (protocol/membership.hpp). Each publishes its statement in its own control segment, which the
// others can read also after its death, and rings their bells.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/channel.hpp"
#include "protocol/board.hpp"
#include "protocol/membership.hpp"

namespace ferry::engine {

class Regroup {
 public:
  struct Traits : protocol::MembershipTraits {
    static constexpr int kSeats = 256;
    static constexpr int kJoins = 1;
  };
  using Member = protocol::Membership<Traits>;
  using Said = Member::Said;
  using Standing = Member::Standing;

  /// Whether all ranks of the group can read each other's statements: one domain, and not too many.
  static bool possible(const Memory& memory);

  Regroup(std::shared_ptr<Memory> memory, Channel& channel, const GroupConfig& config,
          const ControlLayout& layout);

  /// Stops, agrees with the ranks that are left, and has the channel go on with them: their epoch.
  /// Throws Error(evicted) when they went on without this one, and Error(deadline) when those in
  /// reach are no quorum; then the group has failed for good. After any other error it may be
  /// called again.
  /// `step`: the newest that this rank has committed.
  Epoch run(std::uint64_t step);
  /// Regions that were held back are free again if no rank that was lost can still write to them.
  void free_held() const;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kWords = sizeof(Said) / sizeof(std::uint64_t);

  protocol::Board<> board(int peer) const;
  std::byte* control(int peer) const { return memory_->fabric->pointer(peer, Channel::kControl); }
  protocol::Flag bell(int peer) const;
  void begin(std::uint64_t step);
  void poll();
  void hear(int peer);
  void publish();
  void check_standing();
  void check_progress();
  void suspect_silent();
  bool stopped(int peer) const;   ///< it says so, of this epoch
  Member::Seats may_run() const;  ///< of the suspects
  void wait(std::uint64_t rung);
  Epoch go_on();
  [[noreturn]] void give_up(const Error& error);
  [[noreturn]] void throw_destroyed() const;
  std::string names(const Member::Seats& seats) const;

  std::shared_ptr<Memory> memory_;
  Channel& channel_;
  const GroupConfig& config_;
  ControlLayout layout_;
  std::unique_ptr<Member> member_;
  std::vector<std::uint64_t> heard_;  // [R]: the number of the text read last
  std::vector<Said> said_;            // [R]: that text
  std::uint64_t published_ = 0;       // the statement's number
  std::uint64_t deaths_ = 0;          // told by the kernel before the last poll
  Clock::time_point polled_{};        // at the processes
  Clock::time_point heard_at_{};      // when anybody last said something new
  Clock::time_point timeout_{};       // until when silence is no reason to suspect
};

}  // namespace ferry::engine
