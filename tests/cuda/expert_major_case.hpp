// Random expert-major rows for tests and benchmarks of the kernels.
#pragma once
#include <string>
#include <vector>

#include "cuda/kernels/throughput/sum_shape.hpp"
#include "kernel_exchange.hpp"

namespace ferry::cuda::test {

struct ExpertCase {
  ExchangeShape shape;
  Dtype dtype = Dtype::bf16;
  std::int64_t row_bytes = 16;
  std::int64_t scale_columns = 0;
  bool quantize = false;  ///< of a following case: rows are sent as bf16 and arrive as e4m3
  std::int64_t alignment = 1;
  std::int64_t spare = 0;      ///< rows of capacity beyond what arrives
  std::int64_t out_spare = 0;  ///< rows of out beyond the last expert
  bool weighted = false;
  int num_sms = 1;
  int sum_sms = 1;     ///< of sums beside a combine
  int beside_sms = 1;  ///< of a fan-out beside a dispatch
  /// Ranks whose rows are rank-major, a bit each: copied beside the combine, or there before it.
  std::uint32_t copies = 0, ready = 0;
  SumTuning sum;
  FanOutTuning fan_out;

  std::string text() const;
};

/// One rank's received rows with their routes, and where they belong.
struct ExpertRows {
  PlanView plan;
  std::vector<std::int32_t> ids;
  ExpertMajor expected;
  std::int64_t received = 0, capacity = 0, out_capacity = 0, experts = 0;
};

ExpertRows make_expert_rows(KernelGroup& group, const ExpertCase& c, const Exchange& x, int rank);

/// `bytes` as expected, then untouched poison.
void check_bytes(KernelGroup& group, int rank, const void* got_at, const void* expected,
                 std::size_t bytes, const std::string& what);
/// What the fan-out made of received rows and their scales.
void check_fan_out(KernelGroup& group, const ExpertCase& c, const ExpertRows& local, int rank,
                   const FanOutParameters& p, const Bytes& rows, const std::vector<float>& scales);
/// Each received row's slots summed as the definition has it. `rows`: expert-major; `weights`:
/// [received, K].
Bytes expect_sums(const ExpertCase& c, const ExpertRows& local, const Bytes& rows,
                  const std::vector<float>& weights);

/// A call that moves rows must have come before a fan-out.
void run_barrier(KernelGroup& group);

/// `count` elements of a rank's arena, and a guard behind them.
template <class T>
T* take(KernelGroup& group, int rank, std::int64_t count) {
  return reinterpret_cast<T*>(
      group.take(rank, static_cast<std::size_t>(count) * sizeof(T) + kGuard).data);
}

void test_combine_beside_sums(std::uint64_t seed, std::int64_t repeat);

// Fan-outs that follow their dispatch (following_case.cpp).
void test_following(std::uint64_t seed, std::int64_t repeat);

}  // namespace ferry::cuda::test
