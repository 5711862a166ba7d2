// What a test's process writes to stderr.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

namespace ferry::test {

/// What goes to stderr while it lives.
class Stderr {
 public:
  Stderr() : file_(std::tmpfile()), before_(::dup(STDERR_FILENO)) {
    ::dup2(::fileno(file_), STDERR_FILENO);
  }
  ~Stderr() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
    std::fclose(file_);
  }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;

  std::string text() const {
    std::string all(std::size_t{1} << 16, '\0');
    const ssize_t got = ::pread(::fileno(file_), all.data(), all.size(), 0);
    all.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return all;
  }
  /// Whether it has come within 20 s.
  bool comes(const std::string& part) const {
    const auto due = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (text().find(part) == std::string::npos) {
      if (std::chrono::steady_clock::now() > due) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }

 private:
  std::FILE* file_;
  int before_;
};

}  // namespace ferry::test
