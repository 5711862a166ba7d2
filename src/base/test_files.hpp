// For tests: a process without a free file descriptor.
#pragma once
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

namespace ferry {

/// While it lives, this process has no file descriptor left; `give_back` frees one.
class NoFilesLeft {
 public:
  NoFilesLeft() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit low = before_;
    low.rlim_cur = kLimit;
    setrlimit(RLIMIT_NOFILE, &low);
    for (int fd = open("/dev/null", O_RDONLY | O_CLOEXEC); fd >= 0;
         fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) {
      held_.push_back(fd);
    }
  }
  ~NoFilesLeft() {
    for (const int fd : held_) close(fd);
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoFilesLeft(const NoFilesLeft&) = delete;
  NoFilesLeft& operator=(const NoFilesLeft&) = delete;

  void give_back() {
    if (held_.empty()) return;
    close(held_.back());
    held_.pop_back();
  }

  static constexpr rlim_t kLimit = 96;

 private:
  rlimit before_{};
  std::vector<int> held_{};
};

}  // namespace ferry
