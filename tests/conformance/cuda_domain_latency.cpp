// Latency mode on GPUs in several virtual domains: the results of one domain, graphs, and ranks
// that do not come, or come back.
#include <chrono>
#include <functional>
#include <vector>

#include "cuda/engine_graph.hpp"
#include "cuda_domain_cells.hpp"
#include "device.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

/// Domains of one, of two, uneven ones.
constexpr DomainShape kLatencyShapes[]{
    {2, 1, true}, {2, 1, false}, {4, 2, false}, {3, 2, false}, {4, 1, false}};

/// An exchange whose tokens come back as they went: two experts, each with weight ½.
class Mirror {
 public:
  static constexpr std::int64_t kTokens = 12, kHidden = 2048;
  static constexpr int kTopk = 2;

  Mirror(Rank& rank, Group& group, bool masks)
      : rank_(rank),
        group_(group),
        exchange_(group, {kTokens, kHidden, kTopk, Dtype::f32, masks}),
        x_(allocate(kTokens * kHidden * sizeof(float), rank.where())),
        ids_(allocate(kTokens * kTopk * sizeof(std::int64_t), rank.where())),
        weights_(allocate(kTokens * kTopk * sizeof(float), rank.where())) {
    const std::vector<float> halves(kTokens * kTopk, 0.5F);
    copy_bytes(weights_.get(), halves.data(), halves.size() * sizeof(float), rank.where());
  }

  LatencyExchange& exchange() { return exchange_; }

  void fill(std::uint64_t seed) {
    Random random(mix(seed, static_cast<std::uint64_t>(rank_.rank())));
    values_.resize(kTokens * kHidden);
    for (float& value : values_) value = static_cast<float>(random.below(1 << 20));
    std::vector<std::int64_t> ids;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t first = random.below(group_.experts());
      ids.push_back(first);
      ids.push_back((first + 1 + random.below(group_.experts() - 1)) % group_.experts());
    }
    copy_bytes(x_.get(), values_.data(), values_.size() * sizeof(float), rank_.where());
    copy_bytes(ids_.get(), ids.data(), ids.size() * sizeof(std::int64_t), rank_.where());
  }

  void run(Stream* stream = nullptr, bool hooks = false) {
    LatencyDispatchOptions there{.hook = hooks, .stream = stream};
    received_ =
        exchange_.dispatch({x_.get(), Dtype::f32, {kTokens, kHidden}, rank_.where()},
                           {ids_.get(), Dtype::i64, {kTokens, kTopk}, rank_.where()}, there);
    if (hooks) received_.receive();
    LatencyCombineOptions back{.path = CombinePath::per_rank, .hook = hooks, .stream = stream};
    combined_ =
        exchange_.combine(received_.x, received_,
                          {weights_.get(), Dtype::f32, {kTokens, kTopk}, rank_.where()}, back);
    if (hooks) combined_.receive();
  }

  /// What has come back is what went.
  void check(const char* what) {
    const Tensor got = to_cpu(combined_.x);
    const auto* sums = got.as<float>();
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (sums[i] == values_[i]) continue;
      rank_.fail(std::string(what) + ": element " + std::to_string(i) + " came back as " +
                 std::to_string(sums[i]) + ", expected " + std::to_string(values_[i]));
      return;
    }
  }
  const LatencyReceived& received() const { return received_; }
  /// Gives the results back: after a rejoin they keep buffers that the next calls may need.
  void drop() {
    received_ = {};
    combined_ = {};
  }

 private:
  Rank& rank_;
  Group& group_;
  LatencyExchange exchange_;
  std::shared_ptr<void> x_, ids_, weights_;
  std::vector<float> values_{};
  LatencyReceived received_{};
  LatencyCombined combined_{};
};

Fleet two_domains(const CudaOptions& options) {
  return in_domains(options, {2, 1, false});
}

/// Captured, with hooks and without, and replayed with other tokens and routes.
bool run_graphs(const CudaOptions& options) {
  constexpr int kReplays = 60;
  return report("graphs", run_fleet(two_domains(options), [&](Rank& rank) {
                  Group group(rank.bootstrap(), group_config(rank, 6));
                  Mirror mirror(rank, group, false);
                  mirror.fill(options.seed);
                  mirror.run();
                  mirror.check("before the graph");
                  const auto stream = make_stream(rank.where());
                  for (const bool hooks : {false, true}) {
                    const test::Graph graph(static_cast<cudaStream_t>(stream->native()),
                                            [&] { mirror.run(stream.get(), hooks); });
                    for (int i = 0; i < kReplays && rank.failures() == 0; ++i) {
                      mirror.fill(mix(options.seed, 243, static_cast<std::uint64_t>(i)));
                      graph.launch();
                      stream->synchronize();
                      mirror.check("a replay");
                    }
                  }
                  rank.meet();
                }));
}

