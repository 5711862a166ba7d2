#include "host/channel.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

namespace ferry::host {
namespace {

using protocol::FlagLayout;
using protocol::Notice;
using protocol::Place;
using protocol::Status;

constexpr fabric::SegmentId kControl = 0;
constexpr auto kSlice = std::chrono::milliseconds(40);
/// A rank that waits looks at its watch every slice; one that has not for this long is stopped or
/// busy elsewhere.
constexpr std::chrono::nanoseconds kFreshBeat = std::chrono::milliseconds(500);
constexpr std::chrono::nanoseconds kLeastFreshBeat = std::chrono::milliseconds(100);

FlagLayout flags_at(int ranks, std::size_t offset) {
  return {ranks, Place{kControl, offset}, kLineBytes};
}

protocol::SwapLayout swap_layout(int ranks, const ControlLayout& layout) {
  return {layout.message_bytes, Place{kControl, layout.mailbox}, layout.message_bytes,
          flags_at(ranks, layout.swap_flags)};
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

std::string seconds(std::chrono::nanoseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) * 1e-9);
  return text.substr(0, text.find('.') + 3) + " s";
}

std::string rank_text(int rank) {
  return "rank " + std::to_string(rank);
}

ErrorKind kind_of(Notice::Kind kind) {
  switch (kind) {
    case Notice::Kind::kLate: return ErrorKind::deadline;
    case Notice::Kind::kLeft: return ErrorKind::peer_left;
    default: return ErrorKind::peer_failed;
  }
}

std::string told(const Notice& notice, int self) {
  const std::string culprit = rank_text(notice.culprit);
  const std::string by = notice.reporter == self || notice.reporter == notice.culprit
                             ? std::string()
                             : " (reported by " + rank_text(notice.reporter) + ")";
  switch (notice.kind) {
    case Notice::Kind::kLate: return culprit + " missed the deadline" + by;
    case Notice::Kind::kLeft:
      return culprit + " destroyed its group while others still exchange" + by;
    case Notice::Kind::kFailed: return culprit + " failed and gave up" + by;
    default: return culprit + " died" + by;
  }
}

}  // namespace

bool Awaited::missing(int peer) const {
  if (only >= 0 && peer != only) return false;
  // relaxed: only decides whom to look after; the wait itself acquires.
  return row[peer].load(protocol::order::relaxed) < wanted;
}

Channel::Channel(std::shared_ptr<Memory> memory, const GroupConfig& config,
                 const fabric::Segment& control, const ControlLayout& layout)
    : memory_(std::move(memory)),
      config_(config),
      control_(control),
      layout_(layout),
      rank_(memory_->fabric->rank()),
      size_(memory_->fabric->size()),
      reach_(*memory_->fabric),
      swap_(swap_layout(size_, layout), rank_, control.data + layout.mailbox,
            control.data + layout.swap_flags),
      delivery_(flags_at(size_, layout.delivered), rank_, control.data + layout.delivered),
      loan_(flags_at(size_, layout.done), rank_, control.data + layout.done),
      notices_(flags_at(size_, layout.notices), rank_, control.data + layout.notices, &own_notice_),
      outgoing_(layout.message_bytes) {}

void Channel::swap(const char* stage, const StepMessage& head, std::span<const std::byte> body) {
  std::memcpy(outgoing_.data(), &head, sizeof(head));
  if (!body.empty()) std::memcpy(outgoing_.data() + sizeof(head), body.data(), body.size());
  const Generation g = generation() + 1;
  generation_.store(g, std::memory_order_relaxed);
  swap_.post_all(reach_, g, outgoing_.data(), 0);
  const Awaited awaited{{control_.data + layout_.swap_flags, kLineBytes, size_}, g};
  await(stage, awaited, [&](GroupWatch& watch) { return swap_.await(g, watch); });
}

StepMessage Channel::head(int source) const {
  StepMessage message;
  std::memcpy(&message, swap_.message(source, generation()), sizeof(message));
  return message;
}

const std::byte* Channel::body(int source) const {
  return swap_.message(source, generation()) + sizeof(StepMessage);
}

