// Owns one file descriptor.
#pragma once
#include <unistd.h>

#include <utility>

namespace ferry::fabric {

class UniqueDescriptor {
 public:
  explicit UniqueDescriptor(int fd = -1) : fd_(fd) {}
  ~UniqueDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  UniqueDescriptor(UniqueDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueDescriptor& operator=(UniqueDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace ferry::fabric
