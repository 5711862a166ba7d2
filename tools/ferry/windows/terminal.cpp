#include "run/terminal.hpp"

#include <io.h>

#include "windows/system.hpp"

namespace ferry::cli {

std::size_t columns_of(int fd) {
  CONSOLE_SCREEN_BUFFER_INFO info{};
  const auto console = reinterpret_cast<HANDLE>(_get_osfhandle(fd));
  if (!GetConsoleScreenBufferInfo(console, &info)) return 80;
  return static_cast<std::size_t>(info.srWindow.Right - info.srWindow.Left + 1);
}

}  // namespace ferry::cli
