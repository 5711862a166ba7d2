// `ferry bench --backend cuda`: what is measured, and where the ranks leave it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bench/data.hpp"
#include "bench/nccl.hpp"
#include "bench/settings.hpp"
#include "ferry/bootstrap.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {

enum class GpuCase : std::uint8_t {
  plan,
  dispatch_full,        ///< plan and dispatch; worst-case size, the CPU waits for nothing
  dispatch_full_exact,  ///< plan and dispatch; the CPU waits for the counts
  dispatch_cached,
  dispatch_expert,     ///< expert-major, cached
  dispatch_quantized,  ///< of bf16 rows that become e4m3 on the way, cached; beside e4m3 alone
  combine_registered,
  combine_ordinary,
  combine_expert,   ///< from expert-major rows, weights applied
  nccl_all_to_all,  ///< the bytes of a dispatch, gathered before; no counts
};
inline constexpr int kGpuCases = static_cast<int>(GpuCase::nccl_all_to_all) + 1;

constexpr std::string_view name_of(GpuCase which) {
  switch (which) {
    case GpuCase::plan: return "plan";
    case GpuCase::dispatch_full: return "dispatch, full, worst case";
    case GpuCase::dispatch_full_exact: return "dispatch, full, exact";
    case GpuCase::dispatch_cached: return "dispatch, cached";
    case GpuCase::dispatch_expert: return "dispatch, expert-major";
    case GpuCase::dispatch_quantized: return "dispatch, bf16 to e4m3";
    case GpuCase::combine_registered: return "combine, registered";
    case GpuCase::combine_ordinary: return "combine, ordinary";
    case GpuCase::combine_expert: return "combine, expert-major";
    case GpuCase::nccl_all_to_all: return "NCCL all-to-all alone";
  }
  return "";
}

constexpr bool is_combine(GpuCase which) {
  return which >= GpuCase::combine_registered && which <= GpuCase::combine_expert;
}

/// Runs on a number of SMs that the caller chooses.
constexpr bool has_sms(GpuCase which) {
  return which != GpuCase::plan && which != GpuCase::nccl_all_to_all;
}

struct GpuBenchSettings {
  BenchSettings shape{};  ///< its tokens and dtype are of one configuration at a time
  std::vector<std::int64_t> tokens{4096};
  std::vector<Dtype> dtypes{Dtype::bf16, Dtype::e4m3};
  std::vector<int> sms{16};
  int chain = 4;                 ///< calls in one pair of events
  std::int64_t alignment = 128;  ///< of expert-major blocks
  std::uint64_t data_seed = 1;   ///< of rows; routes follow shape.seed
  Nccl nccl{};                   ///< measured beside Ferry if there is a library

  /// One configuration, as the parts of the host's benchmark know it.
  BenchSettings with(std::int64_t tokens_of, Dtype dtype) const {
    BenchSettings one = shape;
    one.tokens = tokens_of;
    one.dtype = dtype;
    return one;
  }
};

/// One line of the table.
struct GpuLine {
  std::size_t tokens_index = 0;
  std::int64_t tokens = 0;
  Dtype dtype = Dtype::bf16;
  int sms = 0;  ///< 0: not ours to choose
  GpuCase which = GpuCase::plan;
};
/// In the order in which they are measured. Combine carries bf16 where dispatch carries e4m3, so
/// its lines are there once.
std::vector<GpuLine> lines_of(const GpuBenchSettings& settings);

/// Shared between the ranks and the command.
class GpuBoard {
 public:
  explicit GpuBoard(const GpuBenchSettings& settings)
      : lines(lines_of(settings)),
        ranks_(static_cast<std::size_t>(settings.shape.ranks)),
        iterations_(static_cast<std::size_t>(settings.shape.iterations)),
        samples_(2 * lines.size() * ranks_ * iterations_),
        rows_(settings.tokens.size() * ranks_),
        done_(1) {}

  /// Microseconds of one call: out of a chain, or alone.
  double& sample(std::size_t line, bool alone, int rank, int iteration) const {
    const std::size_t first = (2 * line + (alone ? 1 : 0)) * ranks_;
    return samples_[(first + static_cast<std::size_t>(rank)) * iterations_ +
                    static_cast<std::size_t>(iteration)];
  }
  BenchRows& rows(std::size_t tokens_index, int rank) const {
    return rows_[tokens_index * ranks_ + static_cast<std::size_t>(rank)];
  }
  /// Lines that are measured.
  std::uint32_t& done() const { return done_[0]; }

  const std::vector<GpuLine> lines;

 private:
  std::size_t ranks_;
  std::size_t iterations_;
  SharedArray<double> samples_;
  SharedArray<BenchRows> rows_;
  SharedArray<std::uint32_t> done_;
};

/// What one line came to. Times: of every sample the slowest rank. Bytes: of one call, of all
/// ranks.
struct GpuResult {
  GpuLine line{};
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;  ///< 0: no rows move (plan)
  std::uint64_t logical_bytes = 0;
  std::uint64_t wire_bytes = 0;
  struct Times {
    double min = 0, mean = 0, p50 = 0, p95 = 0;
  };
  Times chained{};
  Times alone{};
  int ranks = 1;
  /// 10^9 bytes a second and GPU, at the median of chained calls.
  double logical_gbps() const { return per_second(logical_bytes); }
  double wire_gbps() const { return per_second(wire_bytes); }

 private:
  double per_second(std::uint64_t bytes) const {
    return chained.p50 > 0 ? static_cast<double>(bytes) / ranks / chained.p50 / 1e3 : 0;
  }
};
std::vector<GpuResult> results_of(const GpuBenchSettings& settings, const GpuBoard& board);
std::string table(const GpuBenchSettings& settings, const std::vector<GpuResult>& results);
nlohmann::json to_json(const GpuBenchSettings& settings, const std::vector<GpuResult>& results,
                       const std::vector<std::string>& command);

/// Whether there are GPUs for these ranks; says why not, on standard error.
bool gpus_suffice(const BenchSettings& shape);
/// What every rank does: check, then measure. Collective. Throws when an exchange brings wrong
/// data: nothing is measured then.
void bench_gpu(const GpuBenchSettings& settings, const GpuBoard& board,
               std::shared_ptr<Bootstrap> bootstrap);

/// The whole command; returns its exit code.
struct GpuOutput {
  bool json = false;
  std::string json_file{};  ///< "": standard output
  std::string plot_file{};  ///< "": none
};
/// `nccl`: as find_nccl takes it.
int run_gpu_bench(GpuBenchSettings settings, const std::string& nccl, const GpuOutput& output,
                  const std::vector<std::string>& command);

}  // namespace ferry::cli
