// One rank of a few small exchanges through the engine, alone in its process: for tools that watch
// one process (sanitize.sh). All data is checked.
//   engine_rank                                a group of one
//   ferry run -n 2 -- [TOOL ...] engine_rank   a group of two
//   engine_rank ARCH   fails unless its kernels were made for ARCH, 80 for 8.0. With
//   CUDA_FORCE_PTX_JIT=1
//                      the driver takes the program's PTX only.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "engine_case.hpp"
#include "engine_latency.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261121;

std::shared_ptr<Bootstrap> find_ranks() {
  if (std::getenv("RANK") == nullptr) return thread_bootstrap(1).front();
  TcpOptions options = tcp_options_from_environment();
  options.deadline = std::chrono::minutes(5);
  return tcp_bootstrap(options);
}

void exchange(Group& group, const Shape& shape, int device, const Copier& copier) {
  const World world(group.size(), shape, kSeed);
  const OnGpu mine(world.inputs[static_cast<std::size_t>(group.rank())], shape, device, copier);
  const Plan plan = group.plan(mine.routes_view());
  for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
    for (const bool registered : {true, false}) {
      Trip trip;
      trip.order = order;
      trip.registered = registered;
      trip.max_recv_rows = registered ? 0 : 100;
      trip.alignment = order == RowOrder::expert_major ? 4 : 1;
      trip.num_sms = 3;
      round_trip(group, world, mine, plan, trip, copier);
    }
  }
}

void exchange_latency(Group& group, const Shape& shape, int device, const Copier& copier) {
  const World world(group.size(), shape, kSeed);
  const OnGpu mine(world.inputs[static_cast<std::size_t>(group.rank())], shape, device, copier);
  for (const CombinePath path : {CombinePath::per_rank, CombinePath::per_slot}) {
    const bool masks = path == CombinePath::per_rank;
    LatencyExchange latency(group, latency_config(shape, masks));
    latency_trips(latency, world, group.rank(), mine, path, copier);
  }
}

int run(const char* arch) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("SKIPPED: NO GPU\n");
    return 77;
  }
  if (arch != nullptr && std::atoi(arch) != kernels_made_for()) {
    throw std::runtime_error(std::string("expected kernels made for ") + arch + ", got " +
                             std::to_string(kernels_made_for()));
  }
  const auto bootstrap = find_ranks();
  const int device = bootstrap->rank() % gpus;
  need(cudaSetDevice(device), "cudaSetDevice");
  GroupConfig config;
  config.experts = Shape{}.experts;
  config.backend = Backend::cuda;
  config.device = device;
  config.deadline = std::chrono::minutes(5);
  config.memory_bytes = std::size_t{8} << 20;
  Group group(bootstrap, config);
  const Copier copier;
  for (const std::int64_t hidden : {4, 1028}) {
    Shape shape;
    shape.tokens = 20;
    shape.hidden = hidden;
    exchange(group, shape, device, copier);
    exchange_latency(group, shape, device, copier);
  }
  for (const std::int64_t tokens : {4, 20}) {  // as LL, and as LL128
    exchange_latency(group, {.tokens = tokens, .hidden = 1040, .dtype = Dtype::bf16}, device,
                     copier);
  }
  group.barrier();
  std::printf("rank %d of %d, kernels made for %d: PASSED\n", group.rank(), group.size(),
              kernels_made_for());
  return 0;
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  try {
    return ferry::test::run(argc > 1 ? argv[1] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
