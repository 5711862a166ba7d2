// Creation of a CUDA engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "core/layout.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/throughput/create.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "engine/create.hpp"
#include "engine/growth.hpp"
#include "fabric/lobby.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::cuda {
namespace {

constexpr std::size_t kSparePage = 4096;

/// Flags and mailboxes, for the largest message: the counts of a plan, or `body_bytes`.
DeviceControlLayout gpu_layout(const GroupConfig& config, int ranks, std::size_t body_bytes = 0) {
  const std::size_t counts =
      (static_cast<std::size_t>(ranks) +
       static_cast<std::size_t>(Placement{config.experts, ranks}.local_experts(0))) *
      sizeof(std::int32_t);
  return make_device_control_layout(ranks, std::max(counts, body_bytes));
}

/// Flags and mailboxes, the table, and room for what is stored for lost ranks.
std::size_t control_bytes(const DeviceControlLayout& layout, int ranks) {
  return 2 * layout.bytes + table_bytes(ranks);
}

std::size_t arena_bytes(const GroupConfig& config) {
  return std::max(config.memory_bytes, kSparePage);
}

/// Where a rank runs, as it tells the others: plain bytes.
struct GpuPlace {
  decltype(cudaDeviceProp::uuid) gpu;  ///< ranks with the same one share its SMs
  fabric::JobKey process;              ///< drawn by each process
  std::int64_t queues;                 ///< of a GPU, for the streams of one process
};

/// CUDA reads it when the process first uses a GPU.
std::int64_t queues_of_process() {
  constexpr std::int64_t kDefault = 8;
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const std::int64_t given = text == nullptr ? 0 : std::atoi(text);
  return given > 0 ? given : kDefault;
}

GpuPlace place_of(int device, int& num_sms) {
  static const fabric::JobKey process = fabric::random_key(0);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  num_sms = properties.multiProcessorCount;
  return {properties.uuid, process, queues_of_process()};
}

bool same_gpu(const GpuPlace& a, const GpuPlace& b) {
  return std::memcmp(&a.gpu, &b.gpu, sizeof a.gpu) == 0;
}

/// Kernels of ranks that share a GPU wait for each other. Processes take turns on it; of threads,
/// a kernel that comes behind a waiting one in a queue would never run.
void check_threads(const std::vector<GpuPlace>& places) {
  constexpr std::int64_t kQueues = 8;  // its own stream, the copies beside it, the caller's
  constexpr std::int64_t kMostQueues = 32;
  for (std::size_t a = 0; a < places.size(); ++a) {
    std::int64_t threads = 1;
    for (std::size_t b = a + 1; b < places.size(); ++b) {
      if (!same_gpu(places[a], places[b]) || places[a].process != places[b].process) continue;
      const std::int64_t needed = std::min(kQueues * ++threads, kMostQueues);
      if (places[a].queues >= needed) continue;
      throw Error(ErrorKind::unsupported,
                  "Group: ranks " + std::to_string(a) + " and " + std::to_string(b) +
                      " are threads of one process on one GPU, whose kernels may end up behind "
                      "each other in a queue and wait for ever; give each rank a GPU or a process "
                      "of its own, or set CUDA_DEVICE_MAX_CONNECTIONS=" +
                      std::to_string(needed) + " before the process first uses CUDA");
    }
  }
}

void check_domain(int ranks) {
  if (ranks <= kMaxDomain) return;
  throw Error(ErrorKind::unsupported, "Group: backend cuda: got " + std::to_string(ranks) +
                                          " ranks; expected at most " + std::to_string(kMaxDomain) +
                                          ", which one NVLink domain holds");
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

/// That device must be current.
GpuPlace prepare_device(int device, Parts& parts) {
  const GpuPlace mine = place_of(device, parts.num_sms);
  check(load_throughput_kernels(), "load_throughput_kernels");
  check(load_latency_kernels(), "load_latency_kernels");
  return mine;
}

/// Takes part in the first step of all ranks, which may fail on one: device, kernels, its place.
void meet(Bootstrap& bootstrap, const GroupConfig& config, int device, Parts& parts) {
  const auto told = engine::together(bootstrap, config, "Group: GPU", [&] {
    const OnDevice here(device);
    const GpuPlace mine = prepare_device(device, parts);
    const auto bytes = std::as_bytes(std::span(&mine, 1));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  std::vector<GpuPlace> places(told.size());
  for (std::size_t r = 0; r < told.size(); ++r) {
    std::memcpy(&places[r], told[r].data(), std::min(told[r].size(), sizeof(GpuPlace)));
  }
  check_threads(places);
  const GpuPlace& mine = places[static_cast<std::size_t>(bootstrap.rank())];
  parts.sharing = static_cast<int>(std::count_if(
      places.begin(), places.end(), [&](const GpuPlace& other) { return same_gpu(other, mine); }));
}

/// Returns a spare one: as many segments as cards; of the least size.
fabric::Segment register_cpu_control(const GroupConfig& config, Parts& parts) {
  fabric::Fabric& wire = *parts.cpu->fabric;
  parts.cpu_control = wire.register_memory(cpu_control_bytes(config, wire.size()));
  return wire.register_memory(kSparePage);
}

/// The control segment of the CPUs, by the host's fabric.
void make_cpu_control(Bootstrap& bootstrap, const GroupConfig& config, Parts& parts) {
  fabric::Fabric& wire = *parts.cpu->fabric;
  fabric::Segment spare;
  const auto cards = engine::together(bootstrap, config, "Group: memory", [&] {
    spare = register_cpu_control(config, parts);
    return engine::bytes_of({engine::card_of(parts.cpu_control), engine::card_of(spare)});
  });
  engine::together(bootstrap, config, "Group: attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(parts.cpu_control), engine::card_of(spare)});
    return std::vector<std::byte>();
  });
  wire.seal(parts.cpu_control.id);
  wire.seal(spare.id);
}

/// Returns the arena.
fabric::Segment register_gpu_memory(const GroupConfig& config, Parts& parts) {
  fabric::DeviceMemory& wire = parts.gpu->wire();
  parts.control = wire.register_memory(control_bytes(parts.layout, wire.size()));
  fabric::Segment arena = wire.register_memory(arena_bytes(config));
  parts.gpu->registered().add(arena);
  if (GpuPage* page = page_in(config, parts.cpu_control.data, wire.size())) {
    page->show(wire.card());
    page->add(parts.control);
    page->add(arena);
  }
  return arena;
}

/// The control segment and the arena of the GPUs.
void make_gpu_memory(Bootstrap& bootstrap, const GroupConfig& config, std::size_t body_bytes,
                     Parts& parts) {
  fabric::DeviceMemory& wire = parts.gpu->wire();
  parts.layout = gpu_layout(config, wire.size(), body_bytes);
  fabric::Segment arena;
  const auto cards = engine::together(bootstrap, config, "Group: GPU memory", [&] {
    arena = register_gpu_memory(config, parts);
    return engine::bytes_of({engine::card_of(parts.control), engine::card_of(arena)});
  });
  engine::together(bootstrap, config, "Group: GPU attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(parts.control), engine::card_of(arena)});
    return std::vector<std::byte>();
  });
  if (!config.elastic.empty()) return;  // others come later
  wire.seal(parts.control.id);
  wire.seal(arena.id);
}

fabric::DeviceMemoryOptions memory_options(const GroupConfig& config, int device) {
  fabric::DeviceMemoryOptions options;
  options.device = device;
  options.deadline = config.deadline;
  options.on_wait = config.on_wait;
  options.joinable = !config.elastic.empty();
  return options;
}

/// Of a process that joins: the card of a rank that it finds. It waits for one, as the group may
/// still be made.
std::vector<std::byte> card_of_any(const GroupConfig& config, fabric::Fabric& wire) {
  const auto end = std::chrono::steady_clock::now() + config.deadline;
  for (;;) {
    for (const fabric::Visitor& there : wire.lobby()->visitors()) {
      auto card = page_in(config, there.control, wire.size())->card();
      if (!card.empty()) return card;
    }
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(
          ErrorKind::deadline,
          "Group: rank " + std::to_string(wire.rank()) +
              " wants to join, but no rank of the group is left, or none has GPU memory yet",
          {wire.rank(), -1, "Group: elastic", 0, 0, 0});
    }
    if (config.on_wait) config.on_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

GpuPage* page_in(const GroupConfig& config, std::byte* control, int ranks) {
  if (config.elastic.empty()) return nullptr;
  return reinterpret_cast<GpuPage*>(control + cpu_layout(ranks).bytes);
}

std::size_t table_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * kMaxSegments * sizeof(PeerSegment);
}

bool available() {
  return true;
}

MemoryStats cuda_memory_hint(const GroupConfig& config, int ranks) {
  const std::size_t control = control_bytes(gpu_layout(config, ranks), ranks);
  return {cpu_control_bytes(config, ranks) + kSparePage + engine::segment_bytes(control),
          engine::segment_bytes(arena_bytes(config)), 0, 0};
}

int ranks_on_gpu(Bootstrap& bootstrap, const GroupConfig& config) {
  int device = 0;
  engine::together(bootstrap, config, "Group: device", [&] {
    device = chosen_device(config);
    return std::vector<std::byte>();
  });
  Parts parts;
  meet(bootstrap, config, device, parts);
  return parts.sharing;
}

std::string pci_bus_id(int device) {
  std::array<char, 32> text{};
  const bool found =
      (device >= 0 || cudaGetDevice(&device) == cudaSuccess) &&
      cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device) == cudaSuccess;
  if (!found) cudaGetLastError();  // creation will tell what is wrong
  return found ? text.data() : "";
}

std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                         std::unique_ptr<fabric::Fabric> fabric) {
  return make_engine(bootstrap, config, std::move(fabric), 1);
}

