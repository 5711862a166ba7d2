// What a rank does for the sources on its rail: rows that crossed to it are spread in its domain.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.hpp"
#include "core/plan_state.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

/// Of one dispatch, whose grants were swapped. Rows go from the staging buffer straight to their
/// final places, with scales, weights and routes as their source would have written them.
class Forwarder {
 public:
  /// `staging`: this rank's buffer, of `shape`. `stream`: copies go past the caches. `chunk`: rows
  /// that come at once.
  Forwarder(HostEngine& engine, PlanState& plan, const StagingShape& shape,
            const std::byte* staging, bool stream, std::int64_t chunk);

  /// Spreads the chunks that are here.
  void poll();
  /// Waits for the others; then all rows are spread, and the plan knows where they went.
  void finish();

 private:
  /// One rank of the domain: where its regions lie in this process.
  struct Target {
    int rank = 0;
    std::byte* rows = nullptr;
    std::byte* scales = nullptr;
    std::byte* source_token = nullptr;
    std::byte* topk_idx = nullptr;
    std::byte* weights = nullptr;
  };

  Channel& channel() { return engine_.channel(); }
  const ExchangePlan& exchange() const { return plan_.exchange; }
  std::int64_t rows_of(std::size_t feeder) const {
    const std::vector<std::int64_t>& first = plan_.crossing.feeder_row;
    return first[feeder + 1] - first[feeder];
  }
  Target target_of(int rank);
  void spread(std::size_t feeder);
  void learn(std::size_t feeder, std::int64_t first, std::int64_t end);
  void spread_row(std::size_t feeder, std::int64_t row);
  void spread_slots(const Target& target, const std::int32_t* ids, std::size_t to,
                    std::size_t staged);
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);

  HostEngine& engine_;
  PlanState& plan_;
  StagingShape shape_;
  StagingLayout layout_;
  const std::byte* staging_;
  bool stream_;
  std::int64_t chunk_;
  std::vector<Target> targets_;     // by index inside the domain
  std::vector<std::int64_t> next_;  // by feeder: rows that were spread
};

}  // namespace ferry::host
