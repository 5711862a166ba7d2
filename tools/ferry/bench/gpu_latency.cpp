// Latency mode on GPUs: replays of graphs.
#include <fmt/format.h>

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "bench/gpu_rank.hpp"
#include "bench/latency_check.hpp"
#include "bench/rank.hpp"

namespace ferry::cli {
namespace {

/// Copied before each half, so that everything has come and the GPU is behind the CPU.
constexpr std::size_t kLatencyHoldBytes = std::size_t{96} << 20;

struct GpuClock {
  GpuClock() {
    for (cudaEvent_t& event : events) need(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~GpuClock() {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
  }
  GpuClock(const GpuClock&) = delete;
  GpuClock& operator=(const GpuClock&) = delete;
  /// Microseconds between two that were recorded.
  double between(std::size_t first, std::size_t second) const {
    float ms = 0;
    need(cudaEventElapsedTime(&ms, events[first], events[second]), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(ms);
  }
  std::array<cudaEvent_t, 10> events{};
};

/// Calls that are captured once.
class Replay {
 public:
  Replay(cudaStream_t stream, const std::function<void()>& calls) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
         "cudaStreamBeginCapture");
    calls();
    need(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    need(cudaGraphInstantiate(&made_, graph, 0), "cudaGraphInstantiate");
    need(cudaGraphDestroy(graph), "cudaGraphDestroy");
    need(cudaGraphUpload(made_, stream), "cudaGraphUpload");
  }
  ~Replay() { cudaGraphExecDestroy(made_); }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  void launch() const { need(cudaGraphLaunch(made_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t made_ = nullptr;
};

class LatencyRank {
 public:
  LatencyRank(const BenchSettings& s, Group& group, GpuStream& stream, int device)
      : s_(s),
        group_(group),
        stream_(stream),
        device_{DeviceKind::cuda, device},
        latency_(group, latency_config(s)),
        pattern_(s.seed, s.hidden, s.combine_dtype()),
        routes_(make_routes(s, s.latency_tokens, group.rank())),
        x_(tokens() * pattern_.row_bytes()),
        ids_(routes_.size() * sizeof(std::int64_t)),
        weights_(routes_.size() * sizeof(float)),
        rows_(places() * pattern_.row_bytes()),
        out_(tokens() * pattern_.row_bytes()),
        hold_(2 * kLatencyHoldBytes) {
    std::vector<std::byte> x(tokens() * pattern_.row_bytes());
    pattern_.fill(x.data(), group.rank(), s.latency_tokens);
    stream.upload(x_.data(), x.data(), x.size());
    stream.upload(ids_.data(), routes_.data(), routes_.size() * sizeof(std::int64_t));
    const std::vector<float> ones(routes_.size(), 1.0f);
    stream.upload(weights_.data(), ones.data(), ones.size() * sizeof(float));
    need(cudaMemset(hold_.data(), 0, 2 * kLatencyHoldBytes), "cudaMemset");
  }

  BenchRows rows() const { return count_rows(s_, routes_, s_.latency_tokens, group_.rank()); }

  /// Both paths once, every byte compared; what the experts make is there from then on.
  void check() {
    for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
      const LatencyReceived received = dispatch();
      stream_.stream->synchronize();
      check_rows(received);
      (void)combine(received, path);
      stream_.stream->synchronize();
      check_sums();
    }
  }

  void measure(const BenchBoard& board) {
    const Replay dispatches(stream_.raw, [&] {
      for (int i = 0; i < s_.chain; ++i) (void)dispatch();
    });
    measure(board, BenchCase::latency_dispatch, dispatches);
    for (const bool slots : {true, false}) {
      const CombinePath path = slots ? CombinePath::per_slot : CombinePath::per_rank;
      const Replay pairs(stream_.raw, [&] {
        for (int i = 0; i < s_.chain; ++i) (void)combine(dispatch(), path);
      });
      measure(board, slots ? BenchCase::latency_pair_slots : BenchCase::latency_pair_ranks, pairs);
      check_sums();
    }
    measure_halves(board);
    check_sums();
  }

 private:
  std::size_t tokens() const { return static_cast<std::size_t>(s_.latency_tokens); }
  /// Of expert-major results.
  std::size_t places() const {
    return static_cast<std::size_t>(group_.local_experts() * s_.ranks) * tokens();
  }
  LatencyReceived dispatch(bool hook = false) {
    const Extents shape{s_.latency_tokens, s_.topk};
    LatencyDispatchOptions options;
    if (s_.dtype == Dtype::e4m3) options.format = WireFormat::e4m3;
    options.topk_weights = ConstTensorView(weights_.data(), Dtype::f32, shape, device_);
    options.hook = hook;
    options.stream = &*stream_.stream;
    return latency_.dispatch(
        {x_.data(), s_.combine_dtype(), {s_.latency_tokens, s_.hidden}, device_},
        {ids_.data(), Dtype::i64, shape, device_}, options);
  }
  LatencyCombined combine(const LatencyReceived& received, CombinePath path, bool hook = false) {
    LatencyCombineOptions options;
    options.path = path;
    options.hook = hook;
    options.stream = &*stream_.stream;
    options.out =
        TensorView(out_.data(), s_.combine_dtype(), {s_.latency_tokens, s_.hidden}, device_);
    const ConstTensorView rows(rows_.data(), s_.combine_dtype(),
                               {group_.local_experts(), s_.ranks * s_.latency_tokens, s_.hidden},
                               device_);
    return latency_.combine(rows, received, options);
  }

  void check_rows(const LatencyReceived& received) {
    std::vector<std::byte> x(places() * static_cast<std::size_t>(s_.hidden) *
                             size_of(received.x.dtype()));
    stream_.download(x.data(), received.x.data(), x.size());
    std::vector<float> scales(places() * static_cast<std::size_t>(s_.scales()));
    if (!scales.empty()) {
      stream_.download(scales.data(), received.scales.data(), scales.size() * sizeof(float));
    }
    const auto ranges = stream_.get<std::int64_t>(received.ranges);
    const auto source_token = stream_.get<std::int32_t>(received.source_token);
    const LatencyArrival arrival{x.data(), scales.data(), ranges.data(), source_token.data(),
                                 group_.local_experts()};
    check_arrival(s_, arrival, pattern_);
    for_each_row(s_, arrival, [&](std::int64_t row, int source, std::int64_t token) {
      auto* to = static_cast<std::byte*>(rows_.data()) +
                 static_cast<std::size_t>(row) * pattern_.row_bytes();
      need(cudaMemcpyAsync(to, pattern_.row(source, token), pattern_.row_bytes(),
                           cudaMemcpyHostToDevice, stream_.raw),
           "cudaMemcpyAsync");
    });
    stream_.stream->synchronize();
  }
  void check_sums() {
    std::vector<std::byte> sums(tokens() * pattern_.row_bytes());
    stream_.download(sums.data(), out_.data(), sums.size());
    check_latency_sums(s_, sums.data(), group_.rank());
  }

  void note(const BenchBoard& board, BenchCase which, int iteration, double us) const {
    if (iteration >= 0) board.sample(board.line_of(which), group_.rank(), iteration) = us;
  }
  /// The period of one of a chain. The replay before brings all ranks to the same point in time.
  void measure(const BenchBoard& board, BenchCase which, const Replay& replay) {
    for (int i = -s_.warmup; i < s_.iterations; ++i) {
      group_.barrier();
      replay.launch();
      need(cudaEventRecord(clock_.events[0], stream_.raw), "cudaEventRecord");
      replay.launch();
      need(cudaEventRecord(clock_.events[1], stream_.raw), "cudaEventRecord");
      stream_.stream->synchronize();
      note(board, which, i, clock_.between(0, 1) / s_.chain);
    }
    if (group_.rank() == 0) board.report(board.line_of(which));
  }

  void record(std::size_t event) {
    need(cudaEventRecordWithFlags(clock_.events[event], stream_.raw, cudaEventRecordExternal),
         "cudaEventRecordWithFlags");
  }
  void hold() {
    auto* from = static_cast<std::byte*>(hold_.data());
    need(cudaMemcpyAsync(from + kLatencyHoldBytes, from, kLatencyHoldBytes,
                         cudaMemcpyDeviceToDevice, stream_.raw),
         "cudaMemcpyAsync");
  }
  void measure_halves(const BenchBoard& board) {
    const Replay halves(stream_.raw, [&] {
      hold();
      record(0);
      LatencyReceived received = dispatch(true);
      record(1);
      hold();
      record(2);
      received.receive();
      record(3);
      hold();
      record(4);
      LatencyCombined combined = combine(received, CombinePath::per_rank, true);
      record(5);
      hold();
      record(6);
      combined.receive();
      record(7);
      hold();
      record(8);
      record(9);
    });
    constexpr BenchCase kParts[] = {BenchCase::latency_dispatch_send,
                                    BenchCase::latency_dispatch_receive,
                                    BenchCase::latency_combine_send,
                                    BenchCase::latency_combine_receive, BenchCase::latency_events};
    for (int i = -s_.warmup; i < s_.iterations; ++i) {
      group_.barrier();
      halves.launch();
      halves.launch();
      stream_.stream->synchronize();
      for (std::size_t part = 0; part < std::size(kParts); ++part) {
        note(board, kParts[part], i, clock_.between(2 * part, 2 * part + 1));
      }
    }
    if (group_.rank() == 0) board.report(board.line_of(BenchCase::latency_events));
  }

  const BenchSettings& s_;
  Group& group_;
  GpuStream& stream_;
  Device device_;
  LatencyExchange latency_;
  RowPattern pattern_;
  std::vector<std::int64_t> routes_;
  GpuBuffer x_, ids_, weights_, rows_, out_, hold_;
  GpuClock clock_{};
};

}  // namespace

void bench_gpu_latency(const BenchSettings& settings, const BenchBoard& board,
                       std::shared_ptr<Bootstrap> bootstrap) {
  GroupConfig config = choose_gpu(settings, bootstrap->rank());
  const int device = config.device;
  config.memory_bytes = std::size_t{16} << 20;
  GpuStream stream(device);
  Group group(std::move(bootstrap), config);
  LatencyRank rank(settings, group, stream, device);
  board.rows(0, group.rank()) = rank.rows();
  rank.check();
  rank.measure(board);
  group.barrier();  // nobody leaves while another still reads
}

}  // namespace ferry::cli
