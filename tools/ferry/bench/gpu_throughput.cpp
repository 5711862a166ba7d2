// Throughput mode on GPUs.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bench/gpu_rank.hpp"
#include "bench/rank.hpp"
#include "bench/tuning.hpp"

namespace ferry::cli {
namespace {

constexpr auto kThroughputWait = std::chrono::minutes(2);
/// Copied before every sample: long enough that the CPU is ahead of the GPU when it begins.
constexpr std::size_t kThroughputHoldBytes = std::size_t{768} << 20;
constexpr std::int64_t kAlignHidden = 128;

struct GpuEvent {
  GpuEvent() { need(cudaEventCreate(&raw), "cudaEventCreate"); }
  ~GpuEvent() { cudaEventDestroy(raw); }
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  cudaEvent_t raw = nullptr;
};

/// Brings all ranks' streams to the same point in time: a dispatch of one short row to every rank
/// ends when everybody's row has arrived. Nobody's CPU takes part.
class Aligner {
 public:
  Aligner(const BenchSettings& s, Group& group, GpuStream& stream, int device)
      : group_(group),
        stream_(stream),
        device_{DeviceKind::cuda, device},
        ranks_(std::min(s.ranks, 64)),
        ids_(sizeof(std::int64_t) * 64),
        x_(kAlignHidden * size_of(Dtype::bf16)),
        hold_(2 * kThroughputHoldBytes) {
    std::vector<std::int64_t> ids;
    for (int r = 0; r < ranks_; ++r) {
      std::int64_t expert = 0;
      while (expert < s.experts && rank_of_expert(expert, s.experts, ranks_) != r) {
        ++expert;
      }
      ids.push_back(expert < s.experts ? expert : -1);
    }
    stream.upload(ids_.data(), ids.data(), ids.size() * sizeof(std::int64_t));
    need(cudaMemset(hold_.data(), 0, 2 * kThroughputHoldBytes), "cudaMemset");
    plan_ = group.plan({ids_.data(), Dtype::i64, {1, ranks_}, device_}, {&*stream.stream});
    (void)plan_.recv_rows();
  }
  Received align() {
    auto* from = static_cast<std::byte*>(hold_.data());
    need(cudaMemcpyAsync(from + kThroughputHoldBytes, from, kThroughputHoldBytes,
                         cudaMemcpyDeviceToDevice, stream_.raw),
         "cudaMemcpyAsync");
    DispatchOptions options;
    options.stream = &*stream_.stream;
    options.num_sms = 1;
    return group_.dispatch({x_.data(), Dtype::bf16, {1, kAlignHidden}, device_}, plan_, options);
  }

