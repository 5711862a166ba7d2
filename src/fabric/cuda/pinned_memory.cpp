#include "fabric/cuda/pinned_memory.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fabric/cuda/driver.hpp"

namespace ferry::fabric {
namespace {

/// Never destroyed: owners may end after everything else, and the driver frees all at the end.
class Store {
 public:
  std::byte* take(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    std::vector<std::byte*>& free = free_[bytes];
    while (!free.empty()) {
      std::byte* data = free.back();
      free.pop_back();
      if (is_known(data)) return data;
    }
    return allocate(bytes);
  }

  void give_back(std::byte* data, std::size_t bytes) noexcept {
    try {
      const std::scoped_lock lock(mutex_);
      free_[bytes].push_back(data);
    } catch (...) {  // no memory to note it: it is lost
    }
  }

 private:
  /// False: somebody has reset the GPU.
  static bool is_known(std::byte* data) {
    unsigned type = 0;
    return driver().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                          reinterpret_cast<CUdeviceptr>(data)) == CUDA_SUCCESS;
  }

  std::byte* allocate(std::size_t bytes) {
    CUdevice device = 0;
    check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
    if (!retained_.contains(device)) {  // the memory goes with its context
      CUcontext context = nullptr;
      check(driver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
      retained_.insert(device);
    }
    void* data = nullptr;
    check(
        driver().cuMemHostAlloc(&data, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc");
    return static_cast<std::byte*>(data);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;  // by size
  std::set<CUdevice> retained_;
};

Store& store() {
  static Store* const one = new Store;
  return *one;
}

}  // namespace

std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  std::byte* data = store().take(size);
  return {data, [size](std::byte* back) { store().give_back(back, size); }};
}

}  // namespace ferry::fabric
