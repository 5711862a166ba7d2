// What tests of collectives on GPUs share: ranks with collectives on the GPU and on the host, and
// calls whose results must have the same bits in both.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "engine_graph.hpp"
#include "engine_seat.hpp"
#include "host/collectives/test_collectives.hpp"

namespace ferry::test {

using host::test::Bytes;
using host::test::random_elements;

inline constexpr std::size_t kBytes = std::size_t{40} << 20;  // of a tensor, at most

/// Where a tensor lies.
enum class At { ordinary, registered, mixed, unaligned };
inline constexpr At kAll[] = {At::ordinary, At::registered, At::mixed, At::unaligned};
inline const char* name_of(At at) {
  constexpr const char* kNames[] = {"ordinary", "registered", "registered on rank 0", "unaligned"};
  return kNames[static_cast<int>(at)];
}

/// One rank: collectives on its GPU and on the host, and memory, which is made before any call,
/// since making some waits for kernels of other ranks.
struct Pair {
  Bootstrap& bootstrap;
  int device;
  Collectives gpu;
  Collectives host;
  Copier copier{};
  Buffer ordinary[2] = {Buffer(kBytes), Buffer(kBytes)};
  Tensor registered[2] = {room(), room()};

  static GroupConfig config(Backend backend, int domain_size) {
    GroupConfig config;
    config.backend = backend;
    config.domain_size = domain_size;
    config.deadline = 20s;
    config.memory_bytes = backend == Backend::cuda ? 3 * kBytes : 0;
    return config;
  }
  Pair(Bootstrap& meeting, int domain_size)
      : bootstrap(meeting),
        device(take_gpu(meeting)),
        gpu(borrowed(meeting), config(Backend::cuda, domain_size)),
        host(borrowed(meeting), config(Backend::host, domain_size)) {
    meet();
  }
  Tensor room() { return gpu.empty({static_cast<std::int64_t>(kBytes)}, Dtype::u8); }
  int rank() const { return gpu.rank(); }
  int size() const { return gpu.size(); }
  void meet() const { bootstrap.all_gather({}, 60s); }

