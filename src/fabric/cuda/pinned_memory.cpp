#include "fabric/cuda/pinned_memory.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fabric/cuda/driver.hpp"

namespace ferry::fabric {
namespace {

/// An allocation, and the number that the driver gave it: addresses are used again.
struct Pinned {
  std::byte* data = nullptr;
  unsigned long long id = 0;
};

unsigned long long id_of(const std::byte* data) {
  unsigned long long id = 0;  // of none: somebody has reset the GPU
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  (void)driver().cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
  return id;
}

/// Never destroyed: owners may end after everything else, and the driver frees all at the end.
/// Calls into the driver, which may wait for a kernel, are made without the lock: other threads may
/// be what that kernel waits for.
class Store {
 public:
  Pinned take(std::size_t bytes) {
    for (Pinned found = pop(bytes); found.data != nullptr; found = pop(bytes)) {
      if (id_of(found.data) == found.id) return found;
    }
    return allocate(bytes);
  }

  void give_back(const Pinned& pinned, std::size_t bytes) noexcept {
    try {
      const std::scoped_lock lock(mutex_);
      free_[bytes].push_back(pinned);
    } catch (...) {  // no memory to note it: it is lost
    }
  }

 private:
  Pinned pop(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    std::vector<Pinned>& free = free_[bytes];
    if (free.empty()) return {};
    const Pinned last = free.back();
    free.pop_back();
    return last;
  }

  Pinned allocate(std::size_t bytes) {
    CUdevice device = 0;
    check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
    retain(device);
    void* data = nullptr;
    check(
        driver().cuMemHostAlloc(&data, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc");
    return {static_cast<std::byte*>(data), id_of(static_cast<std::byte*>(data))};
  }

  /// The memory goes with its context, which therefore stays.
  void retain(CUdevice device) {
    {
      const std::scoped_lock lock(mutex_);
      if (!retained_.insert(device).second) return;
    }
    CUcontext context = nullptr;
    check(driver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<Pinned>> free_;  // by size
  std::set<CUdevice> retained_;
};

Store& store() {
  static Store* const one = new Store;
  return *one;
}

}  // namespace

std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t size = std::bit_ceil(std::max(bytes, kPage));  // few sizes, so used again
  const Pinned pinned = store().take(size);
  return {pinned.data, [pinned, size](std::byte*) { store().give_back(pinned, size); }};
}

}  // namespace ferry::fabric
