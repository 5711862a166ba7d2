// Memory that this process shares with the ranks that it forks.
#pragma once
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <system_error>
#include <type_traits>

namespace ferry::cli {

/// `size` zeroed elements, seen by this process and by those forked after.
template <class T>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SharedArray(std::size_t size) : size_(size) {
    data_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "cannot map shared memory");
    }
  }
  ~SharedArray() { munmap(data_, bytes()); }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  T& operator[](std::size_t i) const { return static_cast<T*>(data_)[i]; }
  T* begin() const { return static_cast<T*>(data_); }
  T* end() const { return begin() + size_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t bytes() const { return (size_ > 0 ? size_ : 1) * sizeof(T); }

  std::size_t size_;
  void* data_ = nullptr;
};

}  // namespace ferry::cli
