#include "core/crossing_lists.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ferry {
namespace {

/// The rank of another domain to which a row for `target` crosses.
int landing(const CrossingPlan& crossing, Crossing how, int source, int target) {
  return how == Crossing::direct ? target
                                 : crossing.domains.rail(source, crossing.domains.of(target));
}

/// Appends domain tokens, source after source.
class Builder {
 public:
  Builder(const ExchangePlan& plan, std::span<const int> inside, Crossing how)
      : plan_(plan),
        inside_(inside),
        how_(how),
        member_of_(index(plan.ranks()), -1),
        first_(plan, inside),
        brought_(inside.size()),
        filled_(inside.size()) {
    std::int64_t experts = 0;
    for (std::size_t m = 0; m < inside.size(); ++m) {
      member_of_[index(inside[m])] = static_cast<int>(m);
      first_expert_.push_back(static_cast<std::int32_t>(experts));
      experts += plan.placement.local_experts(inside[m]);
    }
    made_.first.push_back(0);
  }

  void begin(int source) {
    source_ = source;
    std::fill(filled_.begin(), filled_.end(), 0);
    const std::vector<std::int64_t>& first = first_.of(source);
    for (std::size_t m = 0; m < brought_.size(); ++m) {
      made_.shift.push_back(static_cast<std::int32_t>(first[m] - brought_[m]));
    }
    made_.sources.push_back(source);
  }

  /// One token with its global ids. False: an id cannot be.
  bool add(std::int32_t from, std::int32_t name, std::span<const std::int32_t> ids) {
    std::vector<int>& members = named_;
    members.clear();
    for (const std::int32_t id : ids) {
      if (id < -1 || id >= plan_.placement.experts) return false;
      if (id < 0) continue;
      const int target = plan_.placement.rank_of(id);
      if (member_of(target) < 0) continue;
      if (source_ != plan_.rank && how_ == Crossing::direct && target != plan_.rank) continue;
      members.push_back(member_of(target));
    }
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    if (members.empty()) return source_ == plan_.rank;
    for (const int member : members) ++filled_[index(member)];
    if (how_ == Crossing::direct) {
      for (const int member : members) append(from, name, ids, member);
    } else {
      append(from, name, ids, -1);
    }
    return true;
  }

  /// False: not the rows that the source counted.
  bool end() {
    for (std::size_t m = 0; m < filled_.size(); ++m) {
      const int member = inside_[m];
      const bool comes =
          source_ == plan_.rank || how_ == Crossing::hierarchical || member == plan_.rank;
      if (filled_[m] != (comes ? plan_.tokens_of(source_, member) : 0)) return false;
      brought_[m] += filled_[m];
    }
    made_.first.push_back(made_.count());
    return true;
  }

  DomainTokens& made() { return made_; }

 private:
  /// The rank's number inside the domain, or −1.
  int member_of(int rank) const { return member_of_[index(rank)]; }
  /// `only`: the experts of this member alone, or −1.
  void append(std::int32_t from, std::int32_t name, std::span<const std::int32_t> ids, int only) {
    made_.from.push_back(from);
    made_.names.push_back(name);
    for (const std::int32_t id : ids) {
      std::int32_t inside = -1;
      if (id >= 0) {
        const int target = plan_.placement.rank_of(id);
        const int member = member_of(target);
        if (member >= 0 && (only < 0 || only == member)) {
          inside = first_expert_[index(member)] +
                   static_cast<std::int32_t>(id - plan_.placement.first_expert(target));
        }
      }
      made_.ids.push_back(inside);
    }
  }

  const ExchangePlan& plan_;
  std::span<const int> inside_;
  Crossing how_;
  std::vector<int> member_of_;  // [R]
  FirstRows first_;
  std::vector<std::int64_t> brought_;  // to each member, by the sources so far
  std::vector<std::int64_t> filled_;   // by this one
  std::vector<std::int32_t> first_expert_{};
  std::vector<int> named_{};
  int source_ = -1;
  DomainTokens made_{};
};

struct Part {
  std::int64_t order;  // rank or domain
  std::int32_t row;
};

/// What each own token's result is the sum of.
void list_sums(const ExchangePlan& plan, const CrossingPlan& crossing, const CrossingLists& lists,
               DomainTokens& made) {
  std::vector<std::vector<Part>> parts(index(plan.own.tokens));
  const auto order = [&](int rank) {
    return lists.how == Crossing::direct ? rank : crossing.domains.of(rank);
  };
  for (std::int64_t v = 0; v < made.own(); ++v) {
    const std::int32_t token = made.from[index(v)];
    // Of a token, direct copies come by ascending rank of this domain.
    parts[index(token)].push_back({-1, static_cast<std::int32_t>(v)});
  }
  for (std::size_t t = 0; t < parts.size(); ++t) {
    std::vector<std::int64_t> here;
    for (std::int64_t l = plan.destination_offset[t]; l < plan.destination_offset[t + 1]; ++l) {
      const int target = plan.destinations[index(l)].rank;
      if (crossing.domains.together(target, plan.rank)) here.push_back(order(target));
    }
    for (std::size_t i = 0; i < parts[t].size(); ++i) parts[t][i].order = here[i];
  }
  std::int32_t row = 0;
  for (const CrossingBlock& block : lists.out) {
    for (std::int64_t i = 0; i < block.rows; ++i, ++row) {
      parts[index(lists.tokens[index(row)])].push_back({order(block.rank), -1 - row});
    }
  }
  made.sum_offset.push_back(0);
  for (std::vector<Part>& of : parts) {
    std::sort(of.begin(), of.end(), [](const Part& a, const Part& b) { return a.order < b.order; });
    for (const Part& part : of) made.sums.push_back(part.row);
    made.sum_offset.push_back(static_cast<std::int64_t>(made.sums.size()));
  }
}

}  // namespace

