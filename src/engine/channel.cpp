#include "engine/channel.hpp"

#include <cstring>
#include <numeric>
#include <utility>

#include "platform/death_watch.hpp"

namespace ferry::engine {
namespace {

using protocol::FlagLayout;
using protocol::Place;

FlagLayout flags_at(int ranks, std::size_t offset) {
  return {ranks, Place{Channel::kControl, offset}, kLineBytes};
}

protocol::SwapLayout swap_layout(int ranks, const ControlLayout& layout) {
  return {layout.message_bytes, Place{Channel::kControl, layout.mailbox}, layout.message_bytes,
          flags_at(ranks, layout.swap_flags)};
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Channel::Channel(std::shared_ptr<Memory> memory, const GroupConfig& config,
                 const fabric::Segment& control, const ControlLayout& layout)
    : memory_(std::move(memory)),
      config_(config),
      control_(control),
      layout_(layout),
      rank_(memory_->fabric->rank()),
      size_(memory_->fabric->size()),
      reach_(*memory_->fabric),
      ranks_(all_ranks(size_)),
      live_(ranks_.size(), 1),
      swap_(swap_layout(size_, layout), rank_, control.data + layout.mailbox,
            control.data + layout.swap_flags, live_.data()),
      delivery_(flags_at(size_, layout.delivered), rank_, control.data + layout.delivered,
                live_.data()),
      loan_(flags_at(size_, layout.done), rank_, control.data + layout.done),
      chunks_(flags_at(size_, layout.crossed), rank_, control.data + layout.crossed),
      chunks_sent_(static_cast<std::size_t>(size_)),
      chunks_taken_(static_cast<std::size_t>(size_)),
      broadcasts_(flags_at(size_, layout.broadcasts), rank_, control.data + layout.broadcasts,
                  &own_broadcast_, live_.data()),
      wait_chain_(size_, rank_, control.data, layout),
      outgoing_(layout.message_bytes) {
  for (int peer = 0; peer < size_; ++peer) {
    has_far_ = has_far_ || memory_->fabric->pointer(peer, kControl) == nullptr;
  }
  memory_->fabric->set_look_up([this](int peer) { look_up(peer); });
}

void Channel::swap(const char* stage, const StepMessage& head, std::span<const std::byte> body) {
  std::memcpy(outgoing_.data(), &head, sizeof(head));
  if (!body.empty()) std::memcpy(outgoing_.data() + sizeof(head), body.data(), body.size());
  const Generation g = next_swap();
  swap_.post_all(reach_, g, outgoing_.data(), 0, round_up(sizeof(head) + body.size(), kLineBytes));
  await_swap(stage);
}

void Channel::swap(const char* stage, const StepMessage& head, const WriteBody& write) {
  std::memcpy(outgoing_.data(), &head, sizeof(head));
  const Generation g = next_swap();
  for (int i = 0; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;  // each starts elsewhere
    if (!has(peer)) continue;
    const std::size_t bytes = sizeof(head) + write(peer, outgoing_.data() + sizeof(head));
    swap_.post(reach_, peer, g, outgoing_.data(), round_up(bytes, kLineBytes));
  }
  await_swap(stage);
}

Generation Channel::next_swap() {
  if (beside_calls_) return ++swapped_;
  swapped_ = generation() + 1;
  generation_.store(swapped_, std::memory_order_relaxed);
  return swapped_;
}

void Channel::await_swap(const char* stage) {
  const Generation g = swapped_;
  const Awaited awaited{{control_.data + layout_.swap_flags, kLineBytes, size_, live_.data()}, g};
  await(stage, awaited, [&](GroupWatch& watch) { return swap_.await(g, watch); });
}

StepMessage Channel::head(int source) const {
  StepMessage message;
  std::memcpy(&message, swap_.message(source, swapped_), sizeof(message));
  return message;
}

const std::byte* Channel::body(int source) const {
  return swap_.message(source, swapped_) + sizeof(StepMessage);
}

std::byte* Channel::checked(const char* stage, int peer, fabric::Address address,
                            std::uint64_t bytes) {
  const std::uint64_t room = memory_->fabric->bytes(peer, address.segment);
  // Not offset + bytes: that could overflow.
  if (room == 0 || address.offset > room || bytes > room - address.offset ||
      address.offset % sizeof(float) != 0) {
    throw_violation(stage, peer,
                    "named " + std::to_string(bytes) + " bytes at offset " +
                        std::to_string(address.offset) + " of its segment " +
                        std::to_string(address.segment) + ", which has " + std::to_string(room) +
                        " bytes here");
  }
  return pointer(peer, address);
}

void Channel::deliver(int peer, std::uint64_t bytes) {
  delivery_.deliver(reach_, peer, generation(), bytes);
}

void Channel::await_delivered(const char* stage, int source) {
  const Awaited awaited{
      {control_.data + layout_.delivered, kLineBytes, size_, live_.data()}, generation(), source};
  await(stage, awaited, [&](GroupWatch& watch) {
    return source < 0 ? delivery_.await(generation(), watch)
                      : delivery_.await_from(source, generation(), watch);
  });
}

void Channel::send_chunk(int peer, std::uint64_t bytes) {
  chunks_.send(reach_, peer, ++chunks_sent_[static_cast<std::size_t>(peer)], bytes);
}

bool Channel::take_chunk(int source) {
  std::uint64_t& taken = chunks_taken_[static_cast<std::size_t>(source)];
  if (!chunks_.arrived(source, taken + 1)) return false;
  ++taken;
  return true;
}

void Channel::await_chunk(const char* stage, int source) {
  const std::uint64_t next = ++chunks_taken_[static_cast<std::size_t>(source)];
  const Awaited awaited{{control_.data + layout_.crossed, kLineBytes, size_}, next, source};
  await(stage, awaited, [&](GroupWatch& watch) { return chunks_.await(source, next, watch); });
}

void Channel::give_back(int owner) {
  loan_.give_back(reach_, owner, generation());
}

void Channel::await_given_back(const char* stage, int reader) {
  const protocol::FlagArray flags{control_.data + layout_.done, kLineBytes, size_};
  await(stage, {flags, generation(), reader}, [&](GroupWatch& watch) {
    return protocol::await_flag(flags[reader], reader, generation(), protocol::kAnyAhead, watch);
  });
}

void Channel::begin_epoch(const Epoch& epoch) {
  std::fill(live_.begin(), live_.end(), std::uint8_t{0});
  for (const int rank : epoch.ranks) live_[static_cast<std::size_t>(rank)] = 1;
  ranks_ = epoch.ranks;
  deaths_ = epoch.deaths;
  generation_.store(epoch.first - 1, std::memory_order_relaxed);
  constexpr int kSwapsOfOneEpoch = 32;  // bits
  if (beside_calls_) swapped_ = epoch.number << kSwapsOfOneEpoch;
  // What crossed in the epoch before may have been counted on one side alone.
  const std::uint64_t chunks = protocol::Chunks<>::before(epoch.number);
  std::fill(chunks_sent_.begin(), chunks_sent_.end(), chunks);
  std::fill(chunks_taken_.begin(), chunks_taken_.end(), chunks);
  // relaxed: broadcasts of the epoch before are of less, whoever reads which.
  since_.store(epoch.first - 1, std::memory_order_relaxed);
  stop_heard_.store(0, std::memory_order_relaxed);
  std::scoped_lock lock(dead_mutex_);
  dead_.reset();
}

}  // namespace ferry::engine
