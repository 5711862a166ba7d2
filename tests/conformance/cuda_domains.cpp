// The matrix of throughput mode on GPUs in several virtual domains: the same results as in one.
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "cuda_domain_cells.hpp"
#include "device.hpp"
#include "exchange.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

/// Domains of one, of two, uneven ones.
constexpr DomainShape kDomainShapes[]{
    {2, 1, true, Crossing::hierarchical},  {2, 1, false, Crossing::direct},
    {4, 2, false, Crossing::hierarchical}, {4, 2, false, Crossing::direct},
    {3, 2, false, Crossing::hierarchical}, {3, 2, false, Crossing::direct},
    {4, 1, false, Crossing::automatic}};

/// Rows of one value, all for the last rank's expert, on the rank's device.
struct Tokens {
  static constexpr std::int64_t kCount = 16, kHidden = 64;
  Tensor x, routes;
  Tokens(float value, std::int64_t expert, Device where) {
    const std::vector<float> rows(kCount * kHidden, value);
    const std::vector<std::int64_t> ids(kCount, expert);
    x = to_device(ConstTensorView(rows.data(), Dtype::f32, {kCount, kHidden}), where);
    routes = to_device(ConstTensorView(ids.data(), Dtype::i64, {kCount, 1}), where);
    if (!x.owner()) x = copied(rows.data(), rows.size() * 4, Dtype::f32, {kCount, kHidden});
    if (!routes.owner()) routes = copied(ids.data(), ids.size() * 8, Dtype::i64, {kCount, 1});
  }

 private:
  static Tensor copied(const void* from, std::size_t bytes, Dtype dtype, const Extents& shape) {
    const auto memory = allocate(bytes, {});
    copy_bytes(memory.get(), from, bytes, {});
    return {TensorView(memory.get(), dtype, shape), memory};
  }
};

/// So many tokens that what crosses comes in many chunks and portions, from one rank or from
/// several: results are those of the reference, round after round with the same plan.
bool run_long(const CudaOptions& options) {
  constexpr DomainShape kLong[]{{4, 2, false, Crossing::hierarchical},
                                {4, 2, false, Crossing::direct},
                                {3, 1, false, Crossing::hierarchical}};
  const auto body = [&](Rank& rank) {
    Case c = small_case(rank, mix(options.seed, 234));
    c.tokens = 2500;  // 64 a chunk
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      c.order = order;
      Group group(rank.bootstrap(), group_config(rank, c.experts()));
      Exchange exchange(rank, group, c);
      for (std::uint64_t round = 0; round < 3; ++round) exchange.run(round);
      rank.meet();
    }
  };
  bool ok = true;
  for (const DomainShape& shape : kLong) {
    ok = report("many chunks", run_fleet(in_domains(options, shape), body)) && ok;
  }
  return ok;
}

/// Rank 1 does not come to a dispatch whose rank 0 is on a stream: the stream is let go, the error
/// names rank 1 and where.
bool run_late(const CudaOptions& options) {
  const auto body = [](Rank& rank) {
    GroupConfig config = group_config(rank, 2);
    config.deadline = std::chrono::seconds(2);
    Group group(rank.bootstrap(), config);
    const Tokens tokens(1.0F, 1 - rank.rank(), rank.where());
    const Plan plan = group.plan(tokens.routes);
    const Received first = group.dispatch(tokens.x, plan);
    rank.equal(first.x.rows(), Tokens::kCount, "rows of the first dispatch");
    // What crosses is the rows, once, beside one message for each step.
    const auto sent = [&](const std::function<void()>& call) {
      const std::uint64_t before = group.network().put_bytes;
      call();
      return group.network().put_bytes - before;
    };
    const std::uint64_t rows = Tokens::kCount * Tokens::kHidden * sizeof(float);
    const std::uint64_t step = sent([&] { group.barrier(); });
    Received again;
    rank.equal(sent([&] { again = group.dispatch(tokens.x, plan); }), step + rows,
               "bytes that a dispatch sends");
    rank.equal(sent([&] { (void)group.combine(again.x, plan); }), step + rows,
               "bytes that a combine sends");
    if (rank.rank() == 1) {
      rank.meet();
      return;
    }
    const auto stream = make_stream(rank.where());
    const std::int64_t start = now_ns();
    try {
      DispatchOptions late{.stream = stream.get()};
      const Received second = group.dispatch(tokens.x, plan, late);
      second.event.wait(std::chrono::seconds(15));
      rank.fail("a dispatch ended without rank 1");
    } catch (const Error& error) {
      rank.check(error.kind() == ErrorKind::deadline && error.peer() == 1 &&
                     error.context().stage.find("dispatch") != std::string::npos,
                 std::string("a late rank: got ") + error.what());
    }
    const double waited = static_cast<double>(now_ns() - start) * 1e-9;
    rank.check(waited > 1.5 && waited < 12, "waited for " + std::to_string(waited) + " s");
    rank.meet();
  };
  return report("late rank", run_fleet(in_domains(options, {2, 1, false}), body));
}

/// Rank 3 of two domains of two is killed among exchanges: the ranks of both name it.
bool run_killed(const CudaOptions& options) {
  constexpr int kVictim = 3;
  SharedNumber at;
  const auto body = [&](Rank& rank) {
    const Case c = small_case(rank, mix(options.seed, 233));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    Exchange exchange(rank, group, c);
    exchange.run();
    rank.meet();
    if (rank.rank() == kVictim) {
      std::thread([&at] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        *at = now_ns();
        std::raise(SIGKILL);
      }).detach();
    }
    try {
      const std::int64_t start = now_ns();
      for (std::uint64_t i = 0; now_ns() - start < 20'000'000'000; ++i) exchange.run(i % 4);
      rank.fail("exchanges went on without rank 3");
    } catch (const Error& error) {
      rank.check(error.kind() == ErrorKind::peer_failed && error.peer() == kVictim,
                 std::string("a killed rank: got ") + error.what());
      rank.check(now_ns() - *at < 5'000'000'000, "a killed rank was named late");
    }
  };
  Fleet fleet = in_domains(options, {4, 2, false, Crossing::hierarchical});
  fleet.victim = kVictim;
  return report("killed rank", run_fleet(fleet, body));
}

}  // namespace

bool run_domains(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const DomainRun all =
      run_domain_cells(options, {"domains", Mode::device, kDomainShapes, 400, 231});
  bool ok = all.ok;
  ok = run_long(options) && ok;
  ok = run_late(options) && ok;
  ok = run_killed(options) && ok;
  return conclude("domains", ok, std::to_string(all.cases) + " cases", start);
}

}  // namespace ferry::conformance
