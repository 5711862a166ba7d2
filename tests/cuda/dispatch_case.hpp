// One exchange of a KernelGroup: random inputs, what a naive reading of the definition expects of
// plan, dispatch and routes, and the comparison of every byte.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/throughput/kernels.hpp"
#include "kernel_group.hpp"

namespace ferry::cuda::test {

enum class Pattern { uniform, holes, duplicates, one_rank, nothing };

struct DispatchCase {
  int ranks = 1;
  int topk = 1;
  std::int64_t experts = 1;
  std::int64_t row_bytes = 16;     ///< as it arrives
  std::int64_t scale_columns = 0;  ///< 0: none
  bool quantize = false;           ///< e4m3 rows are made of x_dtype ones on the way, scales too
  bool round_scale = false;
  Dtype x_dtype = Dtype::bf16;
  bool strided_scales = false;  ///< token stride C + 3, column stride 2
  bool weights = false;
  bool wide = true;
  bool strided_ids = false;  ///< token stride K + 3
  Pattern pattern = Pattern::uniform;
  std::vector<std::int64_t> tokens{};
  std::int64_t slack = 0;  ///< rows of capacity past what arrives
  bool early = false;      ///< the first dispatch posts its head while the plan runs
  bool glued = false;      ///< and does not wait for the end of the plan's kernel
  int num_sms = 2;
};
std::string describe(const DispatchCase& c);

struct RankInput {
  std::vector<std::int64_t> ids;  ///< [T, K]
  std::vector<std::byte> x;       ///< [T, row_bytes], as it arrives
  std::vector<float> scales;      ///< [T, C], likewise
  std::vector<std::byte> raw;     ///< [T, row_bytes] of x_dtype, before it is quantised
  std::vector<float> weights;     ///< [T, K]
};

/// A row that arrives somewhere.
struct Arrival {
  int source;
  std::int64_t token;
};

/// Inputs and what follows from them by definition.
struct World {
  DispatchCase c;
  Placement placement;
  std::vector<RankInput> inputs;
  std::vector<std::vector<Arrival>> arrivals;  ///< [ranks]: rows in order
  std::int64_t recv_rows(int rank) const;
  std::int64_t wire_rows(int rank) const;  ///< that `rank` sends to others
  std::int32_t local_id(int rank, const Arrival& from, int slot) const;
};
World make_world(const DispatchCase& c, std::uint64_t seed);

/// What lies on the GPUs for a world.
struct Placed {
  std::vector<Piece> ids, x, scales, weights;         // inputs
  std::vector<Piece> plan, scratch, rows, side, out;  // plan, regions
  std::vector<Piece> came, more_ids, more_tokens;     // of routes; more of them
  std::vector<HostCounts*> counts;
  std::vector<std::int32_t*> count_words;
};

class DispatchRun {
 public:
  DispatchRun(KernelGroup& group, const World& world);

  PlanParameters plan_parameters(int rank) const;
  DispatchParameters dispatch_parameters(int rank, bool routes) const;
  RoutesParameters routes_parameters(int rank) const;
  /// Of the rows that have come, as bf16, without weights.
  CombineParameters combine_parameters(int rank) const;
  std::int64_t capacity(int rank) const;
  const Placed& placed() const { return placed_; }

  /// Whether the plan's routes have come, as the GPU has it.
  bool came(int rank) const;

  void launch_plans();
  void launch_dispatches(bool routes);
  void launch_all_routes();

  /// Each stops the program at the first byte that differs. After the streams are idle.
  void check_plan(int rank) const;
  void check_rows(int rank) const;
  void check_side(int rank, bool routes) const;
  /// What launch_routes has made of routes that have come, or have not.
  void check_more_routes(int rank, bool there) const;
  /// Poisons what a dispatch writes.
  void poison();

 private:
  [[noreturn]] void wrong(int rank, const std::string& what) const;
  void compare(int rank, const std::string& what, const std::vector<std::byte>& expected,
               const void* on_gpu) const;

  KernelGroup& group_;
  const World& world_;
  Placed placed_;
};

}  // namespace ferry::cuda::test
