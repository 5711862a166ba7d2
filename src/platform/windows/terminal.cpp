#include "platform/terminal.hpp"

#include <io.h>

#include <cerrno>

#include "platform/windows/system.hpp"

namespace ferry {

std::size_t columns_of(int fd) {
  CONSOLE_SCREEN_BUFFER_INFO info{};
  const auto console = reinterpret_cast<HANDLE>(_get_osfhandle(fd));
  if (!GetConsoleScreenBufferInfo(console, &info)) return 80;
  return static_cast<std::size_t>(info.srWindow.Right - info.srWindow.Left + 1);
}

bool is_terminal(int fd) {
  return _isatty(fd) != 0;
}

bool is_open(int fd) {
  return _get_osfhandle(fd) != -1;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const int written = _write(fd, text.data(), static_cast<unsigned>(text.size()));
    if (written <= 0) return errno != EPIPE;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace ferry
