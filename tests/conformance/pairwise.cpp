// A greedy cover of all pairs (after Cohen, Dalal, Fredman and Patton, "The AETG system", 1997).
#include <cstddef>
#include <numeric>
#include <set>
#include <tuple>

#include "case.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

using Pair = std::tuple<int, int, int, int>;  // axis, choice, later axis, choice

class Cover {
 public:
  Cover(Mode mode, std::uint64_t seed) : mode_(mode), random_(seed) {
    const int n = count();
    for (int a = 0; a < n; ++a) {
      for (int b = a + 1; b < n; ++b) {
        for (int i = 0; i < choices(a); ++i) {
          for (int j = 0; j < choices(b); ++j) {
            if (!excluded(mode_, a, i, b, j)) missing_.insert({a, i, b, j});
          }
        }
      }
    }
  }

  std::vector<std::vector<int>> run() {
    std::vector<std::vector<int>> chosen;
    while (!missing_.empty()) {
      std::vector<int> best;
      int best_gain = -1;
      for (int attempt = 0; attempt < 12; ++attempt) {
        const std::vector<int> candidate = build();
        const int covered = gain(candidate);
        if (covered > best_gain) {
          best = candidate;
          best_gain = covered;
        }
      }
      take(best);
      chosen.push_back(best);
    }
    return chosen;
  }

 private:
  int count() const { return static_cast<int>(axes(mode_).size()); }
  int choices(int axis) const { return axes(mode_)[static_cast<std::size_t>(axis)].choices; }
  bool is_missing(int a, int i, int b, int j) const {
    return a < b ? missing_.contains({a, i, b, j}) : missing_.contains({b, j, a, i});
  }

  /// A candidate that holds one missing pair, the other axes chosen one after another for what
  /// they add.
  std::vector<int> build() {
    std::vector<int> choice(static_cast<std::size_t>(count()), -1);
    auto first = missing_.begin();
    std::advance(first, random_.below(static_cast<std::int64_t>(missing_.size())));
    const auto [a, i, b, j] = *first;
    choice[static_cast<std::size_t>(a)] = i;
    choice[static_cast<std::size_t>(b)] = j;
    std::vector<int> order(static_cast<std::size_t>(count()));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t n = order.size(); n > 1; --n) {
      std::swap(order[n - 1],
                order[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(n)))]);
    }
    for (int axis : order) {
      if (choice[static_cast<std::size_t>(axis)] < 0) choose(axis, choice);
    }
    return choice;
  }

  void choose(int axis, std::vector<int>& choice) {
    int best = -1, best_gain = -1;
    const auto start = static_cast<int>(random_.below(choices(axis)));
    for (int n = 0; n < choices(axis); ++n) {
      const int value = (start + n) % choices(axis);
      int covered = 0;
      bool allowed = true;
      for (int other = 0; other < count(); ++other) {
        const int theirs = choice[static_cast<std::size_t>(other)];
        if (other == axis || theirs < 0) continue;
        allowed = allowed && !excluded(mode_, axis, value, other, theirs);
        covered += is_missing(axis, value, other, theirs) ? 1 : 0;
      }
      if (allowed && covered > best_gain) {
        best = value;
        best_gain = covered;
      }
    }
    choice[static_cast<std::size_t>(axis)] = best;
  }

  int gain(const std::vector<int>& choice) const {
    int covered = 0;
    for (int a = 0; a < count(); ++a) {
      for (int b = a + 1; b < count(); ++b) {
        covered += is_missing(a, choice[static_cast<std::size_t>(a)], b,
                              choice[static_cast<std::size_t>(b)])
                       ? 1
                       : 0;
      }
    }
    return covered;
  }

  void take(const std::vector<int>& choice) {
    for (int a = 0; a < count(); ++a) {
      for (int b = a + 1; b < count(); ++b) {
        missing_.erase(
            {a, choice[static_cast<std::size_t>(a)], b, choice[static_cast<std::size_t>(b)]});
      }
    }
  }

  Mode mode_;
  Random random_;
  std::set<Pair> missing_;
};

}  // namespace

std::vector<std::vector<int>> pairwise_cover(Mode mode, std::uint64_t seed) {
  return Cover(mode, seed).run();
}

std::vector<std::vector<int>> random_choices(Mode mode, int count, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::vector<int>> all;
  while (static_cast<int>(all.size()) < count) {
    std::vector<int> choice;
    for (const Axis& axis : axes(mode)) {
      choice.push_back(static_cast<int>(random.below(axis.choices)));
    }
    bool allowed = true;
    for (std::size_t a = 0; a < choice.size(); ++a) {
      for (std::size_t b = a + 1; b < choice.size(); ++b) {
        allowed = allowed &&
                  !excluded(mode, static_cast<int>(a), choice[a], static_cast<int>(b), choice[b]);
      }
    }
    if (allowed) all.push_back(choice);
  }
  return all;
}

}  // namespace ferry::conformance
