// Memory that this process shares with the ranks that it starts (rank_processes.cpp).
#pragma once
#include <cstddef>
#include <memory>
#include <type_traits>

namespace ferry::cli {

/// Zeroed; throws std::system_error.
std::shared_ptr<void> shared_with_ranks(std::size_t bytes);

/// `size` zeroed elements, seen by this process and by the ranks that it starts after.
template <class T>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SharedArray(std::size_t size)
      : size_(size), data_(shared_with_ranks((size > 0 ? size : 1) * sizeof(T))) {}
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  T& operator[](std::size_t i) const { return begin()[i]; }
  T* begin() const { return static_cast<T*>(data_.get()); }
  T* end() const { return begin() + size_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::shared_ptr<void> data_;
};

}  // namespace ferry::cli
