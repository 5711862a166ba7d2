// What every kernel of a group is given: where the flags are, where peers' memory is, and how to
// fail. Plain data, passed by value.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/call.hpp"
#include "core/device.hpp"
#include "core/layout.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

/// Most segments that a rank may register: the control segment is number 0, the arena's follow.
inline constexpr int kMaxSegments = 64;
/// Ranks of one NVLink domain.
inline constexpr int kMaxDomain = 72;

/// A peer's segment as this GPU sees it; bytes 0: not attached.
struct PeerSegment {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

/// Why a call ended without its result. Fatal reasons (deadline, aborted, distrust) leave the group
/// dead; the others are seen by every rank alike and the group goes on.
enum class Reason : std::uint32_t {
  none,
  deadline,   ///< `peer` did not raise its flag in time
  aborted,    ///< the host raised `abort`: destroyed, or a peer is known to be dead
  distrust,   ///< `peer` said what cannot be (a place outside its segments, impossible counts)
  mismatch,   ///< `peer` is in another call; `theirs` says which
  no_room,    ///< `peer` has no region; `detail`: bytes that it needs
  too_many,   ///< more rows arrive at `peer` than it granted; `detail`: how many
  bad_route,  ///< `peer` was given an id that is no expert; `detail`: token * 64 + slot
  bad_plan,   ///< the plan's own call failed
};

/// What a rank tells its peers at the entry of a call. It is the message of the call's swap; the
/// counts of a plan follow it.
struct DeviceHead {
  CallSignature call{};
  StepStatus status = StepStatus::ok;
  std::uint32_t segment = 0;  ///< dispatch: granted for rows; combine: where the rows are
  std::uint64_t offset = 0;
  std::uint32_t side_segment = 0;  ///< dispatch: for routes and weights; combine: the weights
  /// bad_route: this rank's ids are no experts; bad_plan: its plan holds no counts; else none.
  Reason refused = Reason::none;
  std::uint64_t side_offset = 0;
  std::int64_t rows = 0;    ///< capacity of the granted region in rows (side region alike)
  std::int64_t detail = 0;  ///< no_room: bytes that are missing; bad route: token * 64 + slot
};

/// One rank's control segment: written by its peers, but for `local`.
struct DeviceControlLayout {
  std::size_t entered = 0;    ///< [R] lines: generation of source's last head
  std::size_t delivered = 0;  ///< [R] lines: generation in which source's rows are all here
  std::size_t done = 0;       ///< [R] lines: generation in which the reader has read my rows
  std::size_t local = 0;      ///< LocalWords, touched by this rank alone
  std::size_t mailbox = 0;    ///< [2, R, message_bytes]
  std::size_t message_bytes = 0;
  std::size_t bytes = 0;
};

/// Words that kernels of one rank share. Calls of a group run one after another on the GPU.
struct LocalWords {
  std::uint64_t generation;  ///< of the last call that has ended
  std::uint64_t failed;      ///< not 0: a call failed; later kernels do nothing
  std::uint64_t refused;     ///< of the last call that ended in peace without moving anything
  std::uint32_t arrived[4];  ///< blocks that have passed a point of the running call; 0 between
};

/// `body_bytes`: what follows the head in the largest message.
FERRY_FN constexpr DeviceControlLayout make_device_control_layout(int ranks,
                                                                  std::size_t body_bytes) {
  const auto r = static_cast<std::size_t>(ranks);
  DeviceControlLayout layout{};
  Carver carver{};
  layout.entered = carver.take(r * kLineBytes);
  layout.delivered = carver.take(r * kLineBytes);
  layout.done = carver.take(r * kLineBytes);
  layout.local = carver.take(sizeof(LocalWords));
  layout.message_bytes = round_up(sizeof(DeviceHead) + body_bytes, kLineBytes);
  layout.mailbox = carver.take(2 * r * layout.message_bytes);
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

/// Where in a call a kernel gave up.
enum class Stage : std::uint32_t {
  none,
  counts,
  grants,
  rows,
  descriptors,
  loans,
  barrier,
  latency_open,
  latency_credit,
  latency_headers,
  latency_rows,
  latency_weights,
  latency_sums,
};

FERRY_FN constexpr bool is_fatal(Reason reason) {
  return reason == Reason::deadline || reason == Reason::aborted || reason == Reason::distrust;
}

/// Lies in pinned host memory; `written` is stored last.
struct Failure {
  std::uint64_t written = 0;  ///< generation of the call, stored last (release, system scope)
  Reason reason = Reason::none;
  Stage stage = Stage::none;
  std::int32_t peer = -1;
  std::uint32_t reserved = 0;
  std::uint64_t expected = 0;  ///< of the flag
  std::uint64_t seen = 0;
  std::int64_t detail = 0;
  CallSignature theirs{};
};

struct GroupView {
  int rank = 0;
  int ranks = 1;
  std::byte* control = nullptr;  ///< own control segment
  DeviceControlLayout layout{};
  /// [ranks, kMaxSegments] in device memory; own rank too. Entries are only ever added.
  const PeerSegment* segments = nullptr;
  Failure* fatal = nullptr;              ///< pinned: the first fatal failure of the group
  const std::uint32_t* abort = nullptr;  ///< pinned: not 0 asks waiting kernels to stop
  std::uint64_t deadline_ns = 0;         ///< of every wait
};

}  // namespace ferry::cuda
