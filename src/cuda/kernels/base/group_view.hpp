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
/// detail of a bad route: not a place of topk_idx, but this and a lost rank, whose expert it names.
inline constexpr std::int64_t kLostRoute = std::int64_t{1} << 62;
/// In so many equal parts of its tokens, at most, a source tells which of its rows have come.
inline constexpr int kProgressParts = 16;
/// Blocks of a dispatch, at most: each has a flag of its own at every peer.
inline constexpr int kMaxBlocks = 192;
/// Generations whose messages lie in a mailbox at the same time. A rank posts call g + 1 at the
/// earliest when its call g - 1 has ended; a peer may then still be in call g - 2 (it was early,
/// too, and call g - 1 was refused, which takes nothing but heads).
inline constexpr int kMailboxDepth = 4;

/// A peer's segment as this GPU sees it; bytes 0: not attached. A hole, which is the seat of a lost
/// rank, has a control segment of 0 bytes: what is stored there lies in memory that nobody reads.
struct PeerSegment {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

/// Why a call ended without its result. Fatal reasons (deadline, aborted, violation) leave the
/// group dead; the others are seen by every rank alike and the group goes on.
enum class Reason : std::uint32_t {
  none,
  deadline,    ///< `peer` did not raise its flag in time
  aborted,     ///< the host raised `abort`: destroyed, or a peer is known to be dead
  violation,   ///< of the protocol, by `peer`: a place outside its segments, impossible counts
  mismatch,    ///< `peer` is in another call; `theirs` says which
  no_room,     ///< `peer` has no region; `detail`: bytes that it needs
  too_many,    ///< more rows arrive at `peer` than it granted; `detail`: how many
  bad_route,   ///< `peer` was given an id that is no expert; `detail`: token * 64 + slot, or
               ///< kLostRoute and the rank
  bad_plan,    ///< the plan's own call failed
  stale,       ///< a latency result whose buffers later dispatches used; `detail`: how many
  bad_counts,  ///< of all_to_all: `peer` sends `seen` elements to rank `detail`, which expects
               ///< `expected`; of send and recv: `seen` bytes are sent, with `detail` as tag
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
  /// dispatch: so many say that they have delivered; combine: 1, the rows are made while peers read
  std::uint32_t blocks = 0;
  std::uint32_t reserved = 0;
};

/// One rank's control segment: written by its peers, but for `local`.
struct DeviceControlLayout {
  std::size_t delivered = 0;  ///< u64 [R, kMaxBlocks]: generation in which a block's rows are here
  std::size_t done = 0;       ///< [R] lines: generation in which the reader has read my rows
  std::size_t progress =
      0;                    ///< [R] lines of kProgressParts words (kernels/throughput/progress.cuh)
  std::size_t summed = 0;   ///< a line: how far this rank's sums of slots are; peers poll
  std::size_t local = 0;    ///< LocalWords, touched by this rank alone
  std::size_t mailbox = 0;  ///< [kMailboxDepth, R, message_bytes]
  std::size_t second = 0;   ///< [kMailboxDepth, R, kSecondBytes]: second grants, posted like heads
  std::size_t message_bytes = 0;
  std::size_t bytes = 0;
};

/// Slices of a rank's sums of slots, at most: each is told to the peers when it is complete.
inline constexpr int kMostSlices = 32;

/// What the blocks of a fan-out beside its dispatch have claimed and done; 0 between calls.
struct BesideWords {
  std::uint32_t counts, counted;  ///< blocks of rows whose slots are counted
  std::uint32_t places, placed;   ///< and placed
  std::uint32_t copies;           ///< groups of rows
  std::uint32_t zeros;            ///< groups of padding
  std::uint32_t left;             ///< blocks that are through
};

/// Words that kernels of one rank share. Calls of a group run one after another on the GPU.
struct LocalWords {
  std::uint64_t generation;  ///< of the last call that has ended
  std::uint64_t before;      ///< generations up to this one are of earlier epochs
  /// Not 0: a lost rank may still write to memory that was granted before. The CPU says when not.
  std::uint64_t held;
  std::uint64_t planning;    ///< of the last plan whose destinations are made
  std::uint64_t failed;      ///< not 0: a call failed; later kernels do nothing
  std::uint64_t refused;     ///< of the last call that ended in peace without moving anything
  std::uint32_t arrived[4];  ///< blocks that have passed a point of the running call; 0 between
  std::uint32_t pushed[kProgressParts];  ///< blocks that have pushed a part; 0 between calls
  std::uint64_t moving;  ///< the last call that moves rows and has a fan-out beside it
  BesideWords beside;
  std::uint32_t summed[kMostSlices];  ///< warps that have done with a slice of sums; 0 between
};

inline constexpr std::size_t kSecondBytes = round_up(2 * sizeof(DeviceHead), kLineBytes);

/// `body_bytes`: what follows the head in the largest message. In a mailbox 4 bytes of a message
/// take 8: the generation stands beside them.
FERRY_FN constexpr DeviceControlLayout make_device_control_layout(int ranks,
                                                                  std::size_t body_bytes) {
  const auto r = static_cast<std::size_t>(ranks);
  DeviceControlLayout layout{};
  Carver carver{};
  layout.delivered = carver.take(r * kMaxBlocks * sizeof(std::uint64_t));
  layout.done = carver.take(r * kLineBytes);
  layout.progress = carver.take(r * kLineBytes);
  layout.summed = carver.take(kLineBytes);
  layout.local = carver.take(sizeof(LocalWords));
  layout.message_bytes = round_up(2 * (sizeof(DeviceHead) + body_bytes), kLineBytes);
  layout.mailbox = carver.take(kMailboxDepth * r * layout.message_bytes);
  layout.second = carver.take(kMailboxDepth * r * kSecondBytes);
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
  sums,
  loans,
  barrier,
  latency_open,
  latency_rejoin,
  latency_credit,
  latency_headers,
  latency_rows,
  latency_weights,
  latency_sums,
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  copy_rows,
  add_rows,
  send,
  recv,
};

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

/// What the CPU grants when more rows arrive than it guessed; in pinned memory.
struct SecondGrant {
  std::uint64_t written = 0;  ///< not 0: the rest is there; stored last (release)
  StepStatus status = StepStatus::ok;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint32_t side_segment = 0;
  std::uint32_t reserved = 0;
  std::uint64_t side_offset = 0;
  std::int64_t rows = 0;
  std::int64_t detail = 0;  ///< as in DeviceHead
};

// What the CPU and the kernels of an exchange with masks tell each other of ranks that are left
// out.

/// What the host sees of masks without asking the GPU, and tells running kernels; pinned.
struct LatencyAlarm {
  std::uint64_t masked;             ///< times that a rank was masked by a deadline
  std::uint32_t ranks[kMaxDomain];  ///< not 0: the rank is masked; written before `masked`
  std::uint32_t behind;             ///< a rank, + 1, that goes on without this one; 0: none
};

/// Why a rank is not waited for until the deadline: a word in this rank's memory that others write.
enum class Gone : std::uint32_t {
  no,
  without_us,  ///< it has masked this rank, and says so itself
  dead,        ///< its process has ended, or it left, says this rank's CPU
};

struct GroupView {
  int rank = 0;
  int ranks = 1;
  std::byte* control = nullptr;  ///< own control segment
  DeviceControlLayout layout{};
  /// [ranks, kMaxSegments] in device memory; own rank too. Entries are only ever added, but between
  /// epochs, when no kernel of the group runs.
  const PeerSegment* segments = nullptr;
  Failure* fatal = nullptr;              ///< pinned: the first fatal failure of the group
  const std::uint32_t* abort = nullptr;  ///< pinned: not 0 asks waiting kernels to stop
  std::uint64_t deadline_ns = 0;         ///< of every wait
};

}  // namespace ferry::cuda
