// Which settings make a call fast: a search over a grid, fed with what calls took. Pure: whoever is
// fed the same finds the same.
#pragma once
#include <array>
#include <vector>

namespace ferry {

/// Settings, as an index on each axis of the grid: numbers of SMs, sizes of chunks, crossings.
enum TuningAxis : std::size_t { sm_axis, chunk_axis, crossing_axis, kTuningAxes };
using TuningPlace = std::array<int, kTuningAxes>;

struct TuningGrid {
  TuningPlace sizes{1, 1, 1};
  TuningPlace start{};
};

/// Measures the start, then neighbours of the fastest and of the best place until all of them are
/// known, then in turn all places that may yet be the fastest, so that what slows calls for a while
/// slows them all; until one is left, or kMostProbes calls were timed. Of the places that take at
/// most kWorth times the shortest call of the fastest, the one with the fewest SMs is best, then
/// the one nearest to the start. When calls at the place where it settled begin to take longer or
/// less, it starts again from there; each time it waits longer.
class TuningSearch {
 public:
  static constexpr int kMostProbes = 30;
  static constexpr double kWorth = 1.03;

  explicit TuningSearch(const TuningGrid& grid);

  /// For the next call.
  const TuningPlace& next() const { return settled_ ? best_ : turn_[at_]; }
  /// A call made with these settings took so long. May be told some calls late.
  void observe(const TuningPlace& place, double seconds);

  const TuningPlace& best() const { return best_; }
  bool settled() const { return settled_; }
  int probes() const { return probes_; }  ///< since it began or began again
  int restarts() const { return restarts_; }
  /// What calls at `best` take, in the middle; 0: not known yet.
  double seconds() const;
  /// How much of the time at the start `best` takes; 0: the start was not timed since it began.
  double gain() const;

 private:
  struct Measured {
    TuningPlace place{};
    std::vector<double> seconds{};
  };
  Measured* find(const TuningPlace& place);
  const Measured* find(const TuningPlace& place) const;
  void choose(std::size_t least);
  std::vector<TuningPlace> unknown_neighbours() const;
  void go_on();
  void race();
  void settle();
  void watch(double seconds);

  TuningGrid grid_;
  TuningPlace best_, fastest_;
  std::vector<TuningPlace> turn_{};  // a call of each, one after another
  std::size_t at_ = 0;               // < turn_.size(), unless settled
  std::vector<Measured> measured_{};
  bool settled_ = false, warm_ = false;
  int probes_ = 0, restarts_ = 0;
  // Since it settled:
  double settled_s_ = 0;
  std::vector<double> recent_{};  // the last of them
  int watched_ = 0, pause_;
};

}  // namespace ferry
