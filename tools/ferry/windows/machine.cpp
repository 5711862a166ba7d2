#include "doctor/machine.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <thread>

#include "ferry/version.hpp"
#include "windows/system.hpp"

namespace ferry::cli {
namespace {

std::string registry_text(const char* key, const char* value) {
  std::array<char, 256> text{};
  DWORD bytes = text.size() - 1;
  const LSTATUS found =
      RegGetValueA(HKEY_LOCAL_MACHINE, key, value, RRF_RT_REG_SZ, nullptr, text.data(), &bytes);
  return found == ERROR_SUCCESS ? text.data() : "";
}

/// A function of ntdll; null: it has none of that name.
template <class Function>
Function of_ntdll(const char* name) {
  return reinterpret_cast<Function>(
      reinterpret_cast<void*>(GetProcAddress(GetModuleHandleA("ntdll.dll"), name)));
}

/// "10.0.19045", and which wine it is.
std::string release() {
  RTL_OSVERSIONINFOW info{};
  info.dwOSVersionInfoSize = sizeof info;
  if (const auto ask = of_ntdll<LONG(WINAPI*)(RTL_OSVERSIONINFOW*)>("RtlGetVersion")) ask(&info);
  std::string text =
      fmt::format("{}.{}.{}", info.dwMajorVersion, info.dwMinorVersion, info.dwBuildNumber);
  if (const auto wine = of_ntdll<const char*(__cdecl*)()>("wine_get_version")) {
    text += fmt::format(" (wine {})", wine());
  }
  return text;
}

Machine::Cpu look_at_cpu() {
  Machine::Cpu cpu;
  cpu.architecture = "x86_64";
  cpu.model =
      registry_text("HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\0", "ProcessorNameString");
  cpu.cores = static_cast<int>(GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
  DWORD_PTR own = 0, all = 0;
  cpu.usable_cores = GetProcessAffinityMask(GetCurrentProcess(), &own, &all) && own != 0
                         ? __builtin_popcountll(own)
                         : cpu.cores;
  cpu.simd = std::string(host_kernels());
  return cpu;
}

}  // namespace

Machine look_at_machine() {
  Machine machine;
  machine.system = registry_text("SOFTWARE\\Microsoft\\Windows NT\\CurrentVersion", "ProductName");
  machine.cpu = look_at_cpu();
  MEMORYSTATUSEX memory{};
  memory.dwLength = sizeof memory;
  GlobalMemoryStatusEx(&memory);
  machine.memory = {memory.ullTotalPhys, memory.ullAvailPhys, 0};
  // Sections are backed by the page file.
  machine.shared_memory = {true, true, memory.ullTotalPageFile, memory.ullAvailPageFile};
  machine.kernel.name = "Windows";
  machine.kernel.release = release();
  return machine;
}

}  // namespace ferry::cli
