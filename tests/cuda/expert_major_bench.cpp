#include <cstdio>
#include <string>

#include "expert_major_case.hpp"

namespace ferry::cuda::test {
namespace {

std::size_t at(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// What a bench of a whole exchange needs on each rank.
struct BenchRank {
  ExpertRows local;
  DispatchParameters dispatch;
  FanOutParameters fan_out;
  SumSlotsParameters sums;
  CombineParameters combine;
};

void bench_dispatch(KernelGroup& group, const ExpertCase& c, BenchRank& b, int rank,
                    const Piece& rows) {
  const std::int64_t tokens = c.shape.tokens[at(rank)];
  DispatchParameters& d = b.dispatch;
  d.group = group.view(rank);
  d.plan = b.local.plan;
  d.call.kind = CallKind::dispatch;
  d.x = group.take(rank, at(tokens * c.row_bytes), 0x3c).data;
  d.row_bytes = c.row_bytes;
  d.segment = rows.segment;
  d.offset = rows.offset;
  d.capacity = b.local.capacity;
  d.failure = group.failure(rank);
}

void bench_combine(KernelGroup& group, const ExpertCase& c, BenchRank& b, int rank,
                   const Piece& rows) {
  CombineParameters& p = b.combine;
  p.group = group.view(rank);
  p.plan = b.local.plan;
  p.call.kind = CallKind::combine;
  p.segment = rows.segment;
  p.offset = rows.offset;
  p.rows = b.local.capacity;
  p.columns = c.row_bytes / 2;
  p.out = group.take(rank, at(c.shape.tokens[at(rank)] * c.row_bytes)).data;
  p.failure = group.failure(rank);
  p.after_sums = true;
  const std::int64_t topk = c.shape.topk;
  const Piece weights = group.take(rank, at(b.local.capacity * topk) * sizeof(float), 0x3c);
  p.has_weights = c.weighted;
  p.side_segment = weights.segment;
  p.side_offset = weights.offset;
  p.out_weights = take<float>(group, rank, c.shape.tokens[at(rank)] * topk);
  b.sums.weights = reinterpret_cast<const float*>(weights.data);
}

BenchRank bench_rank(KernelGroup& group, const ExpertCase& c, const Exchange& x, int rank) {
  BenchRank b;
  b.local = make_expert_rows(group, c, x, rank);
  const std::int64_t capacity = b.local.capacity, topk = c.shape.topk;
  const Piece rows = group.take(rank, at(capacity * c.row_bytes), 0x3c);
  bench_dispatch(group, c, b, rank, rows);
  bench_combine(group, c, b, rank, rows);
  FanOutParameters& f = b.fan_out;
  f.group = group.view(rank);
  f.plan = b.local.plan;
  f.ids = reinterpret_cast<const std::int32_t*>(group.upload(rank, b.local.ids).data);
  f.rows = rows.data;
  f.row_bytes = c.row_bytes;
  f.capacity = capacity;
  f.alignment = c.alignment;
  f.out_capacity = b.local.out_capacity;
  f.out = take<std::byte>(group, rank, f.out_capacity * c.row_bytes);
  f.slot_rows = take<std::int64_t>(group, rank, capacity * topk);
  f.expert_offsets = take<std::int64_t>(group, rank, b.local.experts + 1);
  f.scratch = reinterpret_cast<std::int32_t*>(take<std::byte>(
      group, rank, static_cast<std::int64_t>(fan_out_scratch_bytes(capacity, b.local.experts))));
  SumSlotsParameters& s = b.sums;
  s.group = f.group;
  s.plan = f.plan;
  s.slot_rows = f.slot_rows;
  s.rows = f.out;
  s.input_rows = f.out_capacity;
  s.columns = c.row_bytes / 2;
  s.capacity = capacity;
  s.out = rows.data;
  return b;
}

/// Where the slots' rows are, which the sums read.
void place_slots(KernelGroup& group, std::vector<BenchRank>& ranks) {
  group.launch([&](int r) {
    FanOutParameters f = ranks[at(r)].fan_out;
    f.sms = fair_sms(static_cast<int>(ranks.size()));
    FERRY_CUDA_CHECK(launch_fan_out(f, group.stream(r)));
  });
  group.wait_well();
}

void print(const char* name, const ExpertCase& c, const Exchange& x,
           const std::vector<double>& samples) {
  double logical = 0, wire = 0;
  for (int r = 0; r < c.shape.ranks; ++r) {
    logical += double(x.sent(r, false)) * double(c.row_bytes) / c.shape.ranks;
    wire += double(x.sent(r, true)) * double(c.row_bytes) / c.shape.ranks;
  }
  const double median = samples[samples.size() / 2];
  std::printf(
      "{\"bench\": \"%s\", \"ranks\": %d, \"gpus\": %d, \"tokens\": %lld, \"row_bytes\": %lld, "
      "\"sms\": %d, \"sum_sms\": %d, \"piece_bytes\": %d, \"stages\": %d, \"vectors\": %d, "
      "\"warps\": %d, \"pulls\": %d, \"weights\": %d, "
      "\"us\": %.1f, \"p95_us\": %.1f, \"logical_gbs\": %.1f, \"wire_gbs\": %.1f}\n",
      name, c.shape.ranks, gpu_count(), static_cast<long long>(c.shape.tokens[0]),
      static_cast<long long>(c.row_bytes), c.sms, c.sum_sms, c.fan_out.piece_bytes,
      c.fan_out.stages, c.sum.vectors, c.sum.warps, c.sum.pulls, int{c.weighted}, median,
      samples[samples.size() * 95 / 100], logical / median / 1e3, wire / median / 1e3);
  std::fflush(stdout);
}

/// Sums beside the combine, which reads them as they come.
void bench_sums(KernelGroup& group, Gate& gate, const ExpertCase& c, const Exchange& x,
                std::vector<BenchRank>& ranks) {
  for (BenchRank& b : ranks) {
    b.combine.sms = c.sms;
    b.sums.sms = c.sum_sms;
  }
  print("sums beside combine", c, x, time_calls(group, gate, 4, [&](int r) {
          FERRY_CUDA_CHECK(launch_sum_slots(ranks[at(r)].sums, group.stream(r), c.sum));
          FERRY_CUDA_CHECK(launch_combine(ranks[at(r)].combine, group.stream(r)));
        }));
}

/// `local` SMs for the local kernel, c.sms for the exchange.
void bench_sms(KernelGroup& group, Gate& gate, const ExpertCase& c, const Exchange& x,
               std::vector<BenchRank>& ranks, int local) {
  for (BenchRank& b : ranks) {
    b.dispatch.sms = c.sms;
    b.fan_out.sms = b.sums.sms = local;
  }
  const auto fan_out = [&](int r) {
    FERRY_CUDA_CHECK(launch_fan_out(ranks[at(r)].fan_out, group.stream(r), c.fan_out));
  };
  const auto sums = [&](int r) {
    FERRY_CUDA_CHECK(launch_sum_slots(ranks[at(r)].sums, group.stream(r), c.sum));
  };
  const std::string suffix = local == c.sms ? "" : " (local part on all SMs)";
  if (suffix.empty()) {
    print("fan_out", c, x, time_calls(group, gate, 4, fan_out));
    print("sum_slots", c, x, time_calls(group, gate, 4, sums));
  }
  print(("dispatch + fan_out" + suffix).c_str(), c, x, time_calls(group, gate, 4, [&](int r) {
          FERRY_CUDA_CHECK(launch_dispatch(ranks[at(r)].dispatch, group.stream(r)));
          fan_out(r);
        }));
}

}  // namespace

void bench_expert_major(int argc, char** argv) {
  ExpertCase c;
  const int ranks = static_cast<int>(option(argc, argv, "--ranks", gpu_count()));
  const std::int64_t tokens = option(argc, argv, "--tokens", 4096);
  c.shape = {ranks, 256, 8, std::vector<std::int64_t>(at(ranks), tokens), 0};
  c.row_bytes = option(argc, argv, "--hidden", 7168) * 2;
  c.alignment = 128;
  c.weighted = has_option(argc, argv, "--weights");
  const std::size_t rows = at(tokens) * at(ranks + 14) + 256 * 128;
  KernelGroup group({.ranks = ranks, .arena_bytes = rows * at(c.row_bytes) + (256u << 20)});
  run_barrier(group);
  Gate gate;
  Random random(1);
  const Exchange x = make_exchange(c.shape, random);
  std::vector<BenchRank> all;
  for (int r = 0; r < ranks; ++r) all.push_back(bench_rank(group, c, x, r));
  group.settle();
  place_slots(group, all);
  int most = 0;
  FERRY_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMultiProcessorCount, 0));
  for (const int sms : option_list(argc, argv, "--sms", {4, 8, 16, 24, 32, 64})) {
    for (const int piece : option_list(argc, argv, "--pieces", {0})) {
      for (const int stages : option_list(argc, argv, "--stages", {0})) {
        for (const int vectors : option_list(argc, argv, "--vectors", {0})) {
          for (const int warps : option_list(argc, argv, "--warps", {0})) {
            if (sms > fair_sms(ranks)) continue;  // ranks that share a GPU must all be resident
            c.sms = sms;
            c.fan_out = {piece, stages};
            for (const int pulls : option_list(argc, argv, "--pulls", {0})) {
              c.sum = {vectors, warps, stages, true, pulls};
              for (const int sum_sms : option_list(argc, argv, "--sum-sms", {most - sms})) {
                c.sum_sms = sum_sms;
                bench_sums(group, gate, c, x, all);
              }
            }
            if (has_option(argc, argv, "--only-sums")) continue;
            bench_sms(group, gate, c, x, all, sms);
            bench_sms(group, gate, c, x, all, most);
          }
        }
      }
    }
  }
}

}  // namespace ferry::cuda::test
