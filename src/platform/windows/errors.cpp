#include <array>
#include <cerrno>
#include <utility>

#include "platform/windows/system.hpp"

namespace ferry::windows {

int errno_of(unsigned long code) noexcept {
  constexpr std::array<std::pair<unsigned long, int>, 30> kKnown{{
      {ERROR_SUCCESS, 0},
      {ERROR_FILE_NOT_FOUND, ENOENT},
      {ERROR_PATH_NOT_FOUND, ENOENT},
      {ERROR_TOO_MANY_OPEN_FILES, EMFILE},
      {ERROR_ACCESS_DENIED, EACCES},
      {ERROR_INVALID_HANDLE, EBADF},
      {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},
      {ERROR_OUTOFMEMORY, ENOMEM},
      {ERROR_COMMITMENT_LIMIT, ENOMEM},
      {ERROR_ALREADY_EXISTS, EEXIST},
      {ERROR_DISK_FULL, ENOSPC},
      {ERROR_NO_SYSTEM_RESOURCES, ENOMEM},
      {ERROR_NOT_SUPPORTED, ENOTSUP},
      {WSAEINTR, EINTR},
      {WSAEACCES, EACCES},
      {WSAEINVAL, EINVAL},
      {WSAEMFILE, EMFILE},
      {WSAEWOULDBLOCK, EWOULDBLOCK},
      {WSAEINPROGRESS, EINPROGRESS},
      {WSAEADDRINUSE, EADDRINUSE},
      {WSAEADDRNOTAVAIL, EADDRNOTAVAIL},
      {WSAENETDOWN, ENETDOWN},
      {WSAENETUNREACH, ENETUNREACH},
      {WSAECONNABORTED, ECONNABORTED},
      {WSAECONNRESET, ECONNRESET},
      {WSAENOBUFS, ENOBUFS},
      {WSAENOTCONN, ENOTCONN},
      {WSAETIMEDOUT, ETIMEDOUT},
      {WSAECONNREFUSED, ECONNREFUSED},
      {WSAEHOSTUNREACH, EHOSTUNREACH},
  }};
  for (const auto& [known, number] : kKnown) {
    if (known == code) return number;
  }
  return EIO;
}

}  // namespace ferry::windows
