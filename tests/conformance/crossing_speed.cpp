// How long a dispatch and a combine take, direct and hierarchical, over a network of a given rate.
//
//   crossing_speed [--rate MB_PER_S] [--ranks N] [--domain N] [--topk N] [--limit DOMAINS]
//                  [--tokens N] [--hidden N] [--rounds N]
//
// Ranks are threads: memory inside a domain, the simulated network between, every rank's link
// shaped to the rate in both directions. --limit: a token's experts are in so many domains. Prints
// the median of every call on the slowest rank, the bytes that it sent across, and what the cost
// model says. A measurement, no test.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/plan_state.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/local/local.hpp"
#include "fabric/sim/sim.hpp"
#include "ferry/ferry.hpp"
#include "host/throughput/engine.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

struct Options {
  std::int64_t rate = 200;
  std::int64_t ranks = 8;
  std::int64_t domain = 4;
  std::int64_t topk = 8;
  std::int64_t limit = 0;
  std::int64_t tokens = 256;
  std::int64_t hidden = 2048;
  std::int64_t rounds = 5;
};

using Clock = std::chrono::steady_clock;

struct Times {
  std::vector<double> dispatch{}, combine{};
  std::uint64_t bytes = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<std::int64_t> routes_of(const Options& o, int rank, std::int64_t experts) {
  Random random(mix(base_seed(), 301, static_cast<std::uint64_t>(rank)));
  const std::int64_t domains = (o.ranks + o.domain - 1) / o.domain, each = experts / domains;
  const std::int64_t limit = o.limit > 0 ? o.limit : domains;
  std::vector<std::int64_t> ids;
  for (std::int64_t t = 0; t < o.tokens; ++t) {
    const std::int64_t first = random.below(domains);
    for (std::int64_t k = 0; k < o.topk; ++k) {
      ids.push_back((first + k % limit) % domains * each + random.below(each));
    }
  }
  return ids;
}

Times run_rank(const Options& o, Bootstrap& bootstrap, Crossing crossing) {
  GroupConfig config;
  config.experts = 8 * o.ranks;
  config.memory_bytes = std::size_t{256} << 20;
  const Domains domains = Domains::blocks(bootstrap.size(), static_cast<int>(o.domain));
  auto inside = fabric::make_local_fabric(bootstrap, config.deadline);
  fabric::SimOptions network;
  network.max_delay_us = 20;
  network.bytes_per_us = static_cast<std::uint64_t>(o.rate);
  auto across = fabric::make_sim_fabric(bootstrap, network, config.deadline);
  const auto engine = host::make_host_engine(
      bootstrap, config, domains,
      fabric::make_domain_fabric(domains, std::move(inside), std::move(across)));
  const std::vector<std::int64_t> ids = routes_of(o, bootstrap.rank(), config.experts);
  const std::vector<float> x(static_cast<std::size_t>(o.tokens * o.hidden), 1.0f);
  const Plan plan = engine->plan({ids.data(), Dtype::i64, {o.tokens, o.topk}}, {});
  if (bootstrap.rank() == 0 && crossing == Crossing::direct) {
    const CrossingCost cost = crossing_cost(plan.state()->exchange, plan.state()->crossing);
    std::printf("cost model, rows of the busiest rank: direct %.0f, hierarchical %.0f\n",
                cost.direct, cost.hierarchical);
  }
  Times times;
  DispatchOptions options;
  options.crossing = crossing;
  const auto seconds = [&](const auto& call) {
    engine->barrier();
    const auto start = Clock::now();
    call();
    engine->barrier();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  for (std::int64_t round = 0; round <= o.rounds; ++round) {  // the first one is not measured
    Received received;
    const std::uint64_t before = engine->network().put_bytes;
    const double there = seconds([&] {
      received = engine->dispatch({x.data(), Dtype::f32, {o.tokens, o.hidden}}, plan, options);
    });
    times.bytes = engine->network().put_bytes - before;
    const double back = seconds([&] { (void)engine->combine(received.x, plan, {}); });
    if (round == 0) continue;
    times.dispatch.push_back(there);
    times.combine.push_back(back);
  }
  engine->barrier();
  engine->destroy();
  return times;
}

int run(const Options& o) {
  for (const Crossing crossing : {Crossing::direct, Crossing::hierarchical}) {
    auto boots = thread_bootstrap(static_cast<int>(o.ranks));
    std::vector<Times> all(static_cast<std::size_t>(o.ranks));
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < all.size(); ++r) {
      threads.emplace_back([&, r] { all[r] = run_rank(o, *boots[r], crossing); });
    }
    for (std::thread& thread : threads) thread.join();
    double dispatch = 0, combine = 0;
    std::uint64_t bytes = 0;
    for (const Times& times : all) {
      dispatch = std::max(dispatch, median(times.dispatch));
      combine = std::max(combine, median(times.combine));
      bytes = std::max(bytes, times.bytes);
    }
    std::printf("%-12s dispatch %8.2f ms, combine %8.2f ms, %8.2f MB across in a dispatch\n",
                std::string(name_of(crossing)).c_str(), dispatch * 1e3, combine * 1e3,
                static_cast<double>(bytes) * 1e-6);
  }
  return 0;
}

}  // namespace
}  // namespace ferry::conformance

int main(int argc, char** argv) {
  ferry::conformance::Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    std::int64_t* value = name == "--rate"     ? &o.rate
                          : name == "--ranks"  ? &o.ranks
                          : name == "--domain" ? &o.domain
                          : name == "--topk"   ? &o.topk
                          : name == "--limit"  ? &o.limit
                          : name == "--tokens" ? &o.tokens
                          : name == "--hidden" ? &o.hidden
                          : name == "--rounds" ? &o.rounds
                                               : nullptr;
    if (value == nullptr) return std::fprintf(stderr, "unknown option %s\n", argv[i]), 2;
    *value = std::atoll(argv[i + 1]);
  }
  return ferry::conformance::run(o);
}
