#include "platform/machine.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace ferry {
namespace {

std::string read_text(const char* path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The value of "key   : value" or "key=value" in a text of such lines.
std::string field(const std::string& text, const std::string& key, char separator) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t at = line.find(separator);
    if (at == std::string::npos) continue;
    const std::size_t first = line.find_first_not_of(" \t\"", at + 1);
    const std::size_t last = line.find_last_not_of(" \t\"");
    if (first != std::string::npos) return line.substr(first, last - first + 1);
  }
  return {};
}

double cpu_quota() {
  double quota = 0;
  double period = 0;
  std::istringstream v2(read_text("/sys/fs/cgroup/cpu.max"));
  if (v2 >> quota >> period && period > 0) return quota / period;  // "max 100000" does not parse
  std::istringstream v1_quota(read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"));
  std::istringstream v1_period(read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us"));
  if (v1_quota >> quota && v1_period >> period && quota > 0 && period > 0) return quota / period;
  return 0;
}

SystemFacts::Cpu look_at_cpu() {
  SystemFacts::Cpu cpu;
  utsname name{};
  uname(&name);
  cpu.architecture = name.machine;
  cpu.model = field(read_text("/proc/cpuinfo"), "model name", ':');
  cpu.cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  cpu.usable_cores =
      sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : cpu.cores;  // > 1024 cores
  cpu.quota_cores = cpu_quota();
  return cpu;
}

std::uint64_t kibibytes(const std::string& meminfo, const std::string& key) {
  return std::strtoull(field(meminfo, key, ':').c_str(), nullptr, 10) * 1024;
}

SystemFacts::Memory look_at_memory() {
  const std::string meminfo = read_text("/proc/meminfo");
  SystemFacts::Memory memory{kibibytes(meminfo, "MemTotal"), kibibytes(meminfo, "MemAvailable"), 0};
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const std::uint64_t limit = std::strtoull(read_text(path).c_str(), nullptr, 10);
    if (limit > 0 && limit < memory.total_bytes) memory.limit_bytes = limit;
  }
  return memory;
}

SystemFacts::SharedMemory look_at_shared_memory() {
  SystemFacts::SharedMemory shm;
  struct statvfs status{};
  if (statvfs("/dev/shm", &status) != 0) return shm;
  shm.present = true;
  shm.writable = access("/dev/shm", W_OK | X_OK) == 0;
  shm.total_bytes = static_cast<std::uint64_t>(status.f_blocks) * status.f_frsize;
  shm.free_bytes = static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
  return shm;
}

SystemFacts::Limits look_at_limits() {
  rlimit files{};
  rlimit locked{};
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  return {files.rlim_cur, files.rlim_max, locked.rlim_cur};
}

SystemFacts::Kernel look_at_kernel() {
  SystemFacts::Kernel kernel;
  utsname name{};
  uname(&name);
  kernel.release = name.release;
#ifdef SYS_pidfd_open
  const long pidfd = syscall(SYS_pidfd_open, getpid(), 0);
  kernel.pidfd = pidfd >= 0;
  if (pidfd >= 0) close(static_cast<int>(pidfd));
#endif
  const int memfd = memfd_create("ferry-doctor", MFD_CLOEXEC);
  kernel.memfd = memfd >= 0;
  if (memfd >= 0) close(memfd);
  int word = 0;
  kernel.futex = syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0) == 0;
  return kernel;
}

}  // namespace

SystemFacts system_facts() {
  SystemFacts facts;
  facts.system = field(read_text("/etc/os-release"), "PRETTY_NAME", '=');
  facts.cpu = look_at_cpu();
  facts.memory = look_at_memory();
  facts.shared_memory = look_at_shared_memory();
  facts.limits = look_at_limits();
  facts.kernel = look_at_kernel();
  return facts;
}

bool pin_to_core(int core) noexcept {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  return sched_setaffinity(0, sizeof cores, &cores) == 0;
}

}  // namespace ferry
