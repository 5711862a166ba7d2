// What the system tells of this machine and of what this process may use of it.
#pragma once
#include <cstdint>
#include <string>

namespace ferry {

struct SystemFacts {
  struct Cpu {
    std::string model{};         ///< as the kernel names it; "" if it does not
    std::string architecture{};  ///< "x86_64", "aarch64"
    int cores = 0;               ///< logical, online
    int usable_cores = 0;        ///< that this process may run on
    double quota_cores = 0;      ///< of the control group; 0: no limit
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

  std::string system{};  ///< "Debian GNU/Linux 12 (bookworm)"
  Cpu cpu{};
  Memory memory{};
  SharedMemory shared_memory{};
  Limits limits{};
  Kernel kernel{};
};

/// Reads. Starts nothing, changes nothing, never throws for something that is absent.
SystemFacts system_facts();

/// Lets this thread, and those that it starts, run on that core alone. False: not allowed.
bool pin_to_core(int core) noexcept;

}  // namespace ferry
