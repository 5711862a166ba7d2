// How long a dispatch with its fan-out takes, one after the other and step by step.
#include <cstdio>
#include <string>

#include "following_case.hpp"

namespace ferry::cuda::test {
namespace {

std::string text_of(const std::vector<int>& ends) {
  std::string text;
  for (const int end : ends) {
    if (!text.empty()) text += ',';
    text += std::to_string(end);
  }
  return text;
}

void print(const std::string& name, const ExpertCase& c, const Exchange& x, int local,
           const std::vector<double>& samples) {
  double logical = 0;
  for (int r = 0; r < c.shape.ranks; ++r) {
    logical += double(x.sent(r, false)) * double(c.row_bytes) / c.shape.ranks;
  }
  const double median = samples[samples.size() / 2];
  std::printf("%-44s row %5lld sms %2d local %3d: %7.1f us p95 %7.1f  %6.1f GB/s\n", name.c_str(),
              static_cast<long long>(c.row_bytes), c.sms, local, median,
              samples[samples.size() * 95 / 100], logical / median / 1e3);
  std::fflush(stdout);
}

std::vector<std::vector<int>> schedules() {
  std::vector<std::vector<int>> all;
  for (const int count : {1, 2, 4, 8, 16}) {
    std::vector<int> ends;
    for (int i = 1; i <= count; ++i) ends.push_back(kProgressParts * i / count);
    all.push_back(ends);
  }
  all.push_back({5, 9, 12, 14, 15, 16});
  all.push_back({5, 9, 12, 14, 16});
  all.push_back({7, 11, 14, 16});
  all.push_back({10, 16});
  return all;
}

void bench_sms(KernelGroup& group, Gate& gate, ExpertCase c, Following& following, bool all) {
  int sms = 0;
  FERRY_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const Exchange& x = following.exchange();
  const auto dispatch = [&](int r, bool tells) {
    DispatchParameters d = following.rank(r).dispatch;
    d.tells_progress = tells;
    d.steps = {};
    d.sms = c.sms;
    FERRY_CUDA_CHECK(launch_dispatch(d, group.stream(r)));
  };
  const auto fan_out = [&](int r) {
    FanOutParameters f = following.rank(r).fan_out;
    f.steps = {};
    f.sms = sms;
    FERRY_CUDA_CHECK(launch_fan_out(f, group.stream(r), c.fan_out));
  };
  print("dispatch", c, x, 0, time_calls(group, gate, 4, [&](int r) { dispatch(r, false); }));
  print("dispatch that tells", c, x, 0,
        time_calls(group, gate, 4, [&](int r) { dispatch(r, true); }));
  if (all) print("fan_out", c, x, sms, time_calls(group, gate, 4, fan_out));
  print("dispatch, then fan_out", c, x, sms, time_calls(group, gate, 4, [&](int r) {
          dispatch(r, false);
          fan_out(r);
        }));
  for (const std::vector<int>& ends : schedules()) {
    if (!all && ends.size() < 4) continue;
    for (int r = 0; r < c.shape.ranks; ++r) {
      following.rank(r).dispatch.sms = c.sms;
      following.rank(r).fan_out.sms = sms - c.sms;
    }
    print("followed to " + text_of(ends), c, x, sms - c.sms,
          time_calls(group, gate, 4, [&](int r) { following.launch(r, ends); }));
  }
}

}  // namespace

void bench_following(int argc, char** argv) {
  const int ranks = static_cast<int>(option(argc, argv, "--ranks", gpu_count()));
  const std::int64_t tokens = option(argc, argv, "--tokens", 4096);
  for (const bool quantised : {false, true}) {
    ExpertCase c;
    c.shape = {ranks, 256, 8, std::vector<std::int64_t>(KernelGroup::index(ranks), tokens), 0};
    c.row_bytes = quantised ? 7168 : 14336;
    c.scale_columns = quantised ? 56 : 0;
    c.alignment = 128;
    const auto rows =
        static_cast<std::size_t>(tokens) * static_cast<std::size_t>(ranks + 14) + 256 * 128;
    KernelGroup group({.ranks = ranks,
                       .arena_bytes = rows * static_cast<std::size_t>(c.row_bytes + 512) +
                                      (std::size_t{256} << 20)});
    run_barrier(group);
    Gate gate;
    Random random(1);
    Following following(group, c, random, false);
    for (const int sms : option_list(argc, argv, "--sms", {16, 8, 24})) {
      if (sms > fair_sms(ranks)) continue;
      c.sms = sms;
      bench_sms(group, gate, c, following, sms == 16);
    }
  }
}

}  // namespace ferry::cuda::test
