#include "platform/random.hpp"

#include "platform/windows/system.hpp"
// After windows.h.
#include <bcrypt.h>

#include <cerrno>

namespace ferry {

int random_bytes(std::span<std::byte> bytes) noexcept {
  const NTSTATUS status =
      BCryptGenRandom(nullptr, reinterpret_cast<unsigned char*>(bytes.data()),
                      static_cast<ULONG>(bytes.size()), BCRYPT_USE_SYSTEM_PREFERRED_RNG);
  return status == 0 ? 0 : EIO;
}

}  // namespace ferry
