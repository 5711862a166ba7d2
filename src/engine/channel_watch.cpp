// How a rank waits, and what it can see of the others meanwhile: who is dead, who waits, in which
// call.
#include <algorithm>
#include <atomic>

#include "base/text.hpp"
#include "engine/channel.hpp"
#include "platform/death_watch.hpp"

namespace ferry::engine {
namespace {

using protocol::FailureBroadcast;
using protocol::Status;

constexpr auto kSlice = std::chrono::milliseconds(40);
/// Whoever waits for the dead rank tells the others, and nobody wakes them for it: those that wait
/// for a rank that is alive look after 0.6, 1.2, 2.5 ms, and so on.
constexpr int kHalvingsAfterDeath = 6;
/// A rank that waits checks its watch every time slice; one that has not for this long is stopped
/// or busy elsewhere.
constexpr std::chrono::nanoseconds kFreshBeat = std::chrono::milliseconds(500);
constexpr std::chrono::nanoseconds kLeastFreshBeat = std::chrono::milliseconds(100);
/// For news from another domain, where it is seen who waits, and from ranks that wait in another
/// call or for a transfer, whose wait may have begun later.
constexpr std::chrono::nanoseconds kUnseenGrace = std::chrono::milliseconds(500);
/// For news of this rank, which seems to be cut off from all by one of its NICs.
constexpr std::chrono::nanoseconds kCutOffGrace = std::chrono::seconds(1);
/// For what a rank that called regroup, and those that ended a call with it, have sent before.
constexpr std::chrono::nanoseconds kStopGrace = std::chrono::seconds(1);
/// A rank that has waited for this part of its deadline says so to other domains.
constexpr int kSaysAfter = 4;
constexpr auto kGraceSlice = std::chrono::milliseconds(5);
/// Of the line in which a rank says how it is: when it last looked up from a wait, its call, and
/// when it last looked up from a transfer, whether it has left, at which step it joined.
constexpr std::size_t kBeatWord = 0, kCallWord = 1, kTransferWord = 2, kLeftWord = 3,
                      kJoinedWord = 4;
/// Of kLeftWord.
constexpr std::uint64_t kLeft = 1, kAtRest = 2;

bool swaps_nothing(CallKind kind) {
  return kind == CallKind::latency_dispatch || kind == CallKind::latency_combine;
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

bool Awaited::missing(int peer) const {
  if ((only >= 0 && peer != only) || !flags.has(peer)) return false;
  // relaxed: only decides whom to look after; the wait itself acquires.
  return flags[peer].load(protocol::order::relaxed) < wanted;
}

void Channel::enter_call(const CallWord& call, bool survives) {
  survives_ = survives;
  // relaxed: words for messages; nothing is read on the strength of them.
  std::atomic_ref(*own_word(rank_, kCallWord)).store(pack(call), std::memory_order_relaxed);
  if (call == CallWord{}) rest();
}

std::uint64_t* Channel::own_word(int peer, std::size_t index) const {
  std::byte* control = peer == rank_ ? control_.data : memory_->fabric->pointer(peer, kControl);
  if (control == nullptr) return nullptr;
  return reinterpret_cast<std::uint64_t*>(control + layout_.heartbeat) + index;
}

bool Channel::waits(int peer) const {
  return fresh(peer, kBeatWord);
}

bool Channel::transfers(int peer) const {
  return fresh(peer, kTransferWord);
}

bool Channel::left(int peer) const {
  std::uint64_t* word = own_word(peer, kLeftWord);
  // Acquire: what it said before it left is here.
  return word != nullptr && std::atomic_ref(*word).load(std::memory_order_acquire) != 0;
}

bool Channel::at_rest(int peer) const {
  std::byte* control = memory_->fabric->pointer(peer, kControl);
  return peer != rank_ && control != nullptr && at_rest(control, layout_);
}

bool Channel::at_rest(std::byte* control, const ControlLayout& layout) {
  auto* words = reinterpret_cast<std::uint64_t*>(control + layout.heartbeat);
  // Acquire: what it wrote before is here.
  return std::atomic_ref(words[kLeftWord]).load(std::memory_order_acquire) == kAtRest;
}

void Channel::say_left() {
  // Release: see above.
  std::atomic_ref(*own_word(rank_, kLeftWord)).store(kLeft, std::memory_order_release);
}

void Channel::say_at_rest() {
  const bool forked = process_id() != owner_pid_;  // its parent is the rank
  if (!forked && left(rank_)) {
    std::atomic_ref(*own_word(rank_, kLeftWord)).store(kAtRest, std::memory_order_release);
  }
}

std::uint64_t Channel::joined_at(int peer) const {
  std::uint64_t* word = own_word(peer, kJoinedWord);
  // Acquire: one that has committed since it joined has said so before.
  return word == nullptr ? 0 : std::atomic_ref(*word).load(std::memory_order_acquire);
}

void Channel::say_joined(std::uint64_t at) {
  std::atomic_ref(*own_word(rank_, kJoinedWord)).store(at, std::memory_order_release);
}

std::uint64_t Channel::evicted() const {
  auto* word = reinterpret_cast<std::uint64_t*>(control_.data + layout_.evicted);
  // Acquire: reads of the peers' rows come before it, or are known to be too late.
  return std::atomic_ref(*word).load(std::memory_order_acquire);
}

void Channel::beat_transfers(int peer, std::chrono::nanoseconds waited) {
  // relaxed: a time stamp for the peers' blame; nothing is read on the strength of it.
  std::atomic_ref(*own_word(rank_, kTransferWord)).store(now_ns(), std::memory_order_relaxed);
  say_awaited(WaitChain::In::transfer, peer, waited);
}

void Channel::say_awaited(WaitChain::In in, int peer, std::chrono::nanoseconds waited) {
  if (!has_far_ || (peer >= 0 && waited < config_.deadline / kSaysAfter)) return;
  wait_chain_.say(reach_, in, peer, generation());
}

bool Channel::fresh(int peer, std::size_t index) const {
  // With a short deadline, a rank that was stopped in its wait must not look alive at the end of
  // it.
  const auto fresh = static_cast<std::uint64_t>(
      std::clamp(config_.deadline / 2, kLeastFreshBeat, kFreshBeat).count());
  std::uint64_t* word = own_word(peer, index);
  if (word == nullptr) return false;
  const std::uint64_t now = now_ns();
  // relaxed: a time stamp; nothing is read on the strength of it.
  const std::uint64_t beat = std::atomic_ref(*word).load(std::memory_order_relaxed);
  return beat != 0 && (beat > now || now - beat < fresh);
}

std::optional<CallWord> Channel::call_of(int peer) const {
  std::uint64_t* word = own_word(peer, kCallWord);
  if (word == nullptr) return std::nullopt;
  // relaxed: words for messages; nothing is read on the strength of them.
  return unpack_call(std::atomic_ref(*word).load(std::memory_order_relaxed));
}

/// Outside the domain nobody's line can be read, but a rank that is stopped or cut off is silent.
/// It may be awaited by another rank, which is why that one does not come.
int Channel::silent(const Awaited& awaited) const {
  int first = -1;
  for (const int peer : ranks_) {
    if (peer == rank_ || own_word(peer, kBeatWord) != nullptr ||
        memory_->fabric->peer_state(peer) != fabric::PeerState::unknown) {
      continue;
    }
    if (awaited.missing(peer)) return peer;
    if (first < 0) first = peer;
  }
  return first;
}

int Channel::blame(const Awaited& awaited, int fallback) const {
  if (const int peer = silent(awaited); peer >= 0) return peer;
  int other_call = -1;  // waits, but in another call
  int quiet = -1;       // in this call, but does not wait: stopped, or its deadline has just ended
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !awaited.missing(peer)) continue;
    if (own_word(peer, kBeatWord) == nullptr) continue;
    const bool same_call = call_of(peer) == call_of(rank_);
    if (waits(peer) || transfers(peer)) {  // those that wait in this call are held up themselves
      if (!same_call && other_call < 0) other_call = peer;
    } else if (!same_call) {
      return peer;
    } else if (quiet < 0) {
      quiet = peer;
    }
  }
  if (other_call >= 0) return other_call;
  return quiet >= 0 ? quiet : blame_by_chain(awaited, fallback);
}

/// Of ranks that are all missing and may all wait: one that has not said for whom it waits, else
/// the one at the end of the chain.
int Channel::blame_by_chain(const Awaited& awaited, int fallback) const {
  if (!has_far_) return fallback;
  int held = -1;
  for (const int peer : ranks_) {
    if (peer == rank_ || !awaited.missing(peer)) continue;
    if (held_up(peer)) {
      if (held < 0) held = peer;
    } else if (own_word(peer, kBeatWord) == nullptr) {
      return peer;
    }
  }
  if (held < 0) return fallback;
  return wait_chain_.last_after(held, since_.load(std::memory_order_relaxed));
}

std::chrono::nanoseconds Channel::grace(const Awaited& awaited) const {
  // This rank may be the one: the others say so as soon as their time is over.
  if (memory_->fabric->cut_off()) return std::min(config_.deadline / 2, kCutOffGrace);
  const auto left = scan([&](const FailureBroadcast& told) {
    return told.kind == FailureBroadcast::Kind::kLeft && awaited.missing(told.culprit);
  });
  if (left) return {};                  // it is the one
  if (silent(awaited) >= 0) return {};  // it is the one
  bool unseen = false, others_wait = false, other_call = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !awaited.missing(peer)) continue;
    if (own_word(peer, kBeatWord) == nullptr) {
      (held_up(peer) ? others_wait : unseen) = true;
    } else if (!waits(peer) && !transfers(peer)) {
      return {};  // it is the one
    } else if (call_of(peer) == call_of(rank_)) {
      others_wait = true;
    } else {
      other_call = true;
    }
  }
  const auto short_grace = std::min<std::chrono::nanoseconds>(config_.deadline / 4, kUnseenGrace);
  if (other_call) return short_grace;
  if (others_wait) return config_.deadline;
  // Even one alone may have begun to wait for another a moment ago.
  return unseen ? short_grace : std::chrono::nanoseconds{};
}

