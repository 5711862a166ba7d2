// Libraries that are found while the program runs.
#pragma once
#include <string>

namespace ferry {

/// Stays loaded: drivers, NCCL and libfabric leave threads or do not give back all that they took.
class Library {
 public:
  explicit Library(const char* name);
  explicit operator bool() const { return handle_ != nullptr; }
  /// Null: it has nothing of that name; then `error` says why, as after a failed constructor.
  void* symbol(const char* name);
  const std::string& error() const { return error_; }

 private:
  void* handle_;
  std::string error_{};
};

}  // namespace ferry