std::byte* Channel::checked(const char* stage, int peer, fabric::Address address,
                            std::uint64_t bytes) {
  const std::uint64_t room = memory_->fabric->bytes(peer, address.segment);
  // Not offset + bytes: that could overflow.
  if (room == 0 || address.offset > room || bytes > room - address.offset ||
      address.offset % sizeof(float) != 0) {
    distrust(stage, peer,
             "named " + std::to_string(bytes) + " bytes at offset " +
                 std::to_string(address.offset) + " of its segment " +
                 std::to_string(address.segment) + ", which has " + std::to_string(room) +
                 " bytes here");
  }
  return pointer(peer, address);
}

void Channel::distrust(const char* stage, int peer, const std::string& what) {
  const std::string text = rank_text(rank_) + ": " + stage + " (generation " +
                           std::to_string(generation()) + "): " + rank_text(peer) + " " + what +
                           ". Its memory is damaged, or it runs another version of Ferry";
  fail(stage, text, ErrorKind::mismatch);
  throw Error(ErrorKind::mismatch, text, {rank_, peer, stage, generation(), 0, 0});
}

void Channel::deliver(int peer, std::uint64_t bytes) {
  delivery_.deliver(reach_, peer, generation(), bytes);
}

void Channel::await_delivered(const char* stage, int source) {
  const Awaited awaited{
      {control_.data + layout_.delivered, kLineBytes, size_}, generation(), source};
  await(stage, awaited, [&](GroupWatch& watch) {
    return source < 0 ? delivery_.await(generation(), watch)
                      : delivery_.await_from(source, generation(), watch);
  });
}

void Channel::give_back(int owner) {
  loan_.give_back(reach_, owner, generation());
}

void Channel::await_given_back(const char* stage, int reader) {
  const protocol::FlagRow row{control_.data + layout_.done, kLineBytes, size_};
  await(stage, {row, generation(), reader}, [&](GroupWatch& watch) {
    return protocol::await_flag(row[reader], reader, generation(), protocol::kAnyAhead, watch);
  });
}

void Channel::check_usable(const char* call) const {
  if (left()) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the group is destroyed");
  }
  std::scoped_lock lock(dead_mutex_);
  if (dead_) {
    throw Error(dead_->kind(),
                std::string(call) +
                    ": the group failed earlier and stays failed; make a new one. "
                    "It failed with: " +
                    dead_->what(),
                dead_->context());
  }
}

void Channel::die(const Error& error) {
  std::scoped_lock lock(dead_mutex_);
  if (!dead_) dead_ = error;
}

void Channel::fail(const char* stage, const std::string& reason, ErrorKind kind) {
  if (left()) return;  // who destroyed the group tells the peers so
  notices_.raise(reach_, Notice::Kind::kFailed, rank_, generation());
  die(Error(kind, std::string(stage) + ": " + reason, {rank_, rank_, stage, generation(), 0, 0}));
}

void Channel::leave() {
  if (left_.exchange(true, std::memory_order_acq_rel)) return;
  notices_.raise(reach_, Notice::Kind::kLeft, rank_, generation());
}

int Channel::blame(const Awaited& awaited, int fallback) const {
  const std::uint64_t now = now_ns();
  // With a short deadline, a rank that was stopped in its wait must not look alive at the end of
  // it.
  const auto fresh = static_cast<std::uint64_t>(
      std::clamp(config_.deadline / 2, kLeastFreshBeat, kFreshBeat).count());
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !awaited.missing(peer)) continue;
    const std::byte* control = memory_->fabric->pointer(peer, kControl);
    if (control == nullptr) continue;
    auto* word =
        reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(control) + layout_.heartbeat);
    // relaxed: a time stamp; nothing is read on the strength of it.
    const std::uint64_t beat =
        std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_relaxed);
    const bool waits = beat != 0 && (beat > now || now - beat < fresh);
    if (!waits) return peer;  // those that wait are held up themselves
  }
  return fallback;
}

