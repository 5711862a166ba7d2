#include "platform/unique_descriptor.hpp"

#include <unistd.h>

namespace ferry {

void close_descriptor(int descriptor) noexcept {
  ::close(descriptor);
}

void close_socket(int socket) noexcept {
  ::close(socket);
}

}  // namespace ferry