GroupWatch::GroupWatch(Channel& channel, const Awaited& awaited, const char* stage)
    : channel_(channel),
      awaited_(awaited),
      stage_(stage),
      deaths_(channel.deaths_),
      long_wait_(channel.notice_after_, start_, start_ + channel.config_.deadline) {
  beat(now_ns());
}

GroupWatch::~GroupWatch() {
  beat(0);
  if (!failed_) channel_.say_awaited(WaitChain::In::call, -1, {});
}

void GroupWatch::beat(std::uint64_t value) {
  // relaxed: a time stamp for the peers' blame; nothing is read on the strength of it.
  std::atomic_ref(*channel_.own_word(channel_.rank_, kBeatWord))
      .store(value, std::memory_order_relaxed);
}

std::uint64_t GroupWatch::spin_ns() const {
  return static_cast<std::uint64_t>(channel_.memory_->fabric->spin_time().count());
}

bool GroupWatch::progress() {
  return channel_.memory_->fabric->progress();
}

void GroupWatch::hand_over() {
  channel_.memory_->fabric->hand_over();
}

std::uint64_t GroupWatch::slice_ns() const {
  if (DeathWatch::count() != deaths_) return 1;
  const auto left = channel_.config_.deadline - (Clock::now() - start_);
  if (left <= left.zero()) return std::chrono::nanoseconds(kGraceSlice).count();
  return static_cast<std::uint64_t>(
      std::clamp<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(1), longest_slice())
          .count());
}

