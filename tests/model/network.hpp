// A network in the explorer: a put falls into pieces, pieces and signals of one source arrive in
// any order, and the production bookkeeping (protocol/counted_signal.hpp) at the target makes flags
// of them. Each link and channel is an actor of its own: a piece knows what its sender knew when it
// sent it, and nothing of the other pieces.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "explorer.hpp"
#include "protocol/counted_signal.hpp"
#include "protocol/reach.hpp"

namespace ferry::model {

template <class Traits = protocol::CountedTraits>
class Network : public Wire {
 public:
  static constexpr std::size_t kPieceBytes = 8;

  /// `channels`: at most those that the protocol under test uses; `fibers`: actors below these.
  Network(int ranks, int fibers, std::vector<protocol::Channel> channels)
      : ranks_(ranks), fibers_(fibers), channels_(std::move(channels)) {
    reset();
  }

  void reset() {
    links_.assign(static_cast<std::size_t>(ranks_ * ranks_), Link{});
    words_.clear();
    targets_.assign(static_cast<std::size_t>(ranks_), Counted(ranks_));
    hash_ = 0;
  }

  void write(int source, int target, std::byte* to, const void* from, std::size_t bytes,
             std::uint64_t tag) {
    for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
      Item item = make_item(source, target, tag);
      item.to = to + at;
      item.bytes = std::min(kPieceBytes, bytes - at);
      std::memcpy(item.data.data(), static_cast<const std::byte*>(from) + at, item.bytes);
      link(source, target).under_way.push_back(item);
    }
  }

  void publish(int source, int target, std::uint64_t* word, const protocol::Signal& signal) {
    Explorer::current().send_point(signal.tag * 31 + static_cast<std::uint64_t>(target));
    Item item = make_item(source, target, signal.tag);
    Link& on = link(source, target);
    item.is_signal = true;
    item.signal = {++on.sequences[word], word, signal.value, signal.tag, signal.bytes};
    on.under_way.push_back(item);
    words_[word] = {source, target};
  }

  int pending(const void* word) const override {
    const auto it = words_.find(word);
    if (it == words_.end()) return 0;
    return static_cast<int>(link(it->second.source, it->second.target).under_way.size());
  }

  void deliver(const void* word, int index) override {
    const Ends ends = words_.find(word)->second;
    deliver_item(ends, index);
  }

  void drain() override {
    for (int source = 0; source < ranks_; ++source) {
      for (int target = 0; target < ranks_; ++target) {
        while (!link(source, target).under_way.empty()) deliver_item({source, target}, 0);
      }
    }
  }

  std::uint64_t hash() const override { return hash_; }

 private:
  using Counted = protocol::CountedSignals<std::uint64_t*, Traits>;

  struct Ends {
    int source, target;
  };
  struct Item {
    bool is_signal = false;
    int actor = 0;
    std::uint16_t tick = 0;  // its number on the link and channel, in the order of sending
    Clock sent;
    std::uint64_t tag = 0;
    std::byte* to = nullptr;
    std::size_t bytes = 0;
    std::array<std::byte, kPieceBytes> data{};
    typename Counted::Arrived signal;
  };
  struct Link {
    std::vector<Item> under_way;
    std::array<std::uint16_t, 8> sent{};  // by channel
    std::map<std::uint64_t*, std::uint64_t> sequences;
    std::map<std::uint64_t, Clock> landed;     // by tag: what the landed pieces know
    std::map<std::uint64_t*, Clock> released;  // by flag: what its last value knew
    std::map<std::uint64_t, Item> signals;     // arrived, by tag
  };

  Link& link(int source, int target) {
    return links_[static_cast<std::size_t>(source * ranks_ + target)];
  }
  const Link& link(int source, int target) const {
    return links_[static_cast<std::size_t>(source * ranks_ + target)];
  }

  Item make_item(int source, int target, std::uint64_t tag) {
    std::size_t channel = 0;
    while (channel < channels_.size() &&
           static_cast<std::uint64_t>(channels_[channel]) != tag >> 56) {
      ++channel;
    }
    if (channel == channels_.size()) Explorer::current().fail("a channel that the test left out");
    Item item;
    item.actor = fibers_ + (source * ranks_ + target) * static_cast<int>(channels_.size()) +
                 static_cast<int>(channel);
    if (item.actor >= kObserver) Explorer::current().fail("too many actors");
    item.tick = ++link(source, target).sent[channel];
    item.sent = Explorer::current().snapshot();
    item.tag = tag;
    return item;
  }

  void deliver_item(Ends ends, int index) {
    Explorer& explorer = Explorer::current();
    Link& on = link(ends.source, ends.target);
    const Item item = on.under_way[static_cast<std::size_t>(index)];
    on.under_way.erase(on.under_way.begin() + index);
    const auto actor = static_cast<std::size_t>(item.actor);
    hash_ += (actor * 65536 + item.tick + 1) * 0x9e3779b97f4a7c15ull * (actor * 2 + 1);
    if (explorer.tracing()) {
      explorer.note("  the network delivers a " + std::string(item.is_signal ? "signal" : "piece") +
                    " of rank " + std::to_string(ends.source) + ", generation " +
                    std::to_string(item.tag & 0xffffffff));
    }
    const auto release = [&](int, const typename Counted::Arrived& arrived) {
      const Item& signal = on.signals.at(arrived.tag);
      Clock& known = on.released[arrived.flag];
      known.join(signal.sent);
      known.join(on.landed[arrived.tag]);
      explorer.act_as(signal.actor, known, signal.tick, [&] {
        protocol::publish_in_memory<>(protocol::Flag{arrived.flag}, arrived.value);
      });
      known.at[static_cast<std::size_t>(signal.actor)] = signal.tick;
    };
    Counted& counted = targets_[static_cast<std::size_t>(ends.target)];
    if (item.is_signal) {
      on.signals[item.tag] = item;
      if (!counted.signal(ends.source, item.signal, release).ok()) explorer.fail("signal refused");
    } else {
      explorer.act_as(item.actor, item.sent, item.tick,
                      [&] { protocol::write_bytes(item.to, item.data.data(), item.bytes); });
      Clock& landed = on.landed[item.tag];
      landed.join(item.sent);
      landed.at[actor] = std::max(landed.at[actor], item.tick);
      counted.piece(ends.source, item.tag, item.bytes, release);
    }
  }

  int ranks_;
  int fibers_;
  std::vector<protocol::Channel> channels_;
  std::vector<Link> links_;
  std::map<const void*, Ends> words_;
  std::vector<Counted> targets_;
  std::uint64_t hash_ = 0;
};

}  // namespace ferry::model
