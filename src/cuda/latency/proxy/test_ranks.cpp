#include "cuda/latency/proxy/test_ranks.hpp"

#include "fabric/domains/domain_fabric.hpp"
#include "fabric/local/local.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/shm/shm.hpp"
#include "fabric/sim/sim.hpp"

namespace ferry::cuda::test {

FakeConfig small(bool masks) {
  FakeConfig config;
  config.exchange = {
      .capacity = 6, .hidden = 1152, .topk = 3, .dtype = Dtype::bf16, .masks = masks};
  return config;
}

std::unique_ptr<fabric::Fabric> over_sim(Bootstrap& bootstrap, const Domains& domains) {
  return fabric::make_domain_fabric(domains, fabric::make_local_fabric(bootstrap, 20s),
                                    fabric::make_sim_fabric(bootstrap, {.max_delay_us = 300}, 20s));
}

std::unique_ptr<fabric::Fabric> over_copies(Bootstrap& bootstrap, const Domains& domains) {
  return fabric::make_domain_fabric(domains, fabric::make_shm_fabric(bootstrap, 20s));
}

std::unique_ptr<fabric::Fabric> over_libfabric(Bootstrap& bootstrap, const Domains& domains) {
  return fabric::make_domain_fabric(domains, fabric::make_local_fabric(bootstrap, 20s),
                                    fabric::make_ofi_fabric(bootstrap, {}, 20s));
}

void with_ranks(int ranks, const FakeConfig& config, const MakeFabric& fabric,
                const std::function<void(FakeRank&, Bootstrap&)>& body) {
  const auto bootstraps = thread_bootstrap(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(r)];
      try {
        FakeRank rank(bootstrap, config,
                      fabric(bootstrap, Domains::blocks(ranks, config.domain_size)));
        body(rank, bootstrap);
        bootstrap.all_gather({}, 60s);
        rank.proxy().stop();
        bootstrap.all_gather({}, 60s);
        EXPECT_TRUE(rank.failures().empty()) << rank.failures().front();
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void exchange(FakeRank& rank, Generation g, std::uint32_t kind) {
  rank.send_dispatch(g);
  rank.receive_dispatch(g);
  rank.release(g);
  if (rank.pushes_weights(g, kind)) {
    rank.push_weights(g);
    rank.receive_weights(g);
  }
  rank.send_sums(g, kind);
  rank.receive_sums(g, kind);
}

}  // namespace ferry::cuda::test