GroupWatch::Clock::duration GroupWatch::longest_slice() const {
  return Clock::duration(kSlice) / (1 << halvings_);
}

bool Channel::is_lost(int peer) const {
  const fabric::PeerState state = memory_->fabric->peer_state(peer);
  if (state != fabric::PeerState::unknown) return state == fabric::PeerState::dead;
  // Of the domain nobody is silent; and where this rank is cut off itself, the others say so.
  return loses_silent_.load(std::memory_order_relaxed) && own_word(peer, kBeatWord) == nullptr &&
         !memory_->fabric->cut_off();
}

bool Channel::gone(int peer) const {
  if (memory_->fabric->peer_ends(peer)) return true;
  // Outside the domain, where no word is read, the deadline must tell.
  return left(peer);
}

/// Outside the domain a failure broadcast overtakes the flags that its reporter raised before it
/// left: those of its last generation may be under way as long as the network is slow.
bool GroupWatch::left_may_be_under_way(const FailureBroadcast& left) const {
  return left.reporter == left.culprit && channel_.generation() <= left.generation &&
         channel_.own_word(left.culprit, kBeatWord) == nullptr;
}

/// A rank that calls regroup has ended its calls, and who passes that on all but its last one.
bool GroupWatch::has_ended_this_call(const FailureBroadcast& stopped) const {
  const bool passed_on = stopped.reporter != stopped.culprit;
  const auto call = channel_.call_of(channel_.rank_);
  if (call && swaps_nothing(call->kind)) {  // so generations do not tell; near flags would be here
    return !passed_on && channel_.own_word(stopped.culprit, kBeatWord) == nullptr;
  }
  return channel_.generation() + (passed_on ? 1 : 0) <= stopped.generation;
}

/// Who waits for a rank that stands still must come to the regroup in time.
bool GroupWatch::must_regroup() const {
  const auto grace = std::min<std::chrono::nanoseconds>(channel_.config_.deadline / 4, kStopGrace);
  return channel_.beside_calls_ || channel_.stopped_for() >= grace;
}

