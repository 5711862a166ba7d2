#include "fabric/ofi/library.hpp"

#include <dlfcn.h>
#include <rdma/fi_errno.h>

#include <ferry/error.hpp>

#include "core/open_files.hpp"

namespace ferry::fabric::ofi {
namespace {

struct Loaded {
  Library functions{};
  std::string problem{};
};

Loaded load() {
  Loaded loaded;
  void* const handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    loaded.problem = why == nullptr ? "dlopen failed" : why;
    return loaded;
  }
  const auto get = [&](auto& function, const char* name) {
    void* const symbol = dlsym(handle, name);
    if (symbol == nullptr) loaded.problem = std::string(name) + " is missing in libfabric.so.1";
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  get(loaded.functions.getinfo, "fi_getinfo");
  get(loaded.functions.freeinfo, "fi_freeinfo");
  get(loaded.functions.dupinfo, "fi_dupinfo");
  get(loaded.functions.fabric, "fi_fabric");
  get(loaded.functions.strerror, "fi_strerror");
  get(loaded.functions.version, "fi_version");
  return loaded;
}

}  // namespace

const Library& library(int rank) {
  static const Loaded loaded = load();
  if (loaded.problem.empty()) return loaded.functions;
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(rank) +
                  ": the ofi fabric needs libfabric: " + loaded.problem +
                  "; install it (Debian, Ubuntu: apt install libfabric1; RHEL: dnf install "
                  "libfabric) or set LD_LIBRARY_PATH to where it lies",
              {.rank = rank});
}

std::string error_text(const Library& library, long code) {
  const int number = static_cast<int>(code < 0 ? -code : code);
  return std::string(library.strerror(number)) + " (" + std::to_string(number) + ")";
}

void throw_ofi(const Library& library, int rank, std::string_view what, long code) {
  const int number = static_cast<int>(code < 0 ? -code : code);
  const bool exhausted = number == FI_ENOMEM || too_many_files(number);
  throw Error(
      exhausted ? ErrorKind::exhausted : ErrorKind::system,
      "rank " + std::to_string(rank) + ": " + std::string(what) + ": " + error_text(library, code),
      {.rank = rank});
}

}  // namespace ferry::fabric::ofi
