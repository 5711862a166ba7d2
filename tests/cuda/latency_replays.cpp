// A graph of latency exchanges, replayed for long.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "engine_graph.hpp"
#include "latency_load.hpp"

namespace ferry::test {

void replayed_rank(Bootstrap& bootstrap, const Shape& shape, int replays, std::uint64_t seed) {
  constexpr int kWorlds = 8, kSamples = 100;
  const int device = take_gpu(bootstrap);
  Group group(borrowed(bootstrap), config_for(shape));
  const Copier copier;
  const auto self = static_cast<std::size_t>(group.rank());
  std::vector<World> worlds;
  std::vector<std::unique_ptr<OnGpu>> inputs;
  for (int i = 0; i < kWorlds; ++i) {
    worlds.emplace_back(group.size(), shape, seed + static_cast<std::uint64_t>(i));
    for (Sent& sent : worlds.back().inputs) {  // other numbers of tokens
      const std::size_t used = sent.topk_idx.size() * static_cast<std::size_t>(i) / (kWorlds - 1);
      std::fill(sent.topk_idx.begin() + static_cast<std::ptrdiff_t>(used), sent.topk_idx.end(), -1);
    }
    inputs.push_back(std::make_unique<OnGpu>(worlds.back().inputs[self], shape, device, copier));
  }
  const OnGpu mine(worlds[0].inputs[self], shape, device, copier);
  OwnStream own(device);
  LatencyExchange latency(group, latency_config(shape));
  LatencyTrip by_rank{CombinePath::per_rank, true, true, &own.stream, {}};
  LatencyTrip by_slot{CombinePath::per_slot, false, false, &own.stream, {}};
  LatencyExchanged one, two;
  const Graph graph(own.raw, [&] {
    one.received = latency_dispatch(latency, mine, by_rank);
    two.received = latency_dispatch(latency, mine, by_slot);
    two.combined = latency_combine(latency, mine, two.received, by_slot);
    one.combined = latency_combine(latency, mine, one.received, by_rank);
  });
  bootstrap.all_gather({}, 60s);
  const int every = std::max(1, replays / kSamples);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < replays; ++i) {
    const auto at = static_cast<std::size_t>(i % kWorlds);
    const Sent& sent = worlds[at].inputs[self];
    const auto copy = [&](const Buffer& to, const Buffer& from, std::size_t bytes) {
      if (bytes == 0) return;
      need(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, own.raw),
           "cudaMemcpyAsync");
    };
    copy(mine.x, inputs[at]->x, sent.x.size());
    copy(mine.routes, inputs[at]->routes, sent.topk_idx.size() * 8);
    copy(mine.weights, inputs[at]->weights, sent.weights.size() * 4);
    graph.launch();
    if (i % every != 0 && i + 1 != replays) continue;
    graph.wait();
    for (const LatencyExchanged* got : {&one, &two}) {
      const LatencyTrip& trip = got == &one ? by_rank : by_slot;
      check_latency_rows(worlds[at], group.rank(), got->received, copier);
      check_latency_sums(worlds[at], group.rank(), trip.path, got->combined.x, copier);
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (group.rank() == 0) {
    std::printf("REPLAYS %d of 2 exchanges, every %d-th compared, %.1f s: good\n", replays, every,
                seconds);
    std::fflush(stdout);
  }
  bootstrap.all_gather({}, 60s);
}

}  // namespace ferry::test
