// Dispatched rows on their way to other domains, and from there.
#include <algorithm>
#include <array>
#include <cstring>

#include "cuda/latency/proxy/crossing.hpp"

namespace ferry::cuda {
namespace {

/// In a flag: the generation came without anything, for the source goes without this rank.
constexpr std::uint32_t kNothing = (1u << kCrossingShift) - 1;

bool is_format(std::uint32_t format) {
  return (format & 0xff) <= static_cast<std::uint32_t>(LatencyFormat::e4m3_packed) &&
         (format & ~(0xffu | kWithWeights)) == 0;
}

}  // namespace

bool LatencyCrossing::send_dispatch(Peer& peer) {
  if (peer.dispatch.begun != peer.sent + 1 && !begin_dispatch(peer)) return false;
  const Generation g = peer.sent + 1;
  const LatencyPlaces at{v_, g};
  Way& way = peer.dispatch;
  const std::size_t before = way.pending.size();
  std::erase_if(way.pending, [&](const Entry& entry) {
    if (!has_row(at, peer, entry.token)) return false;
    put_record(peer, at, &entry);
    return true;
  });
  if (!way.pending.empty()) return way.pending.size() != before;
  if (way.kind != kNothing && peer.out[g % 2].entries.empty()) put_record(peer, at, nullptr);
  peer.sent = g;
  tell(peer, CrossingKind::rows, g, way.kind, way.bytes);
  return true;
}

/// Finds the header of the next dispatch in the outbox. False: not all of it is there.
bool LatencyCrossing::begin_dispatch(Peer& peer) {
  const Generation g = peer.sent + 1;
  const LatencyPlaces at{v_, g};
  // A kernel that goes without the peer does not wait for its credit: this does.
  if (g > 2 && load_word(at.released(inbox(), peer.rank)) < g - 2) return false;
  const std::uint64_t* head = at.header(outbox(), peer.rank);
  const std::uint64_t first = load_word(head), second = load_word(head + 1);
  const auto ahead = static_cast<std::int32_t>(static_cast<std::uint32_t>(first >> 32) - at.tag());
  Way way;
  way.begun = g;
  way.kind = kNothing;
  if (ahead < 0) return false;
  // Weights that a combine pushed before this dispatch are all there now. The peer must have them
  // before it forgets what they are of, and later ones have the same place.
  (void)send_weights(peer, at.parity());
  if (!may_put(peer, CrossingKind::weights, peer.weights_out[at.parity()], g)) return false;
  // A later one here: this one had left the peer out.
  if (ahead == 0) {
    if (!is_word_of(second, g)) return false;
    peer.refused = static_cast<std::uint32_t>(second);
    if (peer.refused != kLeftOut) {
      peer.tokens = static_cast<std::uint32_t>(head_tokens(static_cast<std::uint32_t>(first)));
      peer.format = head_format(static_cast<std::uint32_t>(first));
      if (!list_own(peer, at)) return false;
      way.kind = peer.format;
      way.pending = peer.out[g % 2].entries;
    }
  }
  if (way.kind == kNothing) peer.out[g % 2] = {g, {}};
  peer.dispatch = std::move(way);
  return true;
}

/// Which tokens of this rank go there. False: not all words are there.
bool LatencyCrossing::list_own(Peer& peer, const LatencyPlaces& at) {
  const auto topk = static_cast<std::uint32_t>(v_.topk);
  const std::uint64_t* places = at.places(outbox(), peer.rank);
  const std::uint64_t* weights = at.header_weights(outbox(), peer.rank);
  const bool weighted = (peer.format & kWithWeights) != 0;
  Listing listing;
  listing.generation = at.generation;
  for (std::uint32_t token = 0; token < peer.tokens; ++token) {
    std::uint32_t slots = 0;
    for (std::uint32_t k = 0; k < topk; ++k) {
      const std::uint32_t i = token * topk + k;
      const std::uint64_t place = load_word(places + i);
      if (!is_word_of(place, at.generation)) return false;
      if (weighted && !is_word_of(load_word(weights + i), at.generation)) return false;
      if (static_cast<std::uint32_t>(place) != kNoPlace) slots |= 1u << k;
    }
    if (slots != 0) listing.entries.push_back({token, slots});
  }
  peer.out[at.parity()] = std::move(listing);
  return true;
}

bool LatencyCrossing::has_row(const LatencyPlaces& at, const Peer& peer,
                              std::uint32_t token) const {
  const std::uint32_t* tags = at.row_tags(outbox(), peer.rank, token);
  return std::all_of(tags, tags + v_.parts,
                     [&](const std::uint32_t& tag) { return load_word(&tag) == at.tag(); });
}

/// One write: all that belongs to the row, then the row with its scales. `entry` null: in place of
/// rows where there are none.
void LatencyCrossing::put_record(Peer& peer, const LatencyPlaces& at, const Entry* entry) {
  const bool weighted = (peer.format & kWithWeights) != 0;
  const auto topk = static_cast<std::size_t>(v_.topk);
  const std::uint32_t token = entry != nullptr ? entry->token : 0;
  const std::uint64_t rows_tag = tag(CrossingKind::rows, at.generation);
  LatencyRecord record;
  record.generation = at.generation;
  record.tokens = peer.tokens;
  record.refused = peer.refused;
  record.rows = static_cast<std::uint32_t>(peer.out[at.parity()].entries.size());
  const protocol::Place to = there(record_of(at.row(inbox(), rank_, token)));
  if (entry == nullptr) {
    parts_.reach.write(peer.rank, to, &record, sizeof(record), rows_tag);
    peer.dispatch.bytes += sizeof(record);
    return;
  }
  packed_.assign(v_.layout.record_bytes, std::byte{0});
  std::memcpy(packed_.data(), &record, sizeof(record));
  const std::uint64_t* places = at.places(outbox(), peer.rank) + token * topk;
  const std::uint64_t* weights = at.header_weights(outbox(), peer.rank) + token * topk;
  auto* words = reinterpret_cast<std::uint32_t*>(packed_.data() + sizeof(record));
  for (std::size_t k = 0; k < topk; ++k) {
    words[k] = static_cast<std::uint32_t>(load_word(places + k));
    if (weighted) words[topk + k] = static_cast<std::uint32_t>(load_word(weights + k));
  }
  const std::size_t row = row_bytes(peer.format);
  const std::array<fabric::Piece, 2> pieces{
      {{packed_.data(), packed_.size()}, {at.row(outbox(), peer.rank, token), row}}};
  parts_.reach.write_pieces(peer.rank, to, pieces, rows_tag);
  peer.dispatch.bytes += packed_.size() + row;
}

bool LatencyCrossing::take_dispatch(Peer& peer) {
  const Generation g = peer.came + 1;
  const LatencyPlaces at{v_, g};
  const std::uint64_t word = load_word(flag(CrossingKind::rows, at.parity(), peer.rank));
  if (word >> kCrossingShift < g) return false;
  const auto format = static_cast<std::uint32_t>(word & kNothing);
  if (format == kRejoined) return false;  // which this rank's kernel has not, so far
  if (word >> kCrossingShift != g)
    throw_violation(peer, "sent a dispatch that this rank gave no credit for");
  cut_sums(peer, at.parity());
  Listing& in = peer.in[at.parity()];
  in = {g, {}};
  peer.came = g;
  if (format == kNothing) return true;
  if (!is_format(format)) throw_violation(peer, "sent rows of no known format");
  const LatencyRecord* first = find_record(at, peer);
  if (first == nullptr || first->tokens > v_.capacity || first->rows > first->tokens) {
    throw_violation(peer, "sent no record of its tokens, or counts that cannot be");
  }
  for (std::uint32_t token = 0; token < first->tokens && first->rows > 0; ++token) {
    const auto* record = record_at(at, peer, token);
    if (record->generation != g) continue;
    const auto* places = reinterpret_cast<const std::uint32_t*>(record + 1);
    std::uint32_t slots = 0;
    for (int k = 0; k < v_.topk; ++k) {
      if (places[k] != kNoPlace) slots |= 1u << k;
    }
    in.entries.push_back({token, slots});
  }
  if (in.entries.size() != first->rows) throw_violation(peer, "sent other rows than it counted");
  fill_header(peer, at, *first, format);
  return true;
}

const LatencyRecord* LatencyCrossing::record_at(const LatencyPlaces& at, const Peer& peer,
                                                std::int64_t token) const {
  return reinterpret_cast<const LatencyRecord*>(record_of(at.row(inbox(), peer.rank, token)));
}

/// Any of the generation; null: there is none.
const LatencyRecord* LatencyCrossing::find_record(const LatencyPlaces& at, const Peer& peer) const {
  for (std::int64_t token = 0; token < v_.capacity; ++token) {
    const LatencyRecord* record = record_at(at, peer, token);
    if (record->generation == at.generation) return record;
  }
  return nullptr;
}

/// What the peer's kernel would have written: kernels check it, as that of any peer.
void LatencyCrossing::fill_header(const Peer& peer, const LatencyPlaces& at,
                                  const LatencyRecord& first, std::uint32_t format) const {
  const Generation g = at.generation;
  const auto topk = static_cast<std::size_t>(v_.topk);
  const auto experts = static_cast<std::size_t>(v_.placement.local_experts(rank_));
  const bool weighted = (format & kWithWeights) != 0;
  std::vector<std::uint32_t> numbers(experts);
  std::uint64_t* places = at.places(inbox(), peer.rank);
  std::uint64_t* weights = at.header_weights(inbox(), peer.rank);
  auto entry = peer.in[at.parity()].entries.begin();
  const auto end = peer.in[at.parity()].entries.end();
  for (std::uint32_t token = 0; token < first.tokens; ++token) {
    const bool here = entry != end && entry->token == token;
    const auto* words = reinterpret_cast<const std::uint32_t*>(record_at(at, peer, token) + 1);
    for (std::size_t k = 0; k < topk; ++k) {
      const std::uint32_t place = here ? words[k] : kNoPlace;
      if (place != kNoPlace && place >> 16 < experts) ++numbers[place >> 16];
      store_word(places + token * topk + k, tagged_word(place, g));
      if (!weighted) continue;
      store_word(weights + token * topk + k, tagged_word(here ? words[topk + k] : 0, g));
    }
    if (!here) continue;
    std::uint32_t* tags = at.row_tags(inbox(), peer.rank, token);
    for (int part = 0; part < v_.parts; ++part) store_word(tags + part, at.tag());
    ++entry;
  }
  for (std::size_t e = 0; e < experts; ++e) {
    store_word(at.numbers(inbox(), peer.rank) + e, tagged_word(numbers[e], g));
  }
  std::uint64_t* head = at.header(inbox(), peer.rank);
  const std::uint32_t tokens = first.refused != 0 ? 0 : first.tokens;
  store_word(head, tagged_word(make_head(static_cast<int>(tokens), format), g));
  store_word(head + 1, tagged_word(first.refused, g));
}

}  // namespace ferry::cuda
