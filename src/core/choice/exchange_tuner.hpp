// The settings of a group's calls, found while they run. Pure: ranks that are told the same decide
// alike, so what a call took is told by its slowest rank (CallReport).
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "core/call.hpp"
#include "core/choice/tuning_search.hpp"
#include "ferry/group.hpp"
#include "ferry/tuning.hpp"

namespace ferry {

/// Calls of one kind.
struct TuningKey {
  CallKind call = CallKind::dispatch;
  Dtype dtype = Dtype::bf16;
  RowOrder order = RowOrder::rank_major;
  std::int64_t hidden = 0;
  int tokens_class = 0;                  ///< of the rank that has most: log2, rounded down
  bool first = false;                    ///< brings the plan's routes
  Crossing crossing = Crossing::direct;  ///< as the plan has it
  bool crosses = false;                  ///< in chunks
  bool any_crossing = false;             ///< the other one brings the same bits
  friend auto operator<=>(const TuningKey&, const TuningKey&) = default;
};
int tokens_class_of(std::int64_t tokens);

struct CallSettings {
  Crossing crossing = Crossing::direct;
  std::int64_t chunk_bytes = 0;
  int num_sms = 0;
  friend bool operator==(const CallSettings&, const CallSettings&) = default;
};

class ExchangeTuner {
 public:
  /// `start`: where searches begin; of several entries that fit a call, the one that says most.
  /// SMs are left as they are unless there are bounds: `fewest_sms` > 0.
  explicit ExchangeTuner(int ranks, std::vector<TunedCall> start = {}, int fewest_sms = 0,
                         int most_sms = 0);

  CallSettings next(const TuningKey& key);
  /// How far such calls are; begins no search.
  struct State {
    CallSettings next{}, best{};
    bool settled = false;
  };
  State state(const TuningKey& key) const;
  /// A call made so took so long on its slowest rank, `tokens` being those of the rank with most.
  void observe(const TuningKey& key, const CallSettings& settings, std::int64_t tokens,
               double seconds);
  std::vector<TunedCall> tuned() const;
  /// What there is to start from; null: nothing.
  const TunedCall* start_of(const TuningKey& key) const;

 private:
  TuningGrid grid_of(const TuningKey& key) const;
  CallSettings settings_at(const TuningKey& key, const TuningPlace& place) const;

  int ranks_;
  std::vector<TunedCall> start_;
  std::vector<int> num_sms_{};  // ascending; empty: as they are
  std::map<TuningKey, TuningSearch> searches_{};
};

}  // namespace ferry
