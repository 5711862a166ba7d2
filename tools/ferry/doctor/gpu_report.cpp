// What the drivers said of the GPUs, in JSON and in lines.
#include <fmt/format.h>

#include <array>

#include "doctor/machine.hpp"

namespace ferry::cli {

nlohmann::json to_json(const Machine::Gpus& gpus) {
  nlohmann::json all = nlohmann::json::array();
  for (const Machine::Gpu& gpu : gpus.all) {
    all.push_back({{"name", gpu.name},
                   {"bus", gpu.bus},
                   {"architecture", gpu.architecture},
                   {"multiprocessors", gpu.multiprocessors},
                   {"memory_bytes", gpu.memory_bytes},
                   {"links", gpu.links},
                   {"vmm", gpu.vmm},
                   {"posix_descriptors", gpu.descriptors},
                   {"fabric_handles", gpu.fabric_handles},
                   {"dma_buf", gpu.dma_buf},
                   {"rdma", gpu.rdma},
                   {"multicast", gpu.multicast},
                   {"slice", gpu.slice}});
  }
  nlohmann::json pairs = nlohmann::json::array();
  for (const Machine::GpuPair& pair : gpus.pairs) {
    pairs.push_back(
        {{"from", pair.from}, {"to", pair.to}, {"p2p", pair.p2p}, {"nvlink", pair.nvlink}});
  }
  return {{"count", gpus.count},     {"driver", gpus.driver}, {"cuda", gpus.cuda},
          {"library", gpus.library}, {"names", gpus.names},   {"all", all},
          {"pairs", pairs},          {"in_mig", gpus.in_mig}};
}

std::vector<std::string> describe(const Machine::Gpus& gpus) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < gpus.all.size(); ++i) {
    const Machine::Gpu& gpu = gpus.all[i];
    std::string can = gpu.vmm ? "VMM" : "no VMM";
    const std::array<std::pair<bool, const char*>, 5> abilities{
        {{gpu.descriptors, "POSIX descriptors"},
         {gpu.fabric_handles, "fabric handles"},
         {gpu.dma_buf, "DMA-BUF"},
         {gpu.rdma, "GPUDirect RDMA"},
         {gpu.multicast, "multicast"}}};
    for (const auto& [has, name] : abilities) {
      if (has) can += std::string(", ") + name;
    }
    lines.push_back(fmt::format("{}: {}, {}, {} SMs, {}, {} NVLinks; {}", i, gpu.name,
                                gpu.architecture, gpu.multiprocessors,
                                format_bytes(gpu.memory_bytes), gpu.links, can));
  }
  for (std::size_t from = 0; gpus.all.size() > 1 && from < gpus.all.size(); ++from) {
    std::string row = fmt::format("from {}:", from);
    for (const Machine::GpuPair& pair : gpus.pairs) {
      if (pair.from != static_cast<int>(from)) continue;
      row += fmt::format(" {} {}", pair.to, pair.nvlink ? "NVLink" : pair.p2p ? "P2P" : "none");
    }
    lines.push_back(row);
  }
  return lines;
}

}  // namespace ferry::cli
