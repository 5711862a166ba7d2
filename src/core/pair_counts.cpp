#include "core/pair_counts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace ferry {
namespace {

void append(std::byte*& out, std::span<const std::int32_t> values) {
  if (!values.empty()) std::memcpy(out, values.data(), values.size_bytes());
  out += values.size_bytes();
}

std::vector<std::int32_t> values_at(const std::byte* in, std::size_t count) {
  std::vector<std::int32_t> values(count);
  if (count > 0) std::memcpy(values.data(), in, count * sizeof(std::int32_t));
  return values;
}

/// A dispatch of more rows is refused when it comes to memory for them.
std::int32_t narrow(std::int64_t row) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(std::min(row, kMost));
}

}  // namespace

PairCounts::PairCounts(RouteCounts own, const Placement& placement, const Domains& domains,
                       int rank) {
  const auto crossings = count_crossings(own, placement, domains, rank);
  plan_.placement = placement;
  plan_.rank = rank;
  plan_.own = std::move(own);
  place_own_tokens(plan_);
  plan_.recv_offset.push_back(0);
  crossing_ = begin_crossing_plan(plan_, domains, crossings);
  crossing_.feeder_row.push_back(0);
  crossing_.rail_row.resize(index(domains.count()));
}

std::size_t PairCounts::message_bytes(const Placement& placement, const Domains& domains) {
  std::size_t members = 0;
  for (int d = 0; domains.count() > 1 && d < domains.count(); ++d) {
    members = std::max(members, domains.members(d).size());
  }
  const std::size_t words = members + index(placement.local_experts(0));
  return std::max(sizeof(PairCountsHead) + words * sizeof(std::int32_t), sizeof(PairPlaces));
}

bool PairCounts::on_rail(int source, int target) const {
  const Domains& domains = crossing_.domains;
  return !domains.together(source, target) && domains.rail(source, domains.of(target)) == target;
}

std::size_t PairCounts::write(Step step, int peer, std::byte* out) const {
  switch (step) {
    case Step::counts: return write_counts(peer, out);
    case Step::places: return write_places(peer, out);
    case Step::rails: return write_rails(peer, out);
  }
  return 0;
}

bool PairCounts::read(Step step, int source, const std::byte* in) {
  switch (step) {
    case Step::counts: return read_counts(source, in);
    case Step::places: return read_places(source, in);
    case Step::rails: return read_rails(source, in);
  }
  return false;
}

std::size_t PairCounts::write_counts(int peer, std::byte* out) const {
  const std::byte* begin = out;
  const Domains& domains = crossing_.domains;
  const std::size_t domain = index(domains.of(peer));
  PairCountsHead head;
  head.sent_before = plan_.send_offset[index(peer)];
  head.sent_rows = plan_.send_offset.back();
  head.sum_row = crossing_.offset[domain];
  head.sums = crossing_.offset.back();
  head.tokens = plan_.own.tokens_per_rank[index(peer)];
  head.crossing = static_cast<std::int32_t>(crossing_.offset[domain + 1] - head.sum_row);
  std::memcpy(out, &head, sizeof(head));
  out += sizeof(head);
  const std::span slots(plan_.own.slots_per_expert);
  append(out, slots.subspan(index(plan_.placement.first_expert(peer)),
                            index(plan_.placement.local_experts(peer))));
  if (!on_rail(plan_.rank, peer)) return index(out - begin);
  for (const int member : domains.members(domains.of(peer))) {
    append(out, std::span(plan_.own.tokens_per_rank).subspan(index(member), 1));
  }
  return index(out - begin);
}

bool PairCounts::read_counts(int source, const std::byte* in) {
  PairCountsHead head;
  std::memcpy(&head, in, sizeof(head));
  in += sizeof(head);
  const std::size_t local = index(plan_.local_experts());
  const std::vector<std::int32_t> slots = values_at(in, local);
  const std::int64_t all = std::accumulate(slots.begin(), slots.end(), std::int64_t{0});
  const bool possible =
      head.tokens >= 0 && std::all_of(slots.begin(), slots.end(), [](int n) { return n >= 0; }) &&
      all >= head.tokens && all <= std::int64_t{head.tokens} * kMaxTopk && head.sent_before >= 0 &&
      head.sent_rows >= head.sent_before && head.sent_rows - head.sent_before >= head.tokens;
  if (!possible) return false;
  plan_.expert_slots.insert(plan_.expert_slots.end(), slots.begin(), slots.end());
  plan_.recv_offset.push_back(plan_.recv_offset.back() + head.tokens);
  plan_.peer_sent_before.push_back(head.sent_before);
  plan_.peer_sent_rows.push_back(head.sent_rows);
  if (!crossing_.domains.together(source, plan_.rank)) came_across_ += head.tokens;
  if (!on_rail(source, plan_.rank)) return true;
  if (head.sum_row < 0 || head.crossing < 0 || head.sums < head.sum_row ||
      head.sums - head.sum_row < head.crossing) {
    return false;
  }
  crossing_.feeder_sum_row.push_back(head.sum_row);
  crossing_.feeder_sums.push_back(head.sums);
  return read_feeder(head.tokens, head.crossing, in + local * sizeof(std::int32_t));
}

