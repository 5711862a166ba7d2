// Creation of a CUDA engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/layout.hpp"
#include "cuda/cuda_engine.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/latency.hpp"
#include "engine/create.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {
namespace {

constexpr std::size_t kPage = 4096;

ControlLayout cpu_layout(int ranks) {
  return make_control_layout(ranks, sizeof(StepMessage) + fabric::kMaxHandleBytes);
}

/// Flags and mailboxes, for the largest message: the counts of a plan.
DeviceControlLayout gpu_layout(const GroupConfig& config, int ranks) {
  const std::size_t counts =
      (static_cast<std::size_t>(ranks) +
       static_cast<std::size_t>(Placement{config.experts, ranks}.local_experts(0))) *
      sizeof(std::int32_t);
  return make_device_control_layout(ranks, counts);
}

std::size_t table_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * kMaxSegments * sizeof(PeerSegment);
}

std::size_t arena_bytes(const GroupConfig& config) {
  return std::max(config.memory_bytes, kPage);
}

/// Which GPU a rank uses; ranks with the same one share its SMs.
using GpuName = decltype(cudaDeviceProp::uuid);

GpuName gpu_name(int device, int& sms) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  sms = properties.multiProcessorCount;
  return properties.uuid;
}

int chosen_device(const GroupConfig& config) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  int device = config.device;
  if (device < 0) check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= count) {
    throw Error(ErrorKind::invalid_argument, "Group: device: got " + std::to_string(device) +
                                                 "; expected a GPU of this machine, which has " +
                                                 std::to_string(count));
  }
  return device;
}

/// Takes part in the first step of all ranks, which may fail on one: device, kernels, its name.
void meet(Bootstrap& bootstrap, const GroupConfig& config, int device, Parts& parts) {
  GpuName mine{};
  const auto names = engine::together(bootstrap, config, "Group: GPU", [&] {
    const OnDevice here(device);
    mine = gpu_name(device, parts.sms);
    check(load_throughput_kernels(), "load_throughput_kernels");
    check(load_latency_kernels(), "load_latency_kernels");
    const auto bytes = std::as_bytes(std::span(&mine, 1));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  parts.sharing = static_cast<int>(
      std::count_if(names.begin(), names.end(), [&](const std::vector<std::byte>& name) {
        return name.size() == sizeof(mine) && std::memcmp(name.data(), &mine, sizeof(mine)) == 0;
      }));
}

/// The control segment of the CPUs, by the host's fabric.
void make_cpu_control(Bootstrap& bootstrap, const GroupConfig& config, Parts& parts) {
  fabric::Fabric& wire = *parts.cpu->fabric;
  fabric::Segment spare;  // as many segments as cards; of the least size
  const auto cards = engine::together(bootstrap, config, "Group: memory", [&] {
    parts.cpu_control = wire.register_memory(cpu_layout(wire.size()).bytes);
    spare = wire.register_memory(kPage);
    return engine::bytes_of({engine::card_of(parts.cpu_control), engine::card_of(spare)});
  });
  engine::together(bootstrap, config, "Group: attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(parts.cpu_control), engine::card_of(spare)});
    return std::vector<std::byte>();
  });
  wire.seal(parts.cpu_control.id);
  wire.seal(spare.id);
}

/// The control segment and the arena of the GPUs.
void make_gpu_memory(Bootstrap& bootstrap, const GroupConfig& config, Parts& parts) {
  fabric::DeviceMemory& wire = parts.gpu->wire();
  parts.layout = gpu_layout(config, wire.size());
  fabric::Segment arena;
  const auto cards = engine::together(bootstrap, config, "Group: GPU memory", [&] {
    parts.control = wire.register_memory(parts.layout.bytes + table_bytes(wire.size()));
    arena = wire.register_memory(arena_bytes(config));
    return engine::bytes_of({engine::card_of(parts.control), engine::card_of(arena)});
  });
  parts.gpu->registered().add(arena);
  engine::together(bootstrap, config, "Group: GPU attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(parts.control), engine::card_of(arena)});
    return std::vector<std::byte>();
  });
  wire.seal(parts.control.id);
  wire.seal(arena.id);
}

}  // namespace

bool available() {
  return true;
}

MemoryUse cuda_memory_hint(const GroupConfig& config, int ranks) {
  const std::size_t control = gpu_layout(config, ranks).bytes + table_bytes(ranks);
  return {cpu_layout(ranks).bytes + kPage + engine::segment_bytes(control),
          engine::segment_bytes(arena_bytes(config)), 0, 0};
}

std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                         std::unique_ptr<fabric::Fabric> fabric) {
  if (bootstrap.size() > kMaxDomain) {
    throw Error(ErrorKind::unsupported,
                "Group: backend cuda: got " + std::to_string(bootstrap.size()) +
                    " ranks; expected at most " + std::to_string(kMaxDomain) +
                    ", which one NVLink domain holds");
  }
  Parts parts;
  parts.cpu = std::make_shared<engine::Memory>(std::move(fabric));
  int device = 0;
  engine::together(bootstrap, config, "Group: device", [&] {
    device = chosen_device(config);
    return std::vector<std::byte>();
  });
  const OnDevice here(device);
  meet(bootstrap, config, device, parts);
  make_cpu_control(bootstrap, config, parts);
  fabric::DeviceMemoryOptions options;
  options.device = device;
  options.deadline = config.deadline;
  options.on_wait = config.on_wait;
  auto wire = fabric::make_device_memory(bootstrap, options);
  parts.gpu = std::make_shared<GpuMemory>(std::move(wire));
  make_gpu_memory(bootstrap, config, parts);
  std::shared_ptr<CudaEngine> made;
  engine::together(bootstrap, config, "Group: start", [&] {
    made = std::make_shared<CudaEngine>(config, std::move(parts));
    made->start();
    return std::vector<std::byte>();
  });
  return made;
}

}  // namespace ferry::cuda
