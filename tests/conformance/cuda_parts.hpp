// The parts of conformance_cuda. Each runs fleets of ranks on GPUs, prints what went wrong and one
// line about what it did, and returns whether all was well.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fleet.hpp"
#include "platform/test_child.hpp"

namespace ferry::conformance {

enum class Cases : std::uint8_t { sample, cover, full };

struct CudaOptions {
  std::vector<int> ranks{1, 2, 3, 4, 8};
  Cases cases = Cases::cover;
  double seconds = 120;  ///< for the matrix
  std::uint64_t seed = 1;
  std::int64_t only_case = -1;
  int repeat = 10000;
  int gpus = 1;                                ///< 0: the host engine
  FabricKind network = FabricKind::automatic;  ///< between the domains of processes
};

bool run_matrix(const CudaOptions& options);
bool run_latency_cases(const CudaOptions& options);
bool run_repeated(const CudaOptions& options);
bool run_interleaved(const CudaOptions& options);
bool run_groups(const CudaOptions& options);
bool run_large(const CudaOptions& options);
bool run_graph(const CudaOptions& options);
bool run_kill(const CudaOptions& options);
bool run_deadline(const CudaOptions& options);
bool run_leaks(const CudaOptions& options);
bool run_domains(const CudaOptions& options);
bool run_domain_latency(const CudaOptions& options);

/// A number that forked ranks share.
class SharedNumber {
 public:
  std::atomic<std::int64_t>& operator*() const { return *static_cast<Number*>(block_.get()); }

 private:
  using Number = std::atomic<std::int64_t>;
  std::shared_ptr<void> block_ = test::shared_block(sizeof(Number));  // zeroed
};

/// Nanoseconds of the monotonic clock, the same in all processes.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Ranks on the GPUs: processes that share them, or threads with a GPU each.
struct Layout {
  int ranks = 1;
  bool threads = false;
};
std::string to_string(const Layout& layout);
/// Ranks that share a GPU are processes.
inline bool may_be_threads(const CudaOptions& options, int ranks) {
  return ranks > 1 && (options.gpus == 0 || ranks <= options.gpus);
}
/// Those asked for, as processes; as threads too where they may be.
std::vector<Layout> layouts(const CudaOptions& options);

/// Runs the fleet, prints its failures; true if there are none.
bool passes(const CudaOptions& options, const Layout& layout, const std::string& what,
            const std::function<void(Rank&)>& body, int victim = -1);
/// Prints what went wrong, if anything; true if nothing did.
bool report(const std::string& what, const std::vector<std::string>& failures);
/// Prints the part's last line; returns `ok`.
bool conclude(const char* part, bool ok, const std::string& what, std::int64_t since_ns);

/// Processes, at least `least` and one a GPU.
Layout processes(const CudaOptions& options, int least);

}  // namespace ferry::conformance
