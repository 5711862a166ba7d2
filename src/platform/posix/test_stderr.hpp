// For tests: what this process writes to stderr.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
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

/// What a terminal in the place of stderr gets; empty: none can be made here.
inline std::string on_a_terminal(const std::function<void()>& run) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || ::grantpt(terminal) != 0 || ::unlockpt(terminal) != 0) return "";
  const int end = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
  const int before = ::dup(STDERR_FILENO);
  ::dup2(end, STDERR_FILENO);
  run();
  ::dup2(before, STDERR_FILENO);
  for (const int each : {end, before}) ::close(each);
  std::string got;
  std::array<char, 4096> part{};
  // It comes in pieces, the last one before an error that says that nobody writes there any more.
  for (ssize_t size = 0; (size = ::read(terminal, part.data(), part.size())) > 0;) {
    got.append(part.data(), static_cast<std::size_t>(size));
  }
  ::close(terminal);
  return got;
}

}  // namespace ferry::test
