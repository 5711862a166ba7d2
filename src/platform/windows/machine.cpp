#include "platform/machine.hpp"

#include <array>

#include "platform/windows/system.hpp"

namespace ferry {
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
  std::string text = std::to_string(info.dwMajorVersion) + "." +
                     std::to_string(info.dwMinorVersion) + "." + std::to_string(info.dwBuildNumber);
  if (const auto wine = of_ntdll<const char*(__cdecl*)()>("wine_get_version")) {
    text += std::string(" (wine ") + wine() + ")";
  }
  return text;
}

SystemFacts::Cpu look_at_cpu() {
  SystemFacts::Cpu cpu;
  cpu.architecture = "x86_64";
  cpu.model =
      registry_text("HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\0", "ProcessorNameString");
  cpu.cores = static_cast<int>(GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
  DWORD_PTR own = 0, all = 0;
  cpu.usable_cores = GetProcessAffinityMask(GetCurrentProcess(), &own, &all) && own != 0
                         ? __builtin_popcountll(own)
                         : cpu.cores;
  return cpu;
}

}  // namespace

SystemFacts system_facts() {
  SystemFacts facts;
  facts.system = registry_text("SOFTWARE\\Microsoft\\Windows NT\\CurrentVersion", "ProductName");
  facts.cpu = look_at_cpu();
  MEMORYSTATUSEX memory{};
  memory.dwLength = sizeof memory;
  GlobalMemoryStatusEx(&memory);
  facts.memory = {memory.ullTotalPhys, memory.ullAvailPhys, 0};
  // Sections are backed by the page file.
  facts.shared_memory = {true, true, memory.ullTotalPageFile, memory.ullAvailPageFile};
  facts.kernel.name = "Windows";
  facts.kernel.release = release();
  return facts;
}

bool pin_to_core(int core) noexcept {
  return SetThreadAffinityMask(GetCurrentThread(), DWORD_PTR{1} << core) != 0;
}

}  // namespace ferry
