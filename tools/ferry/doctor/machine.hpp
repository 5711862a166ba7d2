// What is on this machine, as far as Ferry cares. Facts only; doctor.cpp judges them.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::cli {

struct Machine {
  struct Cpu {
    std::string model{};         ///< as the kernel names it; "" if it does not
    std::string architecture{};  ///< "x86_64", "aarch64"
    int cores = 0;               ///< logical, online
    int usable_cores = 0;        ///< that this process may run on
    double quota_cores = 0;      ///< of the control group; 0: no limit
    std::string simd{};  ///< what the host engine uses: "avx512", "avx2", "neon", "baseline"
  };
  struct Memory {
    std::uint64_t total_bytes = 0;
    std::uint64_t available_bytes = 0;
    std::uint64_t limit_bytes = 0;  ///< of the control group; 0: no limit
  };
  struct SharedMemory {
    bool present = false;
    bool writable = false;
    std::uint64_t total_bytes = 0;
    std::uint64_t free_bytes = 0;
  };
  struct Limits {  ///< 2^64 - 1: unlimited
    std::uint64_t open_files = 0;
    std::uint64_t open_files_most = 0;
    std::uint64_t locked_bytes = 0;
  };
  struct Kernel {
    std::string name{"Linux"};  ///< or "Windows": then what follows the release says nothing
    std::string release{};
    bool pidfd = false;
    bool memfd = false;
    bool futex = false;
  };
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

  std::string system{};     ///< "Debian GNU/Linux 12 (bookworm)"
  std::string container{};  ///< "docker", "kubernetes", ...; "" if it does not look like one
  Cpu cpu{};
  Memory memory{};
  SharedMemory shared_memory{};
  Limits limits{};
  Kernel kernel{};
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
