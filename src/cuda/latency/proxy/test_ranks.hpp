// Ranks of a latency exchange as threads with their proxies, over one kind of network or another.
#pragma once
#include <functional>
#include <memory>

#include "cuda/latency/proxy/test_rank.hpp"

namespace ferry::cuda::test {

FakeConfig small(bool masks = false);

using MakeFabric = std::function<std::unique_ptr<fabric::Fabric>(Bootstrap&, const Domains&)>;

/// A network that keeps no order.
std::unique_ptr<fabric::Fabric> over_sim(Bootstrap& bootstrap, const Domains& domains);
/// Copies through shared memory.
std::unique_ptr<fabric::Fabric> over_copies(Bootstrap& bootstrap, const Domains& domains);
std::unique_ptr<fabric::Fabric> over_libfabric(Bootstrap& bootstrap, const Domains& domains);

void with_ranks(int ranks, const FakeConfig& config, const MakeFabric& fabric,
                const std::function<void(FakeRank&, Bootstrap&)>& body);

/// One dispatch with its combine.
void exchange(FakeRank& rank, Generation g, std::uint32_t kind);

}  // namespace ferry::cuda::test
