// Owns what the system gave a number to: a file or a handle, a socket.
#pragma once
#include <utility>

namespace ferry {

void close_descriptor(int descriptor) noexcept;
void close_socket(int socket) noexcept;

/// The numbers are descriptors on POSIX, handles on Windows (whose values fit 32 bits by contract).
template <void (*close)(int) noexcept>
class Owned {
 public:
  Owned() = default;
  explicit Owned(int number) : number_(number) {}
  ~Owned() { reset(); }
  Owned(Owned&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int get() const noexcept { return number_; }
  explicit operator bool() const noexcept { return number_ >= 0; }
  void reset() noexcept {
    if (number_ >= 0) close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

using UniqueDescriptor = Owned<close_descriptor>;
using Socket = Owned<close_socket>;

}  // namespace ferry
