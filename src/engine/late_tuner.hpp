// The tuner of calls whose times are known when later ones are made already, as on a GPU. Each rank
// tells the others what its calls took once it knows (TimeSwap), and all take in the same times in
// the same order: so all searches go through the same states, though not at the same call. Calls
// in which ranks differ for that reason are allowed, but their times do not count.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "core/choice/exchange_tuner.hpp"

namespace ferry::engine {

/// What a rank says of one of its calls.
struct CallTime {
  std::uint64_t number = 0;   ///< of the call in the group
  std::uint32_t tokens = 0;   ///< of this rank
  std::uint32_t num_sms = 0;  ///< as chosen
  float seconds = 0;
  std::uint32_t reserved = 0;
};

/// What a rank says at once.
struct CallTimes {
  static constexpr std::size_t kMost = 5;
  std::uint64_t count = 0;
  std::array<CallTime, kMost> calls{};
};
static_assert(sizeof(CallTimes) == 128, "a line, without padding");

/// All but `tuned` by the thread whose turn it is.
class LateTuner {
 public:
  LateTuner(const GroupConfig& config, int ranks);

  bool on() const { return on_; }
  /// How a call is made.
  struct Choice {
    TuningKey key{};  ///< as this rank has it: by its own tokens
    std::int64_t tokens = 0;
    int num_sms = 0;
    std::uint64_t number = 0;
    bool timed = false;  ///< `took` or `lost` has to be told
  };
  /// Of the call with this number: of a kind that has settled, one in kSettledPeriod is timed.
  Choice next(const TuningKey& key, std::int64_t tokens, std::uint64_t number);
  /// For calls of which nobody learns what they take; 0: nothing is known.
  int best(const TuningKey& key) const;
  /// The same, from the file alone.
  int as_started(const TuningKey& key) const;

  /// A timed call took so long here. In the order of the calls.
  void took(std::uint64_t number, double seconds);
  /// It came to nothing.
  void lost(std::uint64_t number);
  bool has_news() const { return !news_.empty(); }
  /// The oldest that the others do not know.
  CallTimes tell();
  /// What all ranks have told, this one included; the same ranks each time, in the same order.
  void heard(const std::vector<CallTimes>& all);
  /// The ranks are others.
  void forget();
  std::vector<TunedCall> tuned() const;

 private:
  /// Timed calls of which not all know, at most; whoever runs ahead further times no more.
  static constexpr std::size_t kMostKept = 64;
  static constexpr std::uint64_t kSettledPeriod = 8;
  TuningKey of_group(const TuningKey& key) const;
  std::deque<Choice>::iterator find(std::uint64_t number);
  void count(const std::vector<CallTime>& ranks);

  bool on_;
  int fewest_, most_;
  ExchangeTuner fresh_;
  mutable std::mutex mutex_{};
  ExchangeTuner tuner_;                 // under the mutex
  std::map<TuningKey, int> classes_{};  // of tokens, as the rank with most has them
  std::deque<Choice> made_{};           // timed; not all know yet
  std::deque<CallTime> news_{};
  std::vector<std::deque<CallTime>> told_{};  // by each rank, and not yet by all
};

}  // namespace ferry::engine
