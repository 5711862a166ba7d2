// One way to give the excess of ranks above a limit to ranks below it: copies, made one after the
// other by one warp of a team.
#pragma once
#include <cstdint>

#include "core/experts/batch_plan_shape.hpp"

namespace ferry {

FERRY_FN std::uint32_t next_random(std::uint32_t& state) {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

/// How a draft is made: which of several good choices.
struct CopyStyle {
  bool reuse = true;         ///< begins with the copies that are held
  bool tight = false;        ///< gives away the smallest expert that suffices, not the largest
  std::uint32_t random = 0;  ///< 0: always the first choice
};

template <class Lanes>
class CopyDrafter {
 public:
  /// load, total: [ranks], [experts], without copies. held: [ranks, slots], −1: none.
  FERRY_TEAM_FN CopyDrafter(const Lanes& lanes, const BatchPlanShape& shape, const CopyDraft& draft,
                            const Rows* load, const Rows* total, const std::int32_t* held,
                            Rows limit)
      : lanes_(lanes),
        shape_(shape),
        now_(draft),
        load_(load),
        total_(total),
        held_(held),
        local_(shape.local()),
        limit_(limit) {}

  /// `vain()`: nobody needs it any more.
  template <class Vain>
  FERRY_TEAM_FN void run(CopyStyle style, const Vain& vain) {
    lanes_.each(shape_.ranks, [&](int rank) {
      now_.load[rank] = load_[rank];
      now_.free[rank] = shape_.slots;
    });
    lanes_.each(shape_.experts, [&](int expert) { now_.at_home[expert] = total_[expert]; });
    if (style.reuse) use_held(style.random);
    for (bool stuck = false; !stuck && !vain();) {
      const int rank = overloaded(style);
      if (rank < 0) break;
      const Rows excess = now_.load[rank] - limit_;
      stuck = push(rank, excess, -1) == 0 && !relieve(rank, style);
    }
    finish();
  }

 private:
  using Copy = CopyDraft::Copy;

  /// The heaviest rank above the limit, in a random style any; −1: none.
  FERRY_TEAM_FN int overloaded(CopyStyle& style) const {
    const auto over = [&](int rank) { return now_.load[rank] > limit_; };
    if (style.random == 0) {
      return lanes_.best(shape_.ranks,
                         [&](int rank) { return over(rank) ? now_.load[rank] : kNoKey<Rows>; });
    }
    int best = -1;
    lanes_.visit(shape_.ranks, over, [&](int rank) {
      if (best < 0 || next_random(style.random) % 2 == 0) best = rank;
      return true;
    });
    return best;
  }

  FERRY_TEAM_FN void use_held(std::uint32_t random) {
    const int places = shape_.places();
    const int first = static_cast<int>(random % static_cast<std::uint32_t>(places));
    const auto place_at = [&](int i) {
      return first + i < places ? first + i : first + i - places;
    };
    const auto holds = [&](int i) { return held_[place_at(i)] >= 0; };
    lanes_.visit(places, holds, [&](int i) {
      const std::int32_t expert = held_[place_at(i)];
      const int rank = shape_.rank_of(place_at(i)), home = shape_.home_of(expert);
      const Rows tokens =
          least(least(now_.load[home] - limit_, limit_ - now_.load[rank]), now_.at_home[expert]);
      if (tokens > 0) move(expert, home, rank, tokens);
      return true;
    });
  }

  /// A copy more of an expert of the rank. False: nobody has room and a place, and no other way
  /// was found.
  FERRY_TEAM_FN bool relieve(int rank, CopyStyle& style) {
    const Rows excess = now_.load[rank] - limit_;
    Rows wanted = 1;
    int to = -1;
    std::int32_t expert = style.tight ? smallest_expert(rank, least(excess, most_room())) : -1;
    if (expert < 0) expert = largest_expert(rank);
    if (expert >= 0) {
      wanted = least(excess, now_.at_home[expert]);
      to = receiver(rank, wanted, style);
    }
    const bool suffices = to >= 0 && limit_ - now_.load[to] >= wanted;
    const bool others = to < 0 || (!suffices && full_rank_has_room(wanted));
    if (others && relieve_through_others(rank, to < 0 ? 1 : wanted)) return true;
    if (to >= 0) move(expert, rank, to, least(wanted, limit_ - now_.load[to]));
    return to >= 0;
  }

  /// Of a rank with a free slot; 0: none has room.
  FERRY_TEAM_FN Rows most_room() const {
    const int emptiest = lanes_.best(shape_.ranks, [&](int rank) {
      return now_.free[rank] > 0 ? -now_.load[rank] : kNoKey<Rows>;
    });
    return emptiest < 0 ? 0 : limit_ - now_.load[emptiest];
  }

  /// Of the experts of the rank that have so many tokens at home, and any at all; −1: none.
  FERRY_TEAM_FN std::int32_t smallest_expert(int rank, Rows enough) const {
    const std::int32_t first = rank * local_;
    const int found = lanes_.best(local_, [&](int i) {
      const Rows tokens = now_.at_home[first + i];
      return tokens > 0 && tokens >= enough ? -tokens : kNoKey<Rows>;
    });
    return found < 0 ? -1 : first + found;
  }
  FERRY_TEAM_FN std::int32_t largest_expert(int rank) const {
    const std::int32_t first = rank * local_;
    const int found = lanes_.best(local_, [&](int i) {
      const Rows tokens = now_.at_home[first + i];
      return tokens > 0 ? tokens : kNoKey<Rows>;
    });
    return found < 0 ? -1 : first + found;
  }

  /// For an expert of `home`, in its domain if there is one: the rank with the least room that
  /// suffices, else with the most. A random style overlooks some.
  FERRY_TEAM_FN int receiver(int home, Rows wanted, CopyStyle& style) const {
    const auto fits = [&](int rank) {
      return rank != home && now_.load[rank] < limit_ && now_.free[rank] > 0;
    };
    const auto key = [&](int rank) {
      const Rows room = limit_ - now_.load[rank];
      const int rating = (shape_.together(rank, home) ? 2 : 0) + (room >= wanted ? 1 : 0);
      return (std::int64_t{rating} << 32) + (room >= wanted ? INT32_MAX - room : room);
    };
    if (style.random == 0) {
      return lanes_.best(shape_.ranks,
                         [&](int rank) { return fits(rank) ? key(rank) : kNoKey<std::int64_t>; });
    }
    int best = -1;
    lanes_.visit(shape_.ranks, fits, [&](int rank) {
      if (best >= 0 && next_random(style.random) % 4 == 0) return true;
      if (best < 0 || key(rank) > key(best)) best = rank;
      return true;
    });
    return best;
  }

  /// Whether a rank without a free slot has room for so many tokens.
  FERRY_TEAM_FN bool full_rank_has_room(Rows wanted) const {
    return lanes_.first(shape_.ranks, [&](int rank) {
      return now_.free[rank] == 0 && limit_ - now_.load[rank] >= wanted;
    }) >= 0;
  }

  /// What it reads is read before it writes: a GPU waits once.
  FERRY_TEAM_FN void move(std::int32_t expert, int home, int to, Rows tokens) {
    const int same = copy_at(expert, to), last = copies_;
    const std::int32_t* const held = held_ + to * shape_.slots;
    const bool is_held =
        lanes_.first(shape_.slots, [&](int slot) { return held[slot] == expert; }) >= 0;
    lanes_.one([&] {
      const int at = same >= 0 ? same : last;
      const Rows before = same >= 0 ? now_.copies[at].tokens : 0;
      const Rows stays = now_.at_home[expert], from = now_.load[home], there = now_.load[to];
      const std::int32_t free = now_.free[to];
      now_.at_home[expert] = stays - tokens;
      now_.load[home] = from - tokens;
      now_.load[to] = there + tokens;
      now_.copies[at] = {expert, home, to, before + tokens, is_held ? 1 : 0};
      now_.free[to] = same >= 0 ? free : free - 1;
    });
    if (same < 0) ++copies_;
  }

  /// A rank without room takes a copy, and gives away as much over the copies that there are: at
  /// least so many tokens, or nothing is done.
  FERRY_TEAM_FN bool relieve_through_others(int rank, Rows at_least) {
    const std::int32_t expert = largest_expert(rank);
    if (expert < 0) return false;
    const Rows wanted = least(now_.load[rank] - limit_, now_.at_home[expert]);
    int best = -1;
    Rows most = 0;
    for (int other = 0; other < shape_.ranks; ++other) {
      if (other == rank || now_.free[other] == 0 || copy_at(expert, other) >= 0) continue;
      const Rows tokens = find_room(other, wanted, rank) < 0 ? 0 : path_tokens_;
      if (tokens <= most) continue;
      best = other;
      most = tokens;
    }
    if (best < 0 || most < at_least) return false;
    move(expert, rank, best, push(best, most, rank));
    return true;
  }

  /// The nearest rank with room that tokens of `from` reach over the copies that there are, not by
  /// way of `avoid`; −1: none. `path_tokens_`: how many of `wanted` that takes.
  FERRY_TEAM_FN int find_room(int from, Rows wanted, int avoid) {
    const auto has_room = [&](int rank) {
      return rank != from && rank != avoid && now_.load[rank] < limit_;
    };
    const int leads = lanes_.first(copies_, [&](int c) {
      return has_room(now_.copies[c].home) || has_room(now_.copies[c].rank);
    });
    if (leads < 0) return -1;
    lanes_.each(shape_.ranks, [&](int rank) {
      now_.reached[rank] = {rank == from ? wanted : 0, -1, -1};
      if (rank == 0) now_.queue[0] = from;
    });
    int found = -1, last = 1;
    for (int at = 0; at < last && found < 0; ++at) {
      const int rank = now_.queue[at];
      const Rows have = now_.reached[rank].tokens;
      const auto other_end = [&](const Copy& copy) {
        return copy.home == rank ? copy.rank : copy.home;
      };
      const auto over = [&](const Copy& copy) {
        return least(have, copy.home == rank ? now_.at_home[copy.expert] : copy.tokens);
      };
      const auto leads_on = [&](int c) {
        const Copy& copy = now_.copies[c];
        if (copy.home != rank && copy.rank != rank) return false;
        const int to = other_end(copy);
        return over(copy) != 0 && to != avoid && now_.reached[to].tokens == 0;
      };
      lanes_.visit(copies_, leads_on, [&](int c) {
        const Copy copy = now_.copies[c];
        const int to = other_end(copy);
        if (now_.reached[to].tokens > 0) return true;  // by a copy before this one
        const Rows tokens = over(copy), room = limit_ - now_.load[to];
        lanes_.one([&] {
          now_.reached[to] = {tokens, c, rank};
          now_.queue[last] = to;
        });
        if (room > 0) {
          path_tokens_ = least(tokens, room);
          found = to;
          return false;
        }
        ++last;
        return true;
      });
    }
    return found;
  }

  /// Returns how many tokens went to a rank with room.
  FERRY_TEAM_FN Rows push(int from, Rows wanted, int avoid) {
    const int end = find_room(from, wanted, avoid);
    if (end < 0) return 0;
    const Rows moved = path_tokens_;
    lanes_.one([&] {
      now_.load[from] -= moved;
      now_.load[end] += moved;
      for (int to = end; to != from; to = now_.reached[to].before) {
        Copy& copy = now_.copies[now_.reached[to].copy];
        const Rows tokens = copy.rank == to ? moved : -moved;
        copy.tokens += tokens;
        now_.at_home[copy.expert] -= tokens;
      }
    });
    drop_empty();
    return moved;
  }

  FERRY_TEAM_FN void drop_empty() {
    const int empty =
        lanes_.sum(copies_, [&](int c) { return now_.copies[c].tokens == 0 ? 1 : 0; });
    if (empty == 0) return;
    lanes_.one([&] {
      int to = 0;
      for (int c = 0; c < copies_; ++c) {
        if (now_.copies[c].tokens == 0)
          ++now_.free[now_.copies[c].rank];
        else
          now_.copies[to++] = now_.copies[c];
      }
    });
    copies_ -= empty;
  }

  FERRY_TEAM_FN int copy_at(std::int32_t expert, int rank) const {
    return lanes_.first(copies_, [&](int c) {
      return now_.copies[c].expert == expert && now_.copies[c].rank == rank;
    });
  }

  FERRY_TEAM_FN void finish() {
    const int heaviest = lanes_.best(shape_.ranks, [&](int rank) { return now_.load[rank]; });
    const int fetches = lanes_.sum(copies_, [&](int c) { return 1 - now_.copies[c].held; });
    lanes_.one([&] { *now_.end = {copies_, now_.load[heaviest], fetches}; });
  }

  FERRY_TEAM_FN static Rows least(Rows a, Rows b) { return a < b ? a : b; }

  const Lanes& lanes_;
  const BatchPlanShape& shape_;
  const CopyDraft now_;
  const Rows* load_;
  const Rows* total_;
  const std::int32_t* held_;
  const std::int32_t local_;
  const Rows limit_;
  int copies_ = 0;
  Rows path_tokens_ = 0;
};

}  // namespace ferry
