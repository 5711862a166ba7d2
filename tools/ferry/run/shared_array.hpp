// Memory that this process shares with the ranks that it forks.
#pragma once
#include <cstddef>
#include <type_traits>

namespace ferry::cli {

/// Zeroed; throws std::system_error.
void* map_shared(std::size_t bytes);
void unmap_shared(void* data, std::size_t bytes);

/// `size` zeroed elements, seen by this process and by those forked after.
template <class T>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SharedArray(std::size_t size) : size_(size), data_(map_shared(bytes())) {}
  ~SharedArray() { unmap_shared(data_, bytes()); }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  T& operator[](std::size_t i) const { return static_cast<T*>(data_)[i]; }
  T* begin() const { return static_cast<T*>(data_); }
  T* end() const { return begin() + size_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t bytes() const { return (size_ > 0 ? size_ : 1) * sizeof(T); }

  std::size_t size_;
  void* data_;
};

}  // namespace ferry::cli
