// A combine's rows between domains: weights ahead of them, and the rows that their owner sums.
#include <algorithm>
#include <bit>

#include "cuda/latency/proxy/crossing.hpp"

namespace ferry::cuda {
namespace {

// How a combine sums, in a flag and in the tags of its rows: the bits above kFormatShift.
constexpr std::uint32_t kPerSlot = kPerSlotTag >> kFormatShift;
/// In a flag: a later dispatch came before all rows had been made. Nobody waits for them.
constexpr std::uint32_t kCut = 0xffff;

CombineFormat format_of(std::uint32_t kind) {
  return static_cast<CombineFormat>(kind & ~kPerSlot);
}
bool is_kind(std::uint32_t kind) {
  return (kind & ~kPerSlot) <= static_cast<std::uint32_t>(CombineFormat::logfmt10);
}
std::uint32_t tag_of(const LatencyPlaces& at, std::uint32_t kind) {
  return at.tag() ^ kind << kFormatShift;
}

std::size_t sum_bytes(const LatencyView& view, std::uint32_t kind) {
  switch (format_of(kind)) {
    case CombineFormat::e4m3: return view.layout.encoded.e4m3_bytes;
    case CombineFormat::logfmt10: return view.layout.encoded.logfmt_bytes;
    case CombineFormat::as_is: break;
  }
  return static_cast<std::size_t>(view.hidden) * size_of(view.dtype);
}
std::byte* sum_at(const LatencyPlaces& at, std::uint32_t kind, std::byte* base, int row,
                  std::uint32_t token) {
  if (format_of(kind) != CombineFormat::as_is) return at.encoded_sum(base, row, token);
  return at.sum(base, row, token, sum_bytes(at.v, kind));
}

/// calls `visit(slot)` in ascending order.
template <class Visit>
void for_each_slot(std::uint32_t slots, const Visit& visit) {
  for (; slots != 0; slots &= slots - 1) visit(std::countr_zero(slots));
}

}  // namespace

// Weights: from the owner of the tokens to the ranks of their experts.

/// Those that were not sent before. False: not all are there.
bool LatencyCrossing::find_weights(const Peer& peer, std::size_t parity,
                                   std::vector<float>& weights) const {
  const Listing& out = peer.out[parity];
  if (out.entries.empty() || peer.weights_out[parity].flagged >= out.generation) return false;
  if (peer.sent < out.generation) return false;
  const LatencyPlaces at{v_, out.generation};
  const std::uint64_t* words = at.weights(outbox(), peer.rank);
  const Entry& first = out.entries.front();
  const int slot = std::countr_zero(first.slots);
  if (!is_word_of(load_word(words + first.token * static_cast<std::size_t>(v_.topk) + slot),
                  out.generation)) {
    return false;  // most often
  }
  for (const Entry& entry : out.entries) {
    bool here = true;
    for_each_slot(entry.slots, [&](int k) {
      const std::uint64_t* word = words + entry.token * static_cast<std::size_t>(v_.topk) + k;
      const std::uint64_t seen = load_word(word);
      here = here && is_word_of(seen, out.generation);
      weights.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(seen)));
    });
    if (!here) return false;
  }
  return true;
}

bool LatencyCrossing::send_weights(Peer& peer, std::size_t parity) {
  std::vector<float> weights;
  if (!find_weights(peer, parity, weights)) return false;
  const Generation g = peer.out[parity].generation;
  Way& way = peer.weights_out[parity];
  const std::size_t bytes = weights.size() * sizeof(float);
  parts_.reach.write(peer.rank, there(weights_of(parity, rank_)), weights.data(), bytes,
                     tag(CrossingKind::weights, g));
  way.flagged = g;
  tell(peer, CrossingKind::weights, g, 0, bytes);
  return true;
}

bool LatencyCrossing::take_weights(Peer& peer, std::size_t parity) {
  const Generation g = load_word(flag(CrossingKind::weights, parity, peer.rank)) >> kCrossingShift;
  Way& way = peer.weights_in[parity];
  const Listing& in = peer.in[parity];
  if (g <= way.flagged || g > peer.came) return false;
  if (in.generation == g) {
    const LatencyPlaces at{v_, g};
    std::uint64_t* words = at.weights(inbox(), peer.rank);
    const float* from = weights_of(parity, peer.rank);
    for (const Entry& entry : in.entries) {
      for_each_slot(entry.slots, [&](int k) {
        store_word(words + entry.token * static_cast<std::size_t>(v_.topk) + k,
                   tagged_word(std::bit_cast<std::uint32_t>(*from++), g));
      });
    }
  }
  way.flagged = g;
  acknowledge(peer, CrossingKind::weights, g);
  return true;
}

// Sums: back to the owner.

