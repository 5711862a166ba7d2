#include "platform/terminal.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>

namespace ferry {

std::size_t columns_of(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool is_terminal(int fd) {
  return isatty(fd) == 1;
}

bool is_open(int fd) {
  return fcntl(fd, F_GETFD) != -1;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      usleep(1000);  // whoever shares this output made it non-blocking
    } else if (errno != EINTR) {
      return errno != EPIPE;
    }
  }
  return true;
}

}  // namespace ferry
