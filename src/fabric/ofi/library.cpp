#include "fabric/ofi/library.hpp"

#include <dlfcn.h>
#include <rdma/fi_errno.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <ferry/error.hpp>
#include <mutex>
#include <optional>

#include "base/open_files.hpp"
#include "base/process_limits.hpp"
#include "platform/process.hpp"

namespace ferry::fabric::ofi {
namespace {

/// Where hardly any descriptor is left: that; whatever the words of a failure are, it is the cause.
std::string files_left_text() {
  constexpr rlim_t kSpare = 8;  // an endpoint of TCP has more
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  const int next = eventfd(0, EFD_CLOEXEC);
  if (next < 0) return too_many_files(errno) ? "; " + ferry::error_text(errno) : std::string();
  close(next);
  if (static_cast<rlim_t>(next) + kSpare < limit.rlim_cur) return {};
  return "; " + ferry::error_text(EMFILE);
}

struct Loaded {
  Library functions{};
  std::string problem{};
  std::string limit{};  // that kept it from being loaded
};

Loaded load() {
  Loaded loaded;
  void* const handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    loaded.problem = why == nullptr ? "dlopen failed" : why;
    loaded.limit = files_left_text();
    if (loaded.problem.find("map segment") != std::string::npos)
      loaded.limit += memory_limit_text(0);
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
  static std::mutex mutex;
  static std::optional<Library> found;  // for good: others hold a reference
  const std::lock_guard lock(mutex);
  if (found) return *found;
  Loaded loaded = load();
  if (loaded.problem.empty()) return found.emplace(loaded.functions);
  const std::string start =
      "rank " + std::to_string(rank) + ": the ofi fabric needs libfabric: " + loaded.problem;
  if (!loaded.limit.empty()) {
    throw Error(ErrorKind::exhausted, start + loaded.limit, {.rank = rank});
  }
  throw Error(ErrorKind::unsupported,
              start +
                  "; install it (Debian, Ubuntu: apt install libfabric1; RHEL: dnf install "
                  "libfabric) or set LD_LIBRARY_PATH to where it lies",
              {.rank = rank});
}

std::string error_text(const Library& library, long code) {
  const int number = static_cast<int>(code < 0 ? -code : code);
  if (too_many_files(number)) return ferry::error_text(number);
  return std::string(library.strerror(number)) + " (" + std::to_string(number) + ")" +
         (number == FI_ENOMEM ? memory_limit_text(0) : std::string());
}

void throw_ofi(const Library& library, int rank, std::string_view what, long code) {
  const int number = static_cast<int>(code < 0 ? -code : code);
  std::string limit;
  if (number == FI_ENOMEM && what == "fi_mr_reg") limit = locked_memory_limit_text();
  // Providers have other words for it, too.
  if (!too_many_files(number)) limit += files_left_text();
  const bool exhausted = number == FI_ENOMEM || too_many_files(number) || !limit.empty();
  throw Error(exhausted ? ErrorKind::exhausted : ErrorKind::system,
              "rank " + std::to_string(rank) + ": " + std::string(what) + ": " +
                  error_text(library, code) + limit,
              {.rank = rank});
}

}  // namespace ferry::fabric::ofi
