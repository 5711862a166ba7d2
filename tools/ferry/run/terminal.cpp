#include "run/terminal.hpp"

#include <sys/ioctl.h>

namespace ferry::cli {

std::size_t columns_of(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace ferry::cli
