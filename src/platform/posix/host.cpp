#include "platform/host.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string_view>

#include "platform/unique_descriptor.hpp"

namespace ferry {

std::string boot_id(int& error) {
  const UniqueDescriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  error = file ? 0 : errno;
  if (!file) return {};
  std::array<char, 256> text{};
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  const std::string_view line(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  return std::string(line.substr(0, line.find('\n')));
}

std::string host_name() {
  std::array<char, 256> host{};
  return ::gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "";
}

std::uint64_t user_id() {
  return ::geteuid();
}

std::uint64_t shared_memory_place() {
  struct stat info{};
  return ::stat("/dev/shm", &info) == 0 && S_ISDIR(info.st_mode) ? info.st_dev : 0;
}

std::optional<std::string> environment_variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace ferry
