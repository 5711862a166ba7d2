// The facts about a machine in JSON, and numbers in words.
#include <fmt/format.h>

#include <array>

#include "doctor/machine.hpp"

namespace ferry::cli {

nlohmann::json to_json(const Machine& m) {
  return {
      {"system", m.system},
      {"container", m.container},
      {"cpu",
       {{"model", m.cpu.model},
        {"architecture", m.cpu.architecture},
        {"cores", m.cpu.cores},
        {"usable_cores", m.cpu.usable_cores},
        {"quota_cores", m.cpu.quota_cores},
        {"simd", m.simd}}},
      {"memory",
       {{"total_bytes", m.memory.total_bytes},
        {"available_bytes", m.memory.available_bytes},
        {"limit_bytes", m.memory.limit_bytes}}},
      {"shared_memory",
       {{"present", m.shared_memory.present},
        {"writable", m.shared_memory.writable},
        {"total_bytes", m.shared_memory.total_bytes},
        {"free_bytes", m.shared_memory.free_bytes}}},
      {"limits",
       {{"open_files", m.limits.open_files},
        {"open_files_most", m.limits.open_files_most},
        {"locked_bytes", m.limits.locked_bytes}}},
      {"kernel",
       {{"name", m.kernel.name},
        {"release", m.kernel.release},
        {"pidfd", m.kernel.pidfd},
        {"memfd", m.kernel.memfd},
        {"futex", m.kernel.futex}}},
      {"gpus", to_json(m.gpus)},
      {"rdma_devices", m.rdma_devices},
      {"libfabric", m.libfabric},
  };
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace ferry::cli