std::int64_t crossing_rows(const ExchangePlan& plan, const CrossingPlan& crossing, Crossing how,
                           int source, int target) {
  const Domains& domains = crossing.domains;
  if (domains.together(source, target)) return 0;
  if (how == Crossing::direct) return plan.tokens_of(source, target);
  const int domain = domains.of(target);
  return domains.rail(source, domain) == target ? crossing.crossing(source, domain) : 0;
}

std::vector<std::int64_t> tokens_after(const CrossingLists& lists, const CrossingLayout& layout,
                                       std::int64_t tokens, int portions) {
  std::vector<std::int64_t> ends;
  for (int portion = 0; portion < portions; ++portion) {
    std::int64_t end = tokens, first = 0;
    for (const CrossingBlock& block : lists.out) {
      const std::int64_t rows = rows_after(layout, block.rows, portion, portions);
      if (rows < block.rows) {
        end = std::min(end, std::int64_t{lists.tokens[index(first + rows)]});
      }
      first += block.rows;
    }
    ends.push_back(end);
  }
  return ends;
}

std::int64_t CrossingLists::in_rows() const {
  return std::accumulate(
      in.begin(), in.end(), std::int64_t{0},
      [](std::int64_t sum, const CrossingBlock& block) { return sum + block.rows; });
}

CrossingLists make_crossing_lists(const ExchangePlan& plan, const CrossingPlan& crossing,
                                  Crossing how) {
  CrossingLists lists;
  lists.how = how;
  std::vector<std::vector<std::int32_t>> to(index(plan.ranks()));
  for (std::int64_t token = 0; token < plan.own.tokens; ++token) {
    for (std::int64_t l = plan.destination_offset[index(token)];
         l < plan.destination_offset[index(token + 1)]; ++l) {
      const int target = plan.destinations[index(l)].rank;
      if (crossing.domains.together(target, plan.rank)) continue;
      auto& list = to[index(landing(crossing, how, plan.rank, target))];
      const auto name = static_cast<std::int32_t>(token);
      if (list.empty() || list.back() != name) list.push_back(name);
    }
  }
  for (int peer = 0; peer < plan.ranks(); ++peer) {
    const auto& list = to[index(peer)];
    if (!list.empty()) lists.out.push_back({peer, static_cast<std::int64_t>(list.size())});
    lists.tokens.insert(lists.tokens.end(), list.begin(), list.end());
    const std::int64_t rows = crossing_rows(plan, crossing, how, peer, plan.rank);
    if (rows > 0) lists.in.push_back({peer, rows});
  }
  return lists;
}

DomainTokens make_domain_tokens(const ExchangePlan& plan, const CrossingPlan& crossing,
                                std::span<const int> inside, const CrossingLists& lists,
                                std::span<const CrossedRoutes> routes) {
  Builder builder(plan, inside, lists.how);
  const auto topk = index(plan.own.topk);
  const auto failed = [](int offender) {
    DomainTokens none;
    none.offender = offender;
    return none;
  };
  builder.begin(plan.rank);
  for (std::int64_t token = 0; token < plan.own.tokens; ++token) {
    const auto name = static_cast<std::int32_t>(token);
    const auto ids = std::span(plan.own.topk_idx).subspan(index(token) * topk, topk);
    if (!builder.add(name, name, ids)) return failed(plan.rank);
  }
  if (!builder.end()) return failed(plan.rank);
  std::int32_t row = 0;
  for (std::size_t block = 0; block < lists.in.size(); ++block) {
    const int source = lists.in[block].rank;
    builder.begin(source);
    for (std::int64_t i = 0; i < lists.in[block].rows; ++i, ++row) {
      if (!builder.add(-1 - row, routes[block].tokens[index(i)],
                       routes[block].ids.subspan(index(i) * topk, topk))) {
        return failed(source);
      }
    }
    if (!builder.end()) return failed(source);
  }
  DomainTokens made = std::move(builder.made());
  list_sums(plan, crossing, lists, made);
  return made;
}

}  // namespace ferry
