#include "cuda/runtime/links.hpp"

#include <cstring>
#include <optional>
#include <vector>

#include "cuda/runtime/ll128_switch.hpp"

namespace ferry::cuda {

namespace {

/// Nothing of a GPU that cannot be asked.
std::optional<cudaDeviceProp> properties_of(int device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) return properties;
  (void)cudaGetLastError();
  return std::nullopt;
}

/// Those of data centres, of which NCCL's protocol has been used for long.
bool keeps_ll128(const cudaDeviceProp& gpu) {
  return (gpu.major == 8 || gpu.major == 9) && gpu.minor == 0;
}

/// Whole atomic operations across a link are NVLink's; PCIe has none between GPUs.
bool is_nvlink(int from, int to) {
  int atomics = 0;
  const cudaError_t error =
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to);
  if (error != cudaSuccess) (void)cudaGetLastError();  // such GPUs have no link
  return error == cudaSuccess && atomics != 0;
}

}  // namespace

bool carries_ll128(int device, std::span<const cudaUUID_t> gpus) {
  int count = 0;
  const auto own = properties_of(device);
  if (ll128_is_switched_off() || !own || !keeps_ll128(*own)) return false;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<cudaUUID_t> reached;
  for (int other = 0; other < count; ++other) {
    const auto found = properties_of(other);
    if (!found || found->major != own->major || !keeps_ll128(*found)) continue;
    if (other == device || is_nvlink(device, other)) reached.push_back(found->uuid);
  }
  for (const cudaUUID_t& gpu : gpus) {
    bool found = false;
    for (const cudaUUID_t& one : reached) found |= std::memcmp(&one, &gpu, sizeof gpu) == 0;
    if (!found) return false;
  }
  return true;
}

}  // namespace ferry::cuda