/// Rank 1 does not come to a dispatch. `masks`: rank 0 goes on without it, and its rows are zero.
bool run_late(const CudaOptions& options, bool masks) {
  const auto body = [&](Rank& rank) {
    GroupConfig config = group_config(rank, 4);
    config.deadline = std::chrono::seconds(2);
    Group group(rank.bootstrap(), config);
    Mirror mirror(rank, group, masks);
    for (std::uint64_t i = 0; i < 5; ++i) {
      mirror.fill(mix(options.seed, 244, i));
      mirror.run(nullptr, i % 2 == 1);
      mirror.check("an exchange of both ranks");
    }
    rank.meet();
    if (rank.rank() == 0) {
      const std::int64_t start = now_ns();
      try {
        mirror.fill(mix(options.seed, 245));
        mirror.run();
        rank.check(masks, "an exchange ended without rank 1");
      } catch (const Error& error) {
        rank.check(!masks && error.kind() == ErrorKind::deadline && error.peer() == 1 &&
                       error.context().stage.find("latency dispatch") != std::string::npos,
                   std::string("a late rank: got ") + error.what());
      }
      const double waited = static_cast<double>(now_ns() - start) * 1e-9;
      rank.check(waited > 1.5 && waited < 12, "waited for " + std::to_string(waited) + " s");
      if (masks) {
        rank.check(mirror.exchange().masked()[1], "rank 1 is not masked");
        rank.equal(*mirror.exchange().mask_count(), std::uint64_t{1}, "mask_count");
        const std::int64_t again = now_ns();
        mirror.run();
        rank.check(now_ns() - again < 1'000'000'000, "a masked rank was waited for again");
      }
    }
    rank.meet();
  };
  return report(masks ? "a masked rank" : "a late rank", run_fleet(two_domains(options), body));
}

/// The error of `call`; Error(system) if there was none.
Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorKind::system, "no error");
}

/// The last rank does not come, is masked, is missed by a rejoin, and comes back by the next ones.
bool run_rejoin(const CudaOptions& options, int ranks, int domain_size) {
  const auto body = [&](Rank& rank) {
    const int late = ranks - 1;
    GroupConfig config = group_config(rank, 2 * ranks);
    config.deadline = std::chrono::seconds(2);
    Group group(rank.bootstrap(), config);
    Mirror mirror(rank, group, true);
    LatencyExchange& exchange = mirror.exchange();
    std::uint64_t seed = mix(options.seed, 246);
    const auto exchange_all = [&](const char* what) {
      for (int i = 0; i < 5 && rank.failures() == 0; ++i) {
        mirror.fill(++seed);
        mirror.run(nullptr, i % 2 == 1);
        mirror.check(what);
      }
    };
    exchange_all("an exchange of all ranks");
    rank.meet();
    if (rank.rank() != late) {
      for (int i = 0; i < 3; ++i) mirror.run();
      rank.check(exchange.masked()[static_cast<std::size_t>(late)], "the late rank is not masked");
      rank.meet();
      const Error missed = error_of([&] { exchange.rejoin(); });
      rank.check(missed.kind() == ErrorKind::deadline && missed.peer() == late,
                 std::string("a rejoin without the late rank: got ") + missed.what());
      const Error refused = error_of([&] { mirror.run(); });
      rank.check(refused.kind() == ErrorKind::evicted,
                 std::string("a call after a rejoin that failed: got ") + refused.what());
      rank.meet();
    } else {
      rank.meet();
      rank.meet();
      Error behind(ErrorKind::system, "nothing");  // the first may hold what came before
      for (int i = 0; i < 4 && behind.kind() != ErrorKind::evicted; ++i) {
        mirror.drop();
        behind = error_of([&] { mirror.run(); });
      }
      rank.check(behind.kind() == ErrorKind::evicted,
                 std::string("the late rank: got ") + behind.what());
    }
    for (int i = 0; i < 3; ++i) {
      mirror.drop();
      exchange.rejoin();
      for (const bool masked : exchange.masked()) rank.check(!masked, "masked after the rejoin");
      exchange_all("an exchange after the rejoin");
    }
    if (rank.rank() != late) rank.equal(*exchange.mask_count(), std::uint64_t{1}, "mask_count");
    rank.meet();
  };
  return report("a rejoin of " + std::to_string(ranks) + " ranks in domains of " +
                    std::to_string(domain_size),
                run_fleet(in_domains(options, {ranks, domain_size, false}), body));
}

}  // namespace

bool run_domain_latency(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const DomainRun all =
      run_domain_cells(options, {"latency", Mode::latency, kLatencyShapes, 160, 241});
  bool ok = all.ok;
  if (options.gpus > 0) ok = run_graphs(options) && ok;
  ok = run_late(options, false) && ok;
  ok = run_late(options, true) && ok;
  ok = run_rejoin(options, 2, 1) && ok;
  ok = run_rejoin(options, 3, 2) && ok;
  return conclude("domain_latency", ok, std::to_string(all.cases) + " cases", start);
}

}  // namespace ferry::conformance
