#include "platform/socket.hpp"

namespace ferry {

std::string own_address(const Socket& socket) {
  const std::string address = numeric_address(socket);
  const bool reached = address != "0.0.0.0" && address != "::" && address != "::1" &&
                       !address.starts_with("127.") && !address.starts_with("fe80");
  return reached ? address : std::string();
}

}  // namespace ferry