 private:
  Group& group_;
  GpuStream& stream_;
  Device device_;
  int ranks_;
  GpuBuffer ids_, x_, hold_;
  Plan plan_{};
};

/// Microseconds of one of `calls` calls.
double sample(Aligner& aligner, GpuExchange& exchange, Group& group, GpuStream& stream,
              const BenchLine& line, int calls) {
  const GpuEvent begin, end;
  std::vector<GpuMade> made;
  made.reserve(static_cast<std::size_t>(calls));
  group.barrier();
  const Received aligned = aligner.align();
  need(cudaEventRecord(begin.raw, stream.raw), "cudaEventRecord");
  for (int i = 0; i < calls; ++i) made.push_back(exchange.call(line.which, line.num_sms));
  need(cudaEventRecord(end.raw, stream.raw), "cudaEventRecord");
  for (const GpuMade& each : made) {
    each.received.event.wait(kThroughputWait);
    each.combined.event.wait(kThroughputWait);
  }
  need(cudaEventSynchronize(end.raw), "cudaEventSynchronize");
  float ms = 0;
  need(cudaEventElapsedTime(&ms, begin.raw, end.raw), "cudaEventElapsedTime");
  return 1e3 * static_cast<double>(ms) / calls;
}

void measure(const BenchSettings& s, const BenchBoard& board, std::size_t at, Aligner& aligner,
             GpuExchange& exchange, Group& group, GpuStream& stream) {
  for (const bool alone : {false, true}) {
    for (int i = -s.warmup; i < s.iterations; ++i) {
      const double us =
          sample(aligner, exchange, group, stream, board.lines[at], alone ? 1 : s.chain);
      if (i >= 0) board.sample(at, group.rank(), i, alone) = us;
    }
  }
  if (group.rank() == 0) board.report(at);
}

/// Calls whose number of SMs the tuner chooses: more than a search takes. Ranks may settle some
/// calls apart, so all make as many.
void tune(GpuExchange& exchange, BenchCase which) {
  constexpr int kCalls = 200;
  for (int i = 0; i < kCalls; ++i) {
    const GpuMade made = exchange.call(which, 0);
    made.received.event.wait(kThroughputWait);
    made.combined.event.wait(kThroughputWait);
  }
}

GroupConfig tuned(GroupConfig config, const BenchSettings& settings) {
  if (settings.tune.empty()) return config;
  config.tune = true;
  const auto [fewest, most] = std::minmax_element(settings.num_sms.begin(), settings.num_sms.end());
  if (*fewest < *most) config.fewest_sms = *fewest;
  if (*fewest < *most) config.most_sms = *most;
  return config;
}

/// Room for the results of a chain of calls, and for what combine reads; larger needs grow it.
std::size_t memory_for(const BenchSettings& s, const std::vector<BenchLine>& lines) {
  std::int64_t tokens = 0;
  for (const BenchLine& line : lines) tokens = std::max(tokens, line.tokens);
  const auto row = static_cast<std::size_t>(s.hidden) * 2;
  const auto by_rank = static_cast<std::size_t>(s.ranks * tokens) * row;
  const auto local = static_cast<std::size_t>(s.experts / s.ranks + 1);
  const auto by_expert = static_cast<std::size_t>(tokens * s.topk) * row * 5 / 4 +
                         local * static_cast<std::size_t>(s.alignment) * row;
  std::size_t free = 0, total = 0;
  need(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const auto calls = static_cast<std::size_t>(s.chain) + 2;
  return std::min(calls * (by_rank + by_expert) + (std::size_t{64} << 20), free / 2);
}

}  // namespace

void bench_gpu_throughput(const BenchSettings& settings, const BenchBoard& board,
                          std::shared_ptr<Bootstrap> bootstrap) {
  GroupConfig config = tuned(choose_gpu(settings, bootstrap->rank()), settings);
  const int device = config.device;
  config.memory_bytes = memory_for(settings, board.lines);
  GpuStream stream(device);
  std::optional<NcclRank> nccl;
  if (!settings.nccl.library.empty()) nccl.emplace(settings.nccl, *bootstrap);
  Group group(std::move(bootstrap), config);
  Aligner aligner(settings, group, stream, device);

  std::size_t at = 0;
  while (at < board.lines.size()) {
    const BenchLine first = board.lines[at];
    const auto same = [&](const BenchLine& line) {
      return line.tokens_index == first.tokens_index && line.dtype == first.dtype;
    };
    std::size_t end = at;
    bool combines = false;
    for (; end < board.lines.size() && same(board.lines[end]); ++end) {
      combines = combines || is_combine(board.lines[end].which);
    }
    GpuExchange exchange(settings.with(first.tokens, first.dtype), group, stream, device,
                         nccl ? &*nccl : nullptr);
    board.rows(first.tokens_index, group.rank()) = exchange.rows();
    exchange.check(combines);
    for (; at < end; ++at) {
      const BenchLine& line = board.lines[at];
      if (has_sms(line.which) && line.num_sms == 0) tune(exchange, line.which);
      measure(settings, board, at, aligner, exchange, group, stream);
    }
    group.barrier();
  }
  if (!settings.tune.empty() && group.rank() == 0) write_tuning(settings.tune, group.tuning(), {});
}

}  // namespace ferry::cli