std::shared_ptr<CudaEngine> make_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                        std::unique_ptr<fabric::Fabric> fabric, int sharing,
                                        std::size_t body_bytes) {
  check_domain(bootstrap.size());
  Parts parts;
  parts.cpu = std::make_shared<engine::Memory>(std::move(fabric));
  int device = 0;
  engine::together(bootstrap, config, "Group: device", [&] {
    device = chosen_device(config);
    return std::vector<std::byte>();
  });
  const OnDevice here(device);
  meet(bootstrap, config, device, parts);
  parts.sharing = std::max(parts.sharing, sharing);
  make_cpu_control(bootstrap, config, parts);
  auto wire = fabric::make_device_memory(bootstrap, memory_options(config, device));
  parts.gpu = std::make_shared<GpuMemory>(std::move(wire), config.deadline);
  make_gpu_memory(bootstrap, config, body_bytes, parts);
  std::shared_ptr<CudaEngine> made;
  engine::together(bootstrap, config, "Group: start", [&] {
    made = std::make_shared<CudaEngine>(config, std::move(parts));
    made->start();
    return std::vector<std::byte>();
  });
  return made;
}

std::shared_ptr<Engine> make_lone_cuda_engine(const GroupConfig& config,
                                              std::unique_ptr<fabric::Fabric> fabric,
                                              std::uint64_t ticket) {
  check_domain(fabric->size());
  Parts parts;
  parts.cpu = std::make_shared<engine::Memory>(std::move(fabric));
  fabric::Fabric& wire = *parts.cpu->fabric;
  const int rank = wire.rank(), size = wire.size();
  const fabric::Segment spare = register_cpu_control(config, parts);
  wire.seal(parts.cpu_control.id);  // the others open its descriptors
  wire.seal(spare.id);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) wire.lobby()->vacate(peer);
  }
  const int device = chosen_device(config);
  const OnDevice here(device);
  prepare_device(device, parts);
  const auto card = ticket == 0 ? std::vector<std::byte>() : card_of_any(config, wire);
  parts.gpu = std::make_shared<GpuMemory>(
      fabric::join_device_memory(rank, size, memory_options(config, device), card),
      config.deadline);
  parts.layout = gpu_layout(config, size);
  (void)register_gpu_memory(config, parts);
  auto made = std::make_shared<CudaEngine>(config, std::move(parts));
  made->start_alone(ticket);
  return made;
}

}  // namespace ferry::cuda
