// Where this process runs.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace ferry {

/// Of the running kernel: one host, one boot; empty: not known, and `error` is the errno.
std::string boot_id(int& error);
/// Empty: not known.
std::string host_name();
/// The effective user. On Windows a hash of the user's SID.
std::uint64_t user_id();
/// Processes that see the same number share memory by name: on POSIX the device of /dev/shm, on
/// Windows the session. 0: there is no shared memory.
std::uint64_t shared_memory_place();
/// Of this process now. Not getenv: on Windows each C library has a copy of its own, and Python
/// changes that of another one.
std::optional<std::string> environment_variable(const char* name);

}  // namespace ferry