void Channel::raise(const char* stage, const Status& status, const GroupWatch& watch,
                    std::chrono::nanoseconds waited) {
  ErrorContext context{rank_, status.peer, stage, generation(), status.expected, status.seen};
  const std::string where =
      rank_text(rank_) + ": " + stage + " (generation " + std::to_string(generation()) + "): ";
  ErrorKind kind = ErrorKind::peer_failed;
  std::string text;
  switch (status.code) {
    case Status::Code::kInterrupted:
      throw Error(ErrorKind::destroyed, where + "the group was destroyed during the exchange",
                  context);
    case Status::Code::kDeadline: {
      kind = ErrorKind::deadline;
      context.peer = status.peer;
      const Notice spread = notices_.raise(reach_, Notice::Kind::kLate, context.peer, generation());
      context.peer = spread.culprit;
      text = rank_text(context.peer) + " did not come within " + seconds(waited) + " (expected " +
             std::to_string(status.expected) + ", seen " + std::to_string(status.seen) +
             "). Is it running, and does it make the same calls in the same order?";
      break;
    }
    case Status::Code::kPeerFailed:
      if (watch.notice()) {
        kind = kind_of(watch.notice()->kind);
        context.peer = watch.notice()->culprit;
        text = told(*watch.notice(), rank_) + ", seen after " + seconds(waited);
        notices_.raise(reach_, watch.notice()->kind, context.peer, generation());
      } else {
        notices_.raise(reach_, Notice::Kind::kDied, context.peer, generation());
        text =
            rank_text(context.peer) + " died: its process has ended, seen after " + seconds(waited);
      }
      break;
    default:
      kind = ErrorKind::mismatch;
      notices_.raise(reach_, Notice::Kind::kFailed, rank_, generation());
      text = rank_text(context.peer) + " is ahead: this rank was left behind (expected " +
             std::to_string(status.expected) + ", seen " + std::to_string(status.seen) + ")";
      break;
  }
  if (kind == ErrorKind::peer_failed) memory_->fabric->forget(context.peer);
  const Error error(kind, where + text, context);
  die(error);
  throw error;
}

GroupWatch::GroupWatch(Channel& channel, const Awaited& awaited)
    : channel_(channel), awaited_(awaited) {
  beat(now_ns());
}

GroupWatch::~GroupWatch() {
  beat(0);
}

void GroupWatch::beat(std::uint64_t value) {
  auto* word =
      reinterpret_cast<std::uint64_t*>(channel_.control_.data + channel_.layout_.heartbeat);
  // relaxed: a time stamp for the peers' blame; nothing is read on the strength of it.
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_relaxed);
}

std::uint64_t GroupWatch::spin_ns() const {
  static const unsigned cores = std::thread::hardware_concurrency();
  return static_cast<unsigned>(channel_.size_) > cores ? 1'000 : 20'000;
}

std::uint64_t GroupWatch::slice_ns() const {
  const auto left = channel_.config_.deadline - (Clock::now() - start_);
  return static_cast<std::uint64_t>(
      std::clamp<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(1), kSlice).count());
}

Status GroupWatch::check() {
  Status status;
  const auto now = Clock::now();
  const bool late = now - start_ >= channel_.config_.deadline;
  if (!late && now - last_look_ < kSlice / 2) return status;
  last_look_ = now;
  beat(now_ns());
  if (channel_.left()) {
    status.code = Status::Code::kInterrupted;
    return status;
  }
  int dead = -1;
  for (int peer = 0; peer < channel_.size_ && dead < 0; ++peer) {
    if (peer == channel_.rank_ || !awaited_.missing(peer)) continue;
    if (channel_.memory_->fabric->peer_state(peer) == fabric::PeerState::dead) dead = peer;
  }
  // After looking at the processes: a rank that failed because of another has said so before it
  // ended, so its notice wins over its own death.
  const auto notice = channel_.notices_.scan([this](const Notice& told) {
    // Ranks that are not awaited may leave; one that passes such news on has itself failed of it.
    return told.kind != Notice::Kind::kLeft || awaited_.missing(told.reporter) ||
           awaited_.missing(told.culprit);
  });
  if (notice) {
    notice_ = notice;
    status.code = Status::Code::kPeerFailed;
    status.peer = notice->culprit;
  } else if (dead >= 0) {
    status.code = Status::Code::kPeerFailed;
    status.peer = dead;
  } else if (late) {
    status.code = Status::Code::kDeadline;
    int lowest = -1;
    for (int peer = channel_.size_; peer-- > 0;) {
      if (awaited_.missing(peer)) lowest = peer;
    }
    status.peer = channel_.blame(awaited_, lowest);
  } else if (channel_.config_.on_wait) {
    channel_.config_.on_wait();
  }
  return status;
}

}  // namespace ferry::host
