// The matrix of throughput mode on GPUs in several virtual domains: the same results as in one.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "case.hpp"
#include "cuda_parts.hpp"
#include "device.hpp"
#include "domain_cases.hpp"
#include "exchange.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr int kCases = 400;  // dealt to the cells; the time decides how many of them run

struct Shape {
  int ranks, domain_size;
  bool threads;  ///< with a GPU each, over the simulated network; else processes, over copies
  Crossing crossing;
};
/// Domains of one, of two, uneven ones.
constexpr Shape kShapes[]{{2, 1, true, Crossing::hierarchical},  {2, 1, false, Crossing::direct},
                          {4, 2, false, Crossing::hierarchical}, {4, 2, false, Crossing::direct},
                          {3, 2, false, Crossing::hierarchical}, {3, 2, false, Crossing::direct},
                          {4, 1, false, Crossing::automatic}};

struct Cell {
  DomainCell cell;
  std::vector<Case> cases{};
};

std::vector<Cell> deal(const CudaOptions& options) {
  std::vector<Cell> cells;
  for (const Shape& shape : kShapes) {
    if (shape.threads && !may_be_threads(options, shape.ranks)) continue;
    const Wires wires(shape.threads ? FabricKind::local : FabricKind::shm, shape.domain_size,
                      shape.threads ? FabricKind::sim : FabricKind::automatic, shape.crossing);
    cells.push_back({{shape.ranks, wires}});
  }
  const auto choices = random_choices(Mode::device, kCases, mix(options.seed, 231));
  for (std::size_t i = 0; i < choices.size(); ++i) {
    Cell& cell = cells[i % cells.size()];
    Case c = placed(make_case(Mode::device, choices[i]), cell.cell);
    size_case(c, mix(options.seed, 232, i));
    cell.cases.push_back(c);
  }
  return cells;
}

/// Until the time is over, which rank 0 decides for all, from its first case on.
void run_cell(Rank& rank, const Cell& cell, std::int64_t most_ns, SharedNumber& done) {
  Session session(rank);
  const std::int64_t end = now_ns() + most_ns;
  for (const Case& c : cell.cases) {
    const bool enough = now_ns() > end || rank.failures() > 0;
    const std::byte over{enough ? std::uint8_t{1} : std::uint8_t{0}};
    const auto told = rank.bootstrap()->all_gather({&over, 1}, std::chrono::seconds(100));
    if (told[0][0] != std::byte{0}) return;
    run_case(session, c, to_string(cell.cell) + ": ");
    if (rank.rank() == 0) ++*done;
  }
}

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
    if (rank.rank() == 1) {
      rank.meet();
      return;
    }
    const auto stream = make_stream(rank.where());
    const std::int64_t start = now_ns();
    try {
      DispatchOptions late;
      late.stream = stream.get();
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
  Fleet fleet;
  fleet.wires = Wires(FabricKind::shm, 1, FabricKind::automatic, Crossing::automatic);
  fleet.ranks = 2;
  fleet.gpus = options.gpus;
  const auto failures = run_fleet(fleet, body);
  if (!failures.empty()) std::printf("FAILED late rank:\n%s", joined(failures).c_str());
  return failures.empty();
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
        ::kill(getpid(), SIGKILL);
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
  Fleet fleet;
  fleet.wires = Wires(FabricKind::shm, 2, FabricKind::automatic, Crossing::hierarchical);
  fleet.ranks = 4;
  fleet.gpus = options.gpus;
  fleet.victim = kVictim;
  const auto failures = run_fleet(fleet, body);
  if (!failures.empty()) std::printf("FAILED killed rank:\n%s", joined(failures).c_str());
  return failures.empty();
}

}  // namespace

bool run_domains(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const std::vector<Cell> cells = deal(options);
  const double each = options.seconds / static_cast<double>(cells.size());
  std::int64_t all = 0;
  bool ok = true;
  for (const Cell& cell : cells) {
    SharedNumber done;
    const std::int64_t from = now_ns();
    const auto most = static_cast<std::int64_t>(each * 1e9);
    Fleet fleet;
    fleet.wires = cell.cell.wires;
    fleet.ranks = cell.cell.ranks;
    fleet.gpus = options.gpus;
    fleet.deadline = std::chrono::seconds(80);
    const auto failures = run_fleet(fleet, [&](Rank& rank) { run_cell(rank, cell, most, done); });
    if (!failures.empty()) {
      std::printf("FAILED domains, %s:\n%s", to_string(cell.cell).c_str(),
                  joined(failures).c_str());
    }
    std::printf("  domains, %s: %lld of %zu cases, %.1f s\n", to_string(cell.cell).c_str(),
                static_cast<long long>(*done), cell.cases.size(),
                static_cast<double>(now_ns() - from) * 1e-9);
    std::fflush(stdout);
    ok = ok && failures.empty() && *done > 0;
    all += *done;
  }
  ok = run_late(options) && ok;
  ok = run_killed(options) && ok;
  return conclude("domains", ok && all > 0, std::to_string(all) + " cases", start);
}

}  // namespace ferry::conformance