bool LatencyCrossing::send_sums(Peer& peer, std::size_t parity) {
  const Listing& in = peer.in[parity];
  Way& way = peer.sums_out[parity];
  if (in.entries.empty() || way.flagged >= in.generation) return false;
  if (way.begun != in.generation && !begin_sums(peer, parity)) return false;
  const LatencyPlaces at{v_, in.generation};
  bool active = false;
  std::erase_if(way.pending, [&](Entry& entry) {
    active |= put_sums(peer, at, entry, way);
    return entry.slots == 0;
  });
  if (!way.pending.empty()) return active;
  way.flagged = in.generation;
  tell(peer, CrossingKind::sums, in.generation, way.kind, way.bytes);
  return true;
}

/// Which way this combine goes, by the tag of the first row that is there. False: there is none.
bool LatencyCrossing::begin_sums(Peer& peer, std::size_t parity) {
  const Listing& in = peer.in[parity];
  Way& way = peer.sums_out[parity];
  const LatencyPlaces at{v_, in.generation};
  for (const Entry& entry : in.entries) {
    for (const bool slots : {false, true}) {
      if (slots && v_.layout.sum_blocks == 1) continue;
      const int row =
          slots ? first_slot_row(v_.layout, peer.rank, v_.topk) + std::countr_zero(entry.slots)
                : peer.rank;
      const std::uint32_t seen = load_word(at.sum_tags(outbox(), row, entry.token));
      const std::uint32_t kind = (seen ^ at.tag()) >> kFormatShift;
      if (((seen ^ at.tag()) & kGenerationTag) != 0 || !is_kind(kind)) continue;
      if ((kind & kPerSlot) != (slots ? kPerSlot : 0)) continue;
      if (!may_put(peer, CrossingKind::sums, way, in.generation)) return false;
      way.begun = in.generation;
      way.kind = kind;
      way.bytes = 0;
      way.pending = in.entries;
      return true;
    }
  }
  return false;
}

/// Puts what is there of a token's rows; the slots that are left stay in `entry`.
bool LatencyCrossing::put_sums(Peer& peer, const LatencyPlaces& at, Entry& entry, Way& way) {
  const std::uint32_t expected = tag_of(at, way.kind);
  const std::size_t bytes = sum_bytes(v_, way.kind);
  const bool slots = (way.kind & kPerSlot) != 0;
  const auto put = [&](int from_row, int to_row) {
    const std::uint32_t* tags = at.sum_tags(outbox(), from_row, entry.token);
    const bool here = std::all_of(tags, tags + v_.parts, [&](const std::uint32_t& part) {
      return load_word(&part) == expected;
    });
    if (!here) return false;
    parts_.reach.write(peer.rank, there(sum_at(at, way.kind, inbox(), to_row, entry.token)),
                       sum_at(at, way.kind, outbox(), from_row, entry.token), bytes,
                       tag(CrossingKind::sums, at.generation));
    way.bytes += bytes;
    return true;
  };
  if (!slots) {
    if (!put(peer.rank, rank_)) return false;
    entry.slots = 0;
    return true;
  }
  const int first = first_slot_row(v_.layout, peer.rank, v_.topk);
  const std::uint32_t before = entry.slots;
  for_each_slot(before, [&](int k) {
    if (put(first + k, k)) entry.slots &= ~(1u << k);
  });
  return entry.slots != before;
}

/// Before the peer's next dispatch takes the place of this one. What was put is counted, so that
/// its landing can be acknowledged.
void LatencyCrossing::cut_sums(Peer& peer, std::size_t parity) {
  Way& way = peer.sums_out[parity];
  if (way.begun <= way.flagged) return;
  way.flagged = way.begun;
  tell(peer, CrossingKind::sums, way.begun, kCut, way.bytes);
}

bool LatencyCrossing::take_sums(Peer& peer, std::size_t parity) {
  const std::uint64_t word = load_word(flag(CrossingKind::sums, parity, peer.rank));
  const Generation g = word >> kCrossingShift;
  const auto kind = static_cast<std::uint32_t>(word & kCut);
  Way& way = peer.sums_in[parity];
  if (g <= way.flagged || kind == kRejoined) return false;
  if (g > peer.sent || (kind != kCut && !is_kind(kind))) {
    throw_violation(peer, "sent sums of a dispatch that it did not get, or of no known format");
  }
  const Listing& out = peer.out[parity];
  if (out.generation == g && kind != kCut) {
    const LatencyPlaces at{v_, g};
    const auto set = [&](int row, std::uint32_t token) {
      std::uint32_t* tags = at.sum_tags(inbox(), row, token);
      for (int part = 0; part < v_.parts; ++part) store_word(tags + part, tag_of(at, kind));
    };
    for (const Entry& entry : out.entries) {
      if ((kind & kPerSlot) == 0) {
        set(peer.rank, entry.token);
      } else {
        for_each_slot(entry.slots, [&](int k) { set(k, entry.token); });
      }
    }
  }
  way.flagged = g;
  acknowledge(peer, CrossingKind::sums, g);
  return true;
}

}  // namespace ferry::cuda
