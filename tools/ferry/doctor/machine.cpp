#include "doctor/machine.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "ferry/version.hpp"
#include "platform/library.hpp"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// "Model:   NVIDIA H200"
std::string model_in(const fs::path& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Model:")) continue;
    const std::size_t first = line.find_first_not_of(" \t", 6);
    return first == std::string::npos ? "" : line.substr(first);
  }
  return {};
}

std::string simd() {
#if defined(__aarch64__)
  return "neon";
#else
  return std::string(host_kernels());
#endif
}

Machine::Gpus look_at_gpus() {
  Machine::Gpus gpus;
  const fs::path folder = "/proc/driver/nvidia/gpus";
  for (const std::string& name : names_in(folder)) {
    gpus.names.push_back(model_in(folder / name / "information"));
  }
  gpus.count = static_cast<int>(gpus.names.size());
  std::ifstream("/sys/module/nvidia/version") >> gpus.driver;
  ask_driver(gpus);
  return gpus;
}

std::string look_for_container() {
  std::error_code error;
  if (std::getenv("KUBERNETES_SERVICE_HOST") != nullptr) return "kubernetes";
  if (fs::exists("/.dockerenv", error)) return "docker";
  if (fs::exists("/run/.containerenv", error)) return "podman";
  if (std::getenv("APPTAINER_CONTAINER") != nullptr) return "apptainer";
  if (std::getenv("SINGULARITY_CONTAINER") != nullptr) return "singularity";
  const char* kind = std::getenv("container");
  return kind != nullptr ? kind : "";
}

}  // namespace

Machine look_at_machine() {
  Machine machine{system_facts()};
  machine.container = look_for_container();
  machine.simd = simd();
  machine.gpus = look_at_gpus();
  machine.rdma_devices = names_in("/sys/class/infiniband");
  machine.libfabric = static_cast<bool>(Library("libfabric.so.1"));
  return machine;
}

}  // namespace ferry::cli
