// Bytes of all ranks for each of them, by dispatches: what ranks tell each other they tell on the
// GPU.
#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.hpp"
#include "core/layout.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/exchange.hpp"
#include "engine/gather.hpp"

namespace ferry::cuda {
namespace {

constexpr std::size_t kRowUnit = 16;  // of the rows of a dispatch

/// [tokens, topk]: the first expert of each rank, -1 behind the last.
struct RoutesToAll {
  std::int64_t tokens = 0;
  std::int64_t topk = 0;
  std::vector<std::int64_t> ids{};
};

RoutesToAll routes_to(const std::vector<int>& ranks, const Placement& placement) {
  const auto count = static_cast<std::int64_t>(ranks.size());
  RoutesToAll routes;
  routes.topk = std::min<std::int64_t>(count, kMaxTopk);
  routes.tokens = (count + routes.topk - 1) / routes.topk;
  routes.ids.assign(static_cast<std::size_t>(routes.tokens * routes.topk), -1);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (placement.local_experts(ranks[i]) == 0) {
      throw Error(ErrorKind::unsupported,
                  "bootstrap: on GPUs ranks are reached by an expert, and rank " +
                      std::to_string(ranks[i]) +
                      " has none; expected a group with at least as "
                      "many experts as ranks");
    }
    routes.ids[i] = placement.first_expert(ranks[i]);
  }
  return routes;
}

/// One row of each of these ranks, in their order, as this one gives; all of one size.
std::vector<std::byte> gather_rows(CudaEngine& engine, const std::vector<int>& ranks,
                                   std::span<const std::byte> row) {
  const OnDevice here(engine.device().index);
  GpuMemory& gpu = engine.gpu();
  const User& user = gpu.own();
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, user.stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(user.stream), "cudaStreamSynchronize");
  };
  const RoutesToAll routes = routes_to(ranks, engine.placement());
  const auto columns = static_cast<std::int64_t>(row.size());
  const Held ids = gpu.take_local(routes.ids.size() * sizeof(std::int64_t), user);
  const Held x = gpu.take_local(static_cast<std::size_t>(routes.tokens) * row.size(), user);
  copy(ids.data(), routes.ids.data(), routes.ids.size() * sizeof(std::int64_t));
  for (std::int64_t token = 0; token < routes.tokens; ++token) {
    copy(x.data() + token * columns, row.data(), row.size());
  }
  const Received got = engine.plan_and_dispatch(
      {x.data(), Dtype::u8, {routes.tokens, columns}, engine.device()},
      {ids.data(), Dtype::i64, {routes.tokens, routes.topk}, engine.device()}, {});
  std::vector<std::byte> all(ranks.size() * row.size());
  if (got.x.view().bytes() != all.size()) {
    throw Error(ErrorKind::mismatch, "bootstrap: got " + std::to_string(got.x.rows()) +
                                         " rows, expected one of each of " +
                                         std::to_string(ranks.size()) +
                                         " ranks; do all make the same call?");
  }
  copy(all.data(), got.x.data(), all.size());
  return all;
}

}  // namespace

std::vector<std::vector<std::byte>> gather(CudaEngine& engine, std::span<const std::byte> mine) {
  const std::vector<int> ranks = engine.group_view().ranks;
  std::uint64_t own[kRowUnit / sizeof(std::uint64_t)] = {mine.size()};
  const std::vector<std::byte> told = gather_rows(engine, ranks, std::as_bytes(std::span(own)));
  std::vector<std::uint64_t> lengths(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    std::memcpy(&lengths[i], told.data() + i * kRowUnit, sizeof(lengths[i]));
    if (lengths[i] > engine::kMostGatheredBytes) {
      engine.channel().throw_violation("bootstrap: all_gather", ranks[i],
                                       "tells " + std::to_string(lengths[i]) + " bytes");
    }
  }
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::byte> row(round_up(std::max<std::size_t>(longest, 1), kRowUnit));
  std::copy(mine.begin(), mine.end(), row.begin());
  const std::vector<std::byte> rows = gather_rows(engine, ranks, row);
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(engine.size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::byte* first = rows.data() + i * row.size();
    all[static_cast<std::size_t>(ranks[i])].assign(first, first + lengths[i]);
  }
  return all;
}

}  // namespace ferry::cuda
