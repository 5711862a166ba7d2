// A small file that processes of several hosts change one after another.
#pragma once
#include <cstddef>
#include <string>

#include "platform/unique_descriptor.hpp"

namespace ferry {

/// Locked from the constructor to the destructor. No function throws or waits for who else has the
/// file; after the first that fails the others do nothing.
class LockedFile {
 public:
  /// `make`: there must be no such file yet.
  LockedFile(const std::string& path, bool make);

  /// At most `most` bytes.
  std::string read(std::size_t most);
  /// Over what the file begins with, through to the disk.
  void write(const std::string& text);

  bool is_open() const { return static_cast<bool>(file_); }
  /// Null: all went well; otherwise "opened", "locked", ...
  const char* failed() const { return failed_; }
  int error() const { return error_; }  ///< the errno of that
  bool busy() const { return busy_; }   ///< it is locked by another process
  bool gone() const { return gone_; }   ///< who had locked it before has removed it

 private:
  void fail(const char* what);

  UniqueDescriptor file_{};
  const char* failed_ = nullptr;
  int error_ = 0;
  bool busy_ = false;
  bool gone_ = false;
};

}  // namespace ferry
