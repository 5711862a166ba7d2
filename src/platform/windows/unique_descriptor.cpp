#include "platform/unique_descriptor.hpp"

#include "platform/windows/system.hpp"

namespace ferry {

void close_descriptor(int descriptor) noexcept {
  CloseHandle(windows::handle_of(descriptor));
}

void close_socket(int socket) noexcept {
  ::closesocket(static_cast<SOCKET>(socket));
}

}  // namespace ferry
