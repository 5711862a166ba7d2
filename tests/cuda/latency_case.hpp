// One latency exchange of a KernelGroup: random inputs, what the definition makes of them, and the
// comparison of every byte.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/reference.hpp"
#include "cuda/kernels/latency/kernels.hpp"
#include "kernel_group.hpp"

namespace ferry::cuda::test {

enum class Routes { uniform, holes, duplicates, one_expert, nothing };

struct LatencyCase {
  int ranks = 1;
  int topk = 2;       ///< of the exchange
  int call_topk = 2;  ///< of its calls, at most topk
  std::int64_t experts = 4;
  std::int64_t hidden = 64;
  std::int64_t capacity = 8;
  Dtype dtype = Dtype::bf16;
  LatencyFormat format = LatencyFormat::as_is;
  bool wide = true;
  bool weights_with_dispatch = false;
  Routes routes = Routes::uniform;
  int blocks = 2;
  int parts = 0;       ///< 0: latency_parts
  int ll = 0;          ///< of the view
  bool ll128 = false;  ///< of the view, where there is room for them
};
std::string describe(const LatencyCase& c);

/// Inputs of one generation on all ranks.
struct LatencyWorld : conformance::World {
  LatencyCase c{};
  std::uint64_t seed = 0;

  /// Rows of each local expert of a rank in their order.
  auto rows_of(int rank) const { return conformance::expect_latency(*this, rank).rows; }
  /// What `rank` gives back for a row of its local expert: random numbers of the dtype.
  std::vector<std::byte> result_row(int rank, std::int64_t expert, std::int64_t place) const;
};
/// `tokens` [ranks]; empty: random, some zero, some the capacity.
LatencyWorld make_latency_world(const LatencyCase& c, std::uint64_t seed,
                                const std::vector<std::int64_t>& tokens = {});

/// What a check leaves out, in a call in which some rank was masked.
struct Absent {
  int no_header = -1;  ///< nothing of this source is there
  int no_rows = -1;    ///< the rows of this source are zero
};

/// The memory of an exchange on all ranks, with two handles.
class LatencyRun {
 public:
  LatencyRun(KernelGroup& group, const LatencyCase& c);

  /// Puts a generation's inputs on the GPUs, behind what runs there.
  void upload(const LatencyWorld& world, int handle);
  /// Result rows into the memory that `combine` reads. After the dispatch was checked.
  void upload_results(const LatencyWorld& world, int handle);
  /// Poison over all outputs of a handle.
  void poison(int handle);

  LatencyDispatchParameters dispatch(int rank, int handle) const;
  LatencyCombineParameters combine(int rank, int handle, CombinePath path) const;
  LatencyAlarm& alarm(int rank) { return *members_[index(rank)].alarm; }
  LatencyView& view(int rank) { return members_[index(rank)].view; }
  std::uint64_t* wait_ns(int rank) const { return members_[index(rank)].wait_ns; }
  float* slot_weights(int rank, int handle) const {
    return members_[index(rank)].handles[handle].slot_weights;
  }
  bool masked(int rank, int peer);
  /// Puts a word of Gone where a peer or the CPU would.
  void set_gone(int rank, int peer, Gone gone);
  /// The generation on the GPU.
  std::uint64_t generation(int rank);

  /// Each stops the program at the first byte that differs. After the streams are idle.
  void check_dispatch(const LatencyWorld& world, int rank, int handle, const Absent& absent = {});
  void check_combine(const LatencyWorld& world, int rank, int handle, CombinePath path,
                     const Absent& absent = {});

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  struct HandleMemory {
    LatencyHandle* words = nullptr;
    std::int32_t* slots = nullptr;
    float* slot_weights = nullptr;
    std::byte *out = nullptr, *scales = nullptr, *rows = nullptr, *combined = nullptr;
    std::int32_t *counts = nullptr, *source_token = nullptr;
    std::int64_t* ranges = nullptr;
    std::byte *x = nullptr, *ids = nullptr;
    float* weights = nullptr;
    int tokens = 0;
  };
  struct Member {
    LatencyView view{};
    LatencyAlarm* alarm = nullptr;
    std::uint64_t* wait_ns = nullptr;
    HandleMemory handles[2];
  };
  HandleMemory make_handle(int rank);
  std::int64_t local_experts(int rank) const { return placement_.local_experts(rank); }
  std::int64_t output_rows() const { return c_.ranks * c_.capacity; }
  std::size_t wire_row_bytes() const;
  std::int64_t scale_columns() const;

  KernelGroup& group_;
  LatencyCase c_;
  Placement placement_;
  std::vector<Member> members_;
};

/// Arena bytes that a run takes.
std::size_t latency_arena_bytes(const LatencyCase& c);

/// The same that all tests of one shape use: three ranks, small.
LatencyCase small_latency_case();
/// Bytes behind an exchange's memory for what a test misleads.
std::size_t spare_bytes(const LatencyCase& c, const DeviceLatencyLayout& layout);
/// Stops the program unless it is good.
void expect(const char* what, bool good, const std::string& detail = {});

/// Ranks, rows or sums that do not come; what ends a group (latency_failures_test.cpp).
void run_missing_tests();
void run_failure_tests();
/// Ranks that are gone, masks of the host, rejoining, waits (latency_masks_test.cu).
void run_mask_tests(std::uint64_t seed);

}  // namespace ferry::cuda::test