bool GroupWatch::ends_wait(const FailureBroadcast& told, bool late, int dead) const {
  // Who passed it on has failed because of it.
  const bool missing = awaited_.missing(told.reporter) || awaited_.missing(told.culprit);
  switch (told.kind) {
    // "I am late", from the late rank itself, is an echo: believe the rank that waited for it.
    case FailureBroadcast::Kind::kLate: return told.reporter != told.culprit;
    // Of a rank whose connections have ended nothing is under way.
    case FailureBroadcast::Kind::kLeft:
      return missing && (late || told.culprit == dead || !left_may_be_under_way(told));
    case FailureBroadcast::Kind::kStopped:
      return must_regroup() || (missing && !has_ended_this_call(told));
    default: return true;
  }
}

std::chrono::nanoseconds Channel::stopped_for() {
  const std::uint64_t now = now_ns();
  std::uint64_t heard = 0;
  // relaxed: a time; nothing is read on the strength of it.
  if (stop_heard_.compare_exchange_strong(heard, now, std::memory_order_relaxed)) return {};
  return std::chrono::nanoseconds(now - std::min(now, heard));
}

Status GroupWatch::check() {
  Status status;
  const auto now = Clock::now();
  bool late = now - start_ >= channel_.config_.deadline;
  late = late && now - start_ >= channel_.config_.deadline + channel_.grace(awaited_);
  const std::uint64_t deaths = DeathWatch::count();
  const bool death = deaths != deaths_;
  if (!late && now - last_poll_ < longest_slice() / 2 && !death) return status;
  deaths_ = deaths;
  halvings_ = death ? kHalvingsAfterDeath : std::max(0, halvings_ - 1);
  last_poll_ = now;
  return poll(late);
}

void Channel::look_up(int peer) {
  constexpr const char* kRoom = "rows that wait for room";
  if (!survives_) {
    // Everything of the peer is missing: it has not even taken what it is to answer.
    const Awaited awaited{{control_.data + layout_.delivered, kLineBytes, size_}, ~0ull, peer};
    await(kRoom, awaited, [](GroupWatch& watch) { return watch.poll(false); });
    return;
  }
  if (left()) {
    throw Error(ErrorKind::destroyed,
                "rank " + std::to_string(rank_) + ": " + kRoom +
                    ": the group was destroyed during the exchange",
                {rank_, peer, kRoom, generation(), 0, 0});
  }
  if (config_.on_wait) config_.on_wait();
}

Status GroupWatch::poll(bool late) {
  Status status;
  beat(now_ns());
  if (channel_.left()) {
    status.code = Status::Code::kInterrupted;
    return status;
  }
  if (channel_.evicted() != 0) {
    status.code = Status::Code::kEvicted;
    return status;
  }
  int dead = -1;
  for (int peer = 0; peer < channel_.size_ && dead < 0; ++peer) {
    if (peer == channel_.rank_ || !awaited_.missing(peer)) continue;
    if (channel_.is_lost(peer)) dead = peer;
  }
  // After looking at the processes: a rank that failed because of another has said so before it
  // ended, so its failure broadcast wins over its own death.
  const auto broadcast =
      channel_.scan([&](const FailureBroadcast& told) { return ends_wait(told, late, dead); });
  if (broadcast) {
    broadcast_ = broadcast;
    status.code = Status::Code::kPeerFailed;
    status.peer = broadcast->culprit;
  } else if (dead >= 0) {
    status.code = Status::Code::kPeerFailed;
    status.peer = dead;
  } else if (late) {
    status.code = Status::Code::kDeadline;
    status.peer = culprit();
  } else {
    channel_.say_awaited(WaitChain::In::call, culprit(), waited());
    if (Clock::now() >= long_wait_.next()) say_who_is_missing();
    if (channel_.config_.on_wait) channel_.config_.on_wait();
  }
  failed_ = !status.ok();
  return status;
}

/// Of those that are missing.
int GroupWatch::culprit() const {
  int lowest = -1;
  for (int peer = channel_.size_; peer-- > 0;) {
    if (awaited_.missing(peer)) lowest = peer;
  }
  return channel_.blame(awaited_, lowest);
}

void GroupWatch::say_who_is_missing() {
  std::vector<int> missing;
  for (int peer = 0; peer < channel_.size_; ++peer) {
    if (peer != channel_.rank_ && awaited_.missing(peer)) missing.push_back(peer);
  }
  if (missing.empty()) return;
  long_wait_.say(channel_.rank_,
                 for_others("", stage_) + ": " + spell_ranks(missing) + " did not come yet" +
                     channel_.whereabouts({missing.front(), channel_.rank_}),
                 {{"stage", stage_}, {"ranks", spell_numbers(missing)}});
}

}  // namespace ferry::engine
