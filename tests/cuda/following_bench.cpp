// How long a dispatch with its fan-out takes, one after the other and beside each other.
#include <cstdio>
#include <string>

#include "following_case.hpp"

namespace ferry::cuda::test {
namespace {

void print(const std::string& name, const ExpertCase& c, const Exchange& x,
           const std::vector<double>& samples) {
  double logical = 0;
  for (int r = 0; r < c.shape.ranks; ++r) {
    logical += double(x.sent(r, false)) * double(c.row_bytes) / c.shape.ranks;
  }
  const double median = samples[samples.size() / 2];
  std::printf("%-36s row %5lld sms %2d: %6.1f us p95 %6.1f %6.1f GB/s\n", name.c_str(),
              static_cast<long long>(c.row_bytes), c.sms, median,
              samples[samples.size() * 95 / 100], logical / median / 1e3);
  std::fflush(stdout);
}

struct FollowingBench {
  KernelGroup& group;
  Gate& gate;
  Following& following;
  ExpertCase c;
  int rounds = 4;

  template <class Call>
  void time(const std::string& name, const Call& call) {
    print(name, c, following.exchange(), time_calls(group, gate, rounds, call));
  }
  void dispatch(int r, int parts) {
    DispatchParameters d = following.rank(r).dispatch;
    d.parts = parts;
    d.followed = false;
    d.sms = c.sms;
    FERRY_CUDA_CHECK(launch_dispatch(d, group.stream(r)));
  }
  void fan_out(int r, int sms) {
    FanOutParameters f = following.rank(r).fan_out;
    f.sms = sms;
    FERRY_CUDA_CHECK(launch_fan_out(f, group.stream(r), c.fan_out));
  }
  void beside(int r, int parts, int sms, bool known, const FanOutTuning& tuning) {
    DispatchParameters d = following.rank(r).dispatch;
    d.parts = parts;
    d.sms = c.sms;
    FanOutParameters f = following.rank(r).fan_out;
    f.sms = sms;
    f.may_be_made = known;
    FERRY_CUDA_CHECK(launch_dispatch(d, group.stream(r)));
    FERRY_CUDA_CHECK(launch_fan_out_beside(f, group.stream(r), tuning));
  }
  void time_beside(int parts, int sms, bool known, const FanOutTuning& tuning) {
    std::string name = "beside " + std::to_string(sms) + ", parts " + std::to_string(parts);
    if (!known) name += ", places";
    if (tuning.group_bytes > 0) name += ", group " + std::to_string(tuning.group_bytes);
    if (tuning.piece_bytes > 0) name += ", piece " + std::to_string(tuning.piece_bytes);
    time(name, [&](int r) { beside(r, parts, sms, known, tuning); });
  }

  void run(const std::vector<int>& all_parts, const std::vector<int>& all_sms) {
    int sms = 0;
    FERRY_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    time("dispatch", [&](int r) { dispatch(r, 0); });
    for (const int parts : all_parts) {
      time("dispatch that tells of " + std::to_string(parts), [&](int r) { dispatch(r, parts); });
    }
    time("dispatch, then fan_out", [&](int r) {
      dispatch(r, 0);
      fan_out(r, sms);
    });
    for (const int beside_sms : all_sms) {
      for (const int parts : all_parts) {
        if (parts == kProgressParts || beside_sms == 32) time_beside(parts, beside_sms, true, {});
      }
    }
    if (c.sms != 16) return;
    time_beside(kProgressParts, 32, false, {});
    time_beside(kProgressParts, 32, true, {.group_bytes = 16384});
    time_beside(kProgressParts, 32, true, {.group_bytes = 65536});
    time_beside(kProgressParts, 32, true, {.piece_bytes = 2048});
    time_beside(kProgressParts, 32, true, {.piece_bytes = 7168});
  }
};

}  // namespace

void bench_following(int argc, char** argv) {
  const int ranks = static_cast<int>(option(argc, argv, "--ranks", gpu_count()));
  const std::int64_t tokens = option(argc, argv, "--tokens", 4096);
  for (const bool quantised : {false, true}) {
    ExpertCase c;
    c.shape = {ranks, 256, 8, std::vector<std::int64_t>(KernelGroup::index(ranks), tokens), 0};
    c.row_bytes = quantised ? 7168 : 14336;
    c.scale_columns = quantised ? 56 : 0;
    c.alignment = option(argc, argv, "--alignment", 128);
    const auto rows =
        static_cast<std::size_t>(tokens) * static_cast<std::size_t>(ranks + 14) + 256 * 128;
    KernelGroup group({.ranks = ranks,
                       .arena_bytes = rows * static_cast<std::size_t>(c.row_bytes + 512) +
                                      (std::size_t{256} << 20)});
    run_barrier(group);
    Gate gate;
    Random random(1);
    Following following(group, c, random, false);
    FollowingBench bench{group, gate, following, c};
    for (const int sms : option_list(argc, argv, "--sms", {16, 8, 24})) {
      if (sms > fair_sms(ranks)) continue;
      bench.c.sms = sms;
      bench.run(option_list(argc, argv, "--parts", {4, 8, 16}),
                option_list(argc, argv, "--beside", {16, 24, 32, 48, 64}));
    }
  }
}

}  // namespace ferry::cuda::test