bool PairCounts::read_feeder(std::int32_t tokens, std::int32_t crossing, const std::byte* in) {
  const Domains& domains = crossing_.domains;
  const auto inside = values_at(in, domains.members(domains.of(plan_.rank)).size());
  const auto [least, most] = std::minmax_element(inside.begin(), inside.end());
  const std::int64_t all = std::accumulate(inside.begin(), inside.end(), std::int64_t{0});
  if (*least < 0 || inside[index(domains.index(plan_.rank))] != tokens || crossing < *most ||
      crossing > all) {
    return false;
  }
  crossing_.feeder_tokens.insert(crossing_.feeder_tokens.end(), inside.begin(), inside.end());
  crossing_.feeder_row.push_back(crossing_.feeder_row.back() + crossing);
  spread_ += all;
  return true;
}

CrossingCost PairCounts::own_cost() const {
  std::int64_t out = plan_.send_offset.back();
  for (const int member : crossing_.domains.members(crossing_.domains.of(plan_.rank))) {
    out -= plan_.send_rows(member);
  }
  return cost_of_rank(
      {out, came_across_, crossing_.offset.back(), crossing_.feeder_row.back(), spread_});
}

std::size_t PairCounts::write_places(int peer, std::byte* out) const {
  PairPlaces places;
  places.first_row = plan_.recv_offset[index(peer)];
  places.recv_rows = plan_.recv_rows();
  const int feeder = crossing_.feeder(peer);
  places.staging_row = feeder < 0 ? 0 : crossing_.feeder_row[index(feeder)];
  places.staging_rows = crossing_.feeder_row.back();
  places.cost = own_cost();
  std::memcpy(out, &places, sizeof(places));
  return sizeof(places);
}

bool PairCounts::read_places(int source, const std::byte* in) {
  PairPlaces places;
  std::memcpy(&places, in, sizeof(places));
  const std::size_t domain = index(crossing_.domains.of(source));
  const bool mine = on_rail(plan_.rank, source);
  const std::int64_t crossing = mine ? crossing_.offset[domain + 1] - crossing_.offset[domain] : 0;
  const auto fits = [](std::int64_t first, std::int64_t all, std::int64_t rows) {
    return first >= 0 && all >= first && all - first >= rows;
  };
  if (!fits(places.first_row, places.recv_rows, plan_.send_rows(source)) ||
      !fits(places.staging_row, places.staging_rows, crossing) || !(places.cost.direct >= 0) ||
      !(places.cost.hierarchical >= 0)) {
    return false;
  }
  plan_.peer_row.push_back(places.first_row);
  plan_.peer_recv_rows.push_back(places.recv_rows);
  crossing_.staging_rows.push_back(places.staging_rows);
  if (mine) crossing_.rail_row[domain] = places.staging_row;
  cost_.direct = std::max(cost_.direct, places.cost.direct);
  cost_.hierarchical = std::max(cost_.hierarchical, places.cost.hierarchical);
  return true;
}

std::size_t PairCounts::write_rails(int peer, std::byte* out) const {
  if (!on_rail(plan_.rank, peer)) return 0;
  const std::byte* begin = out;
  for (const int member : crossing_.domains.members(crossing_.domains.of(peer))) {
    const std::int32_t row = narrow(plan_.peer_row[index(member)]);
    append(out, {&row, 1});
  }
  return index(out - begin);
}

bool PairCounts::read_rails(int source, const std::byte* in) {
  if (!on_rail(source, plan_.rank)) return true;
  const Domains& domains = crossing_.domains;
  const std::vector<int>& members = domains.members(domains.of(plan_.rank));
  const auto first = values_at(in, members.size());
  const auto tokens = crossing_.tokens_inside(index(crossing_.feeder(source)));
  for (std::size_t m = 0; m < members.size(); ++m) {
    const std::int64_t row = first[m];
    if (row < 0 || row + tokens[m] > plan_.peer_recv_rows[index(members[m])]) return false;
    if (members[m] == plan_.rank && row != narrow(plan_.recv_offset[index(source)])) return false;
    crossing_.feeder_first.push_back(row);
  }
  return true;
}

CrossingPlan PairCounts::take_crossing(Crossing wanted) {
  crossing_.chosen = chosen_crossing(crossing_.domains, cost_, wanted);
  return std::move(crossing_);
}

}  // namespace ferry
