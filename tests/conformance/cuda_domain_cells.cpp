#include "cuda_domain_cells.hpp"

#include <chrono>
#include <cstdio>

#include "domain_cases.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

struct Cell {
  DomainCell cell;
  std::vector<Case> cases{};
};

std::vector<Cell> deal(const CudaOptions& options, const DomainCells& given) {
  std::vector<Cell> cells;
  for (const DomainShape& shape : given.shapes) {
    if (shape.threads && !may_be_threads(options, shape.ranks)) continue;
    const Wires wires(shape.threads ? FabricKind::local : FabricKind::shm, shape.domain_size,
                      shape.threads ? FabricKind::sim : options.network, shape.crossing);
    cells.push_back({{shape.ranks, wires}});
  }
  const auto choices = random_choices(given.mode, given.cases, mix(options.seed, given.salt));
  for (std::size_t i = 0; i < choices.size(); ++i) {
    Cell& cell = cells[i % cells.size()];
    Case c = placed(make_case(given.mode, choices[i]), cell.cell);
    size_case(c, mix(options.seed, given.salt + 1, i));
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

}  // namespace

DomainRun run_domain_cells(const CudaOptions& options, const DomainCells& given) {
  const std::vector<Cell> cells = deal(options, given);
  const double each = options.seconds / static_cast<double>(cells.size());
  DomainRun all;
  for (const Cell& cell : cells) {
    SharedNumber done;
    const std::int64_t from = now_ns();
    const auto most = static_cast<std::int64_t>(each * 1e9);
    Fleet fleet;
    fleet.wires = cell.cell.wires;
    fleet.ranks = cell.cell.ranks;
    fleet.gpus = options.gpus;
    fleet.deadline = std::chrono::seconds(80);
    const std::string what = std::string(given.name) + ", " + to_string(cell.cell);
    const auto body = [&](Rank& rank) { run_cell(rank, cell, most, done); };
    all.ok = report(what, run_fleet(fleet, body)) && *done > 0 && all.ok;
    std::printf("  %s: %lld of %zu cases, %.1f s\n", what.c_str(), static_cast<long long>(*done),
                cell.cases.size(), static_cast<double>(now_ns() - from) * 1e-9);
    std::fflush(stdout);
    all.cases += *done;
  }
  return all;
}

}  // namespace ferry::conformance
