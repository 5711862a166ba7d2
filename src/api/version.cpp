#include "ferry/version.hpp"

#include "host/kernels/kernels.hpp"

namespace ferry {

std::string_view version() {
  return FERRY_VERSION;
}

std::string_view host_kernels() {
  return host::kernels().name;
}

}  // namespace ferry
