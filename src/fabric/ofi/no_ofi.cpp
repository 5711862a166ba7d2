// Builds without libfabric's headers use this file in place of ofi.cpp.
#include <ferry/error.hpp>
#include <string>

#include "fabric/ofi/ofi.hpp"

namespace ferry::fabric {
namespace {

[[noreturn]] void throw_not_built(int rank) {
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(rank) +
                  ": this build of Ferry has no ofi fabric: the headers of libfabric were missing; "
                  "install them (Debian, Ubuntu: apt install libfabric-dev; RHEL: dnf install "
                  "libfabric-devel) and build again",
              {.rank = rank});
}

}  // namespace

bool ofi_is_built() noexcept {
  return false;
}

std::unique_ptr<Fabric> make_ofi_fabric(Bootstrap& bootstrap, const OfiOptions& /*options*/,
                                        std::chrono::nanoseconds deadline, const OnWait& on_wait,
                                        const std::string& /*gpu*/) {
  // The peers may have it: they learn from this rank's handshake, which says nothing they can read.
  bootstrap.all_gather({}, deadline, on_wait);
  throw_not_built(bootstrap.rank());
}

std::unique_ptr<Fabric> join_ofi_fabric(int rank, int /*size*/, const OfiOptions& /*options*/,
                                        std::span<const std::byte> /*invitation*/,
                                        std::chrono::nanoseconds /*deadline*/,
                                        const std::string& /*gpu*/) {
  throw_not_built(rank);
}

std::unique_ptr<Fabric> begin_ofi_fabric(int rank, int /*size*/, const OfiOptions& /*options*/,
                                         int /*local*/, std::chrono::nanoseconds /*deadline*/,
                                         const std::string& /*gpu*/) {
  throw_not_built(rank);
}

}  // namespace ferry::fabric
