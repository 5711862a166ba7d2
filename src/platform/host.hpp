// Where this process runs.
#pragma once
#include <cstdint>
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

}  // namespace ferry
