// GPUs, by the driver's and NVML's own libraries, found at run time: this tool is built without
// CUDA.
#include <fmt/format.h>

#include <array>

#include "doctor/machine.hpp"
#include "platform/library.hpp"

namespace ferry::cli {
namespace {

// Numbers and types of the driver's and NVML's stable binary interfaces.
enum Attribute {
  kMultiprocessors = 16,
  kMajor = 75,
  kMinor = 76,
  kVmm = 102,
  kPosixDescriptor = 103,
  kRdmaVmm = 110,
  kDmaBuf = 124,
  kFabricHandle = 128,
  kMulticast = 132,
};
constexpr int kNvmlP2pNvlink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK; the answer 0 is "ok"
constexpr unsigned kMostLinks = 18;

struct Driver : Library {
  using Library::Library;
  /// Calls it; −1 if the library has no such function.
  template <typename... Arguments>
  int call(const char* name, Arguments... arguments) {
    auto* found = symbol(name);
    return found ? reinterpret_cast<int (*)(Arguments...)>(found)(arguments...) : -1;
  }
};

Machine::Gpu look_at_gpu(Driver& cuda, int device) {
  Machine::Gpu gpu;
  std::array<char, 128> text{};
  if (cuda.call("cuDeviceGetName", text.data(), 100, device) == 0) gpu.name = text.data();
  gpu.slice = gpu.name.find(" MIG ") != std::string::npos;  // "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
  if (cuda.call("cuDeviceGetPCIBusId", text.data(), 100, device) == 0) gpu.bus = text.data();
  std::size_t bytes = 0;
  if (cuda.call("cuDeviceTotalMem_v2", &bytes, device) == 0) gpu.memory_bytes = bytes;
  const auto attribute = [&](Attribute which) {
    int value = 0;
    const int refused = cuda.call("cuDeviceGetAttribute", &value, static_cast<int>(which), device);
    return refused == 0 ? value : 0;
  };
  gpu.architecture = fmt::format("sm_{}{}", attribute(kMajor), attribute(kMinor));
  gpu.multiprocessors = attribute(kMultiprocessors);
  gpu.vmm = attribute(kVmm) != 0;
  gpu.descriptors = attribute(kPosixDescriptor) != 0;
  gpu.fabric_handles = attribute(kFabricHandle) != 0;
  gpu.dma_buf = attribute(kDmaBuf) != 0;
  gpu.rdma = attribute(kRdmaVmm) != 0;
  gpu.multicast = attribute(kMulticast) != 0;
  return gpu;
}

void look_at_pairs(Driver& cuda, const std::vector<int>& devices, Machine::Gpus& gpus) {
  Driver nvml("libnvidia-ml.so.1");
  const bool asks = nvml && nvml.call("nvmlInit_v2") == 0;
  std::vector<void*> handles(devices.size(), nullptr);
  for (std::size_t a = 0; a < devices.size(); ++a) {
    if (!asks ||
        nvml.call("nvmlDeviceGetHandleByPciBusId_v2", gpus.all[a].bus.c_str(), &handles[a]) != 0) {
      handles[a] = nullptr;
    }
    for (unsigned link = 0; handles[a] != nullptr && link < kMostLinks; ++link) {
      unsigned active = 0;
      if (nvml.call("nvmlDeviceGetNvLinkState", handles[a], link, &active) == 0) {
        gpus.all[a].links += active == 1;
      }
    }
  }
  for (std::size_t a = 0; a < devices.size(); ++a) {
    for (std::size_t b = 0; b < devices.size(); ++b) {
      if (a == b) continue;
      int can = 0;
      int nvlink = -1;
      if (cuda.call("cuDeviceCanAccessPeer", &can, devices[a], devices[b]) != 0) can = 0;
      if (handles[a] != nullptr && handles[b] != nullptr &&
          nvml.call("nvmlDeviceGetP2PStatus", handles[a], handles[b], kNvmlP2pNvlink, &nvlink) !=
              0) {
        nvlink = -1;
      }
      gpus.pairs.push_back(
          {static_cast<int>(a), static_cast<int>(b), can != 0, can != 0 && nvlink == 0});
    }
  }
  if (asks) nvml.call("nvmlShutdown");
}

int gpus_in_mig() {
  Driver nvml("libnvidia-ml.so.1");
  if (!nvml || nvml.call("nvmlInit_v2") != 0) return 0;
  unsigned count = 0;
  int found = 0;
  if (nvml.call("nvmlDeviceGetCount_v2", &count) != 0) count = 0;
  for (unsigned i = 0; i < count; ++i) {
    void* gpu = nullptr;
    unsigned now = 0, later = 0;
    if (nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &gpu) == 0 &&
        nvml.call("nvmlDeviceGetMigMode", gpu, &now, &later) == 0) {
      found += now == 1;
    }
  }
  nvml.call("nvmlShutdown");
  return found;
}

}  // namespace

void ask_driver(Machine::Gpus& gpus) {
  gpus.in_mig = gpus_in_mig();
  Driver cuda("libcuda.so.1");
  gpus.library = static_cast<bool>(cuda);
  int count = 0;
  int version = 0;
  if (!cuda || cuda.call("cuInit", 0u) != 0) return;
  if (cuda.call("cuDriverGetVersion", &version) == 0) {
    gpus.cuda = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  }
  if (cuda.call("cuDeviceGetCount", &count) != 0) return;
  std::vector<int> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    if (cuda.call("cuDeviceGet", &device, ordinal) != 0) continue;
    devices.push_back(device);
    gpus.all.push_back(look_at_gpu(cuda, device));
  }
  look_at_pairs(cuda, devices, gpus);
}

}  // namespace ferry::cli
