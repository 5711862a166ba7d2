// Limits of the process (ulimit, setrlimit) in words, for errors that one of them caused.
#pragma once
#include <cstdint>
#include <string>

namespace ferry {

/// After "no memory": "; the address space of this process may have … bytes (ulimit -v …), …".
/// Empty where it has no such limit. `needed`: bytes; 0: not known.
std::string memory_limit_text(std::uint64_t needed);

/// The same of memory that a NIC reaches, which is locked (ulimit -l).
std::string locked_memory_limit_text();

/// Why this process cannot make a file of so many bytes (ulimit -f); empty: it can. To be asked
/// before: at the limit the kernel sends SIGXFSZ, which ends a process that does not ignore it.
std::string file_limit_text(std::uint64_t bytes);

/// Why no thread could be started, by the errno of that.
std::string thread_limit_text(int error);

/// Inside a catch block: throws what is handled. Where memory or threads have run out, as
/// Error(exhausted) that names rank, call and limit.
[[noreturn]] void throw_in_words(int rank, const std::string& call);

/// Runs that; what it throws says what has run out.
template <class Work>
auto in_words(int rank, const std::string& call, Work&& work) {
  try {
    return work();
  } catch (...) {
    throw_in_words(rank, call);
  }
}

}  // namespace ferry