  std::byte* memory(At at, int which, Dtype dtype) {
    const bool here = at == At::registered || (at == At::mixed && rank() == 0);
    auto* data = static_cast<std::byte*>(here ? registered[which].data() : ordinary[which].data());
    return data + (at == At::unaligned ? size_of(dtype) : 0);
  }
  Device place() const { return {DeviceKind::cuda, device}; }
  TensorView view(std::byte* data, Dtype dtype, std::int64_t count) const {
    return {data, dtype, {count}, place()};
  }
  Bytes get(const std::byte* data, std::size_t bytes) const {
    Bytes values(bytes);
    if (bytes == 0) return values;
    // Of this thread alone: the default stream would wait for other ranks of this process.
    need(cudaMemcpyAsync(values.data(), data, bytes, cudaMemcpyDefault, cudaStreamPerThread),
         "cudaMemcpyAsync");
    need(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
    return values;
  }
};

/// `domain_size`: 0: one domain.
inline void on_pairs(int ranks, bool threads, const std::function<void(Pair&)>& body,
                     int domain_size = 0) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  ASSERT_TRUE(kQueues);
  const RankBody rank = [&](Bootstrap& bootstrap) {
    Pair pair(bootstrap, domain_size);
    body(pair);
    pair.meet();
  };
  for (const std::string& problem : run_on_crew(ranks, threads ? ranks : 1, rank, 120)) {
    ADD_FAILURE() << problem;
  }
}

inline void need_same(Dtype dtype, const Bytes& got, const Bytes& expected,
                      const std::string& what) {
  need(got.size() == expected.size(), what + ": sizes");
  const std::int64_t at = host::test::first_difference(dtype, got, expected);
  need(at < 0, what + ": other bits than the host engine's at element " + std::to_string(at));
}

struct Case {
  Dtype dtype;
  ReduceOp op;
  std::int64_t count;
};

inline std::string words(const Pair& pair, const char* call, const Case& c, At at) {
  return "rank " + std::to_string(pair.rank()) + ": " + call + " of " + std::to_string(c.count) +
         " " + std::string(ferry::name_of(c.dtype)) + ", " + std::string(ferry::name_of(c.op)) +
         ", " + name_of(at);
}

inline bool is_float(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
}

inline constexpr Dtype kReduced[] = {Dtype::f32, Dtype::bf16, Dtype::f16,
                                     Dtype::i32, Dtype::i64,  Dtype::u8};

inline std::vector<Case> cases(bool few) {
  std::vector<Case> all;
  for (const Dtype dtype : kReduced) {
    if (few && dtype != Dtype::bf16 && dtype != Dtype::i32) continue;
    for (const ReduceOp op :
         {ReduceOp::sum, ReduceOp::mean, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (!is_float(dtype) && op == ReduceOp::mean) continue;
      all.push_back({dtype, op, 1000});
      if (!few) all.push_back({dtype, op, 300'001});
    }
    for (const std::int64_t count : {0, 1, 3, 20'001}) all.push_back({dtype, ReduceOp::sum, count});
    all.push_back({dtype, ReduceOp::sum, std::int64_t{1'100'000} / std::int64_t(size_of(dtype))});
  }
  // Many rounds through the inboxes; from 16 MiB on wherever the tensors lie.
  all.push_back({Dtype::f32, ReduceOp::sum, few ? 1'000'003 : 8'000'003});
  if (!few) all.push_back({Dtype::bf16, ReduceOp::mean, 9'000'001});
  return all;
}

inline void reduce(Pair& pair, const Case& c, At at) {
  const Bytes mine = random_elements(c.dtype, c.count, static_cast<unsigned>(pair.rank()));
  Bytes expected = mine;
  pair.host.all_reduce({expected.data(), c.dtype, {c.count}}, {.op = c.op});
  std::byte* x = pair.memory(at, 0, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.all_reduce(pair.view(x, c.dtype, c.count), {.op = c.op});
  need_same(c.dtype, pair.get(x, mine.size()), expected, words(pair, "all_reduce", c, at));

  const std::int64_t block = c.count / pair.size(), whole = block * pair.size();
  Bytes part(index(block) * size_of(c.dtype));
  pair.host.reduce_scatter({mine.data(), c.dtype, {whole}}, {part.data(), c.dtype, {block}},
                           {.op = c.op});
  std::byte* out = pair.memory(at, 1, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.reduce_scatter(pair.view(x, c.dtype, whole), pair.view(out, c.dtype, block),
                          {.op = c.op});
  need_same(c.dtype, pair.get(out, part.size()), part, words(pair, "reduce_scatter", c, at));
}

/// Tensors around it stay as they are.
inline void guarded(Pair& pair, std::int64_t count) {
  const Case c{Dtype::bf16, ReduceOp::sum, count};
  constexpr std::size_t kGuard = 64;
  Bytes mine = random_elements(c.dtype, count, static_cast<unsigned>(pair.rank()) + 9);
  Bytes around(mine.size() + 2 * kGuard, std::byte{0xa5});
  std::copy(mine.begin(), mine.end(), around.begin() + kGuard);
  for (const At at : {At::ordinary, At::registered}) {
    std::byte* data = pair.memory(at, 0, c.dtype);
    pair.copier.put(data, around);
    Bytes expected = around;
    pair.host.all_reduce({expected.data() + kGuard, c.dtype, {count}});
    pair.gpu.all_reduce(pair.view(data + kGuard, c.dtype, count));
    need_same(Dtype::u8, pair.get(data, kGuard), Bytes(kGuard, std::byte{0xa5}), "before it");
    need_same(c.dtype, pair.get(data, around.size()), expected, words(pair, "all_reduce", c, at));
  }
}

inline void move(Pair& pair, std::int64_t count, At at) {
  const Case c{Dtype::e4m3, ReduceOp::sum, count};
  const int ranks = pair.size();
  const Bytes mine = random_elements(c.dtype, count, static_cast<unsigned>(pair.rank()) + 50);
  std::byte *x = pair.memory(at, 0, Dtype::u8), *out = pair.memory(at, 1, Dtype::u8);
  pair.copier.put(x, mine);
  Bytes expected(index(count * ranks));
  pair.host.all_gather({mine.data(), c.dtype, {count}},
                       {expected.data(), c.dtype, {count * ranks}});
  pair.gpu.all_gather(pair.view(x, c.dtype, count), pair.view(out, c.dtype, count * ranks));
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "all_gather", c, at));

  const std::int64_t whole = count / ranks * ranks;
  expected.resize(index(whole));
  pair.host.all_to_all({mine.data(), c.dtype, {whole}}, {expected.data(), c.dtype, {whole}});
  pair.gpu.all_to_all(pair.view(x, c.dtype, whole), pair.view(out, c.dtype, whole));
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "all_to_all", c, at));

  for (const int root : {0, ranks - 1}) {
    expected = mine;
    pair.host.broadcast({expected.data(), c.dtype, {count}}, root);
    pair.copier.put(x, mine);
    pair.gpu.broadcast(pair.view(x, c.dtype, count), root);
    need_same(c.dtype, pair.get(x, expected.size()), expected, words(pair, "broadcast", c, at));
  }
}

inline void split(Pair& pair, std::int64_t scale, At at) {
  const auto count = [&](int from, int to) { return (from * 7 + to * 3) % 5 * scale; };
  std::vector<std::int64_t> to, from;
  std::int64_t sent = 0, taken = 0;
  for (int r = 0; r < pair.size(); ++r) {
    sent += to.emplace_back(count(pair.rank(), r));
    taken += from.emplace_back(count(r, pair.rank()));
  }
  const Case c{Dtype::i32, ReduceOp::sum, scale};
  const Bytes mine = random_elements(c.dtype, sent, static_cast<unsigned>(pair.rank()) + 70);
  Bytes expected(index(taken) * 4);
  pair.host.all_to_all({mine.data(), c.dtype, {sent}}, to, {expected.data(), c.dtype, {taken}},
                       from);
  std::byte *x = pair.memory(at, 0, c.dtype), *out = pair.memory(at, 1, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.all_to_all(pair.view(x, c.dtype, sent), to, pair.view(out, c.dtype, taken), from);
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "split", c, at));
}

}  // namespace ferry::test
