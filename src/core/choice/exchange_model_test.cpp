// The closed form against its definition.
#include "ferry/exchange_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>

namespace ferry {
namespace {

constexpr unsigned kModelSeed = 20261124;

TEST(ExchangeModel, UniformBytesAreThoseOfRandomRoutes) {
  std::mt19937 random(kModelSeed);
  for (const bool hierarchical : {false, true}) {
    ExchangeShape shape{.ranks = 32,
                        .host_ranks = 4,
                        .tokens = 30000,
                        .topk = 6,
                        .row_bytes = 1,
                        .hierarchical = hierarchical};
    ExchangeRates rates;
    rates.leaf_hosts = 2;
    double across = 0, inside = 0, spine = 0;
    for (int token = 0; token < 30000; ++token) {
      const int source = static_cast<int>(random() % 32);
      std::set<int> ranks, hosts;
      for (int k = 0; k < shape.topk; ++k) ranks.insert(static_cast<int>(random() % 32));
      for (const int rank : ranks) hosts.insert(rank / 4);
      for (const int host : hosts) {
        const auto copies = hierarchical ? 1
                                         : std::count_if(ranks.begin(), ranks.end(),
                                                         [&](int r) { return r / 4 == host; });
        if (host != source / 4) across += static_cast<double>(copies);
        if (host / 2 != source / 8) spine += static_cast<double>(copies);
      }
      for (const int rank : ranks) {  // from the source, or from the rank on its rail
        const bool near = hierarchical || rank / 4 == source / 4;
        inside += near && rank % 4 != source % 4 ? 1 : 0;
      }
    }
    const ExchangeBytes bytes = uniform_bytes(shape, rates);
    EXPECT_NEAR(bytes.nic, across, 0.01 * across);
    EXPECT_NEAR(bytes.nvlink, inside, 0.02 * inside);
    EXPECT_NEAR(bytes.spine, spine, 0.02 * spine);
  }
}

TEST(ExchangeModel, LatencyAndRowsOverlapAsFarAsTheRatesSay) {
  ExchangeRates rates;
  rates.latency_s = 3;
  rates.copy = 1;
  rates.nvlink_out = rates.nvlink_in = 1;
  const ExchangeBytes bytes{.copy = 1, .nvlink = 3};
  EXPECT_DOUBLE_EQ(exchange_time(bytes, rates).seconds(), 6);  // latency, then the longest
  rates.overlap = 2;
  EXPECT_DOUBLE_EQ(exchange_time(bytes, rates).seconds(), 5);  // hypot(3, 1 + 3)
}

TEST(ExchangeModel, NoCallTakesLessThanItsFlags) {
  ExchangeRates rates;
  rates.latency_s = 3;
  rates.hidden_latency = 1 / 3.0;
  rates.nvlink_out = rates.nvlink_in = 1;
  EXPECT_DOUBLE_EQ(exchange_time({.nvlink = 0.5}, rates).seconds(), 3);
  EXPECT_DOUBLE_EQ(exchange_time({.nvlink = 4}, rates).seconds(), 6);
}

TEST(ExchangeModel, ProductsSlowWhatTheGpuMovesAndNotTheNic) {
  ExchangeRates rates;
  rates.latency_s = 1;
  rates.copy = 2;
  rates.nvlink_out = rates.nvlink_in = 4;
  rates.nic_out = rates.nic_in = 1;
  rates.contention = 1.5;
  const ExchangeTime time = exchange_time({.copy = 4, .nvlink = 4, .nic = 2}, rates);
  EXPECT_DOUBLE_EQ(time.copy, 3);
  EXPECT_DOUBLE_EQ(time.nvlink_in, 1.5);
  EXPECT_DOUBLE_EQ(time.nic_in, 2);
  EXPECT_DOUBLE_EQ(time.seconds(), 4);
}

TEST(ExchangeModel, NamesWhatACallWaitsFor) {
  ExchangeBytes bytes;
  bytes.copy = bytes.nvlink = bytes.nic = 1e6;
  bytes.spine = 5e5;
  bytes.peers = 10;
  ExchangeRates rates;
  const auto name = [&] { return std::string(exchange_time(bytes, rates).bottleneck()); };
  rates.latency_s = 1e-5;
  EXPECT_EQ(name(), "latency");
  rates.copy = 5e10;
  EXPECT_EQ(name(), "SM copies");
  rates.nvlink_in = 4e10;
  EXPECT_EQ(name(), "NVLink in");
  rates.nic_out = 3e10;
  EXPECT_EQ(name(), "NIC out");
  rates.staging = 2.5e10;
  EXPECT_EQ(name(), "PCIe staging");
  rates.oversubscription = 4;
  EXPECT_EQ(name(), "spine");
  EXPECT_DOUBLE_EQ(exchange_time(bytes, rates).seconds(), 1e-5 + 4 * 5e5 / 3e10);
  rates.message_s = 1e-5;
  EXPECT_EQ(name(), "messages");
  EXPECT_DOUBLE_EQ(exchange_time(bytes, rates).seconds(), 1.1e-4 + 4 * 5e5 / 3e10);
}

}  // namespace
}  // namespace ferry
