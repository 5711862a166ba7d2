// What is on this machine, as far as Ferry cares. Facts only; doctor.cpp judges them.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "platform/machine.hpp"

namespace ferry::cli {

struct Machine : SystemFacts {
  struct Gpu {
    std::string name{};
    std::string bus{};           ///< PCI place
    std::string architecture{};  ///< "sm_90"
    int multiprocessors = 0;
    std::uint64_t memory_bytes = 0;
    int links = 0;  ///< NVLinks that are up
    bool vmm = false;
    bool descriptors = false;  ///< memory shared by POSIX file descriptors
    bool fabric_handles = false;
    bool dma_buf = false;
    bool rdma = false;  ///< GPUDirect RDMA to VMM memory
    bool multicast = false;
    bool slice = false;  ///< an instance of MIG
  };
  struct GpuPair {
    int from = 0;
    int to = 0;
    bool p2p = false;     ///< loads and stores of `from` reach memory of `to`
    bool nvlink = false;  ///< by NVLink
  };
  struct Gpus {
    int count = 0;
    std::string cuda{};      ///< the newest CUDA that the driver serves; "" if it does not start
    std::vector<Gpu> all{};  ///< those that CUDA sees, by ordinal
    std::vector<GpuPair> pairs{};
    std::string driver{};  ///< version of the NVIDIA kernel driver; "" if absent
    bool library = false;  ///< libcuda.so.1 can be loaded
    int in_mig = 0;        ///< GPUs in MIG mode, as NVML counts them; CUDA sees their slices alone
    std::vector<std::string> names{};
  };

  std::string container{};  ///< "docker", "kubernetes", ...; "" if it does not look like one
  std::string simd{};       ///< what the host engine uses: "avx512", "avx2", "neon", "baseline"
  Gpus gpus{};
  std::vector<std::string> rdma_devices{};
  bool libfabric = false;  ///< libfabric.so.1 can be loaded
};

/// Reads. Starts nothing, changes nothing, never throws for something that is absent.
Machine look_at_machine();

nlohmann::json to_json(const Machine& machine);

/// GPUs for ranks; 0 in a build without the CUDA engine. Asked in a child.
int gpu_count();

/// Fills in what the CUDA driver and NVML know, where they are.
void ask_driver(Machine::Gpus& gpus);
nlohmann::json to_json(const Machine::Gpus& gpus);
/// A short line for each GPU, then how each reaches the others; none without GPUs.
std::vector<std::string> describe(const Machine::Gpus& gpus);

/// "64.0 MiB", "23.5 GiB".
std::string format_bytes(std::uint64_t bytes);

}  // namespace ferry::cli
