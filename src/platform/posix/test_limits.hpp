// For tests: a process under the limits of its shell (ulimit).
#pragma once
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "platform/limits.hpp"

namespace ferry::test {

using SystemLimit = decltype(RLIMIT_AS);

inline SystemLimit system_limit(Limit which) {
  switch (which) {
    case Limit::address_space: return RLIMIT_AS;
    case Limit::file_size: return RLIMIT_FSIZE;
    case Limit::open_files: return RLIMIT_NOFILE;
    default: throw std::invalid_argument("no test sets this limit");
  }
}

/// For good. False: not allowed.
inline bool set_limit(Limit which, std::uint64_t to) {
  const rlimit both{to, to};
  return setrlimit(system_limit(which), &both) == 0;
}

/// A soft limit, while it lives.
class LoweredLimit {
 public:
  LoweredLimit(Limit which, std::uint64_t to) : which_(system_limit(which)) {
    getrlimit(which_, &before_);
    rlimit low = before_;
    low.rlim_cur = to;
    if (setrlimit(which_, &low) != 0) throw std::runtime_error("setrlimit");
  }
  ~LoweredLimit() { setrlimit(which_, &before_); }
  LoweredLimit(const LoweredLimit&) = delete;
  LoweredLimit& operator=(const LoweredLimit&) = delete;

 private:
  SystemLimit which_;
  rlimit before_{};
};

/// The number of the next file that this process opens.
inline int next_descriptor() {
  const int next = dup(0);
  close(next);
  return next;
}

/// Whether a program that this process starts does not get the file.
inline bool closes_on_exec(int descriptor) {
  return (fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0;
}

/// While it lives, this process has no file descriptor left; `give_back` frees one.
class NoFilesLeft {
 public:
  NoFilesLeft() {
    for (int fd = open("/dev/null", O_RDONLY | O_CLOEXEC); fd >= 0;
         fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) {
      held_.push_back(fd);
    }
  }
  ~NoFilesLeft() {
    for (const int fd : held_) close(fd);
  }
  NoFilesLeft(const NoFilesLeft&) = delete;
  NoFilesLeft& operator=(const NoFilesLeft&) = delete;

  void give_back() {
    if (held_.empty()) return;
    close(held_.back());
    held_.pop_back();
  }

  static constexpr std::uint64_t kLimit = 96;

 private:
  const LoweredLimit limit_{Limit::open_files, kLimit};
  std::vector<int> held_{};
};

}  // namespace ferry::test
