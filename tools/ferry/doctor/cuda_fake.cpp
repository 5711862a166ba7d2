// Stands in for libcuda.so.1 and libnvidia-ml.so.1 in doctor_test.py: two slices of one GPU in MIG
// mode, or with FAKE_SLICES=0 such a GPU of which this process has no slice.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#define FERRY_FAKE extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kFakeMajor = 75, kFakeMinor = 76;

int slices() {
  const char* told = std::getenv("FAKE_SLICES");
  return told != nullptr && std::string_view(told) == "0" ? 0 : 2;
}

}  // namespace

FERRY_FAKE cuInit(unsigned) {
  return slices() > 0 ? 0 : 100;  // CUDA_ERROR_NO_DEVICE
}
FERRY_FAKE cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
FERRY_FAKE cuDeviceGetCount(int* count) {
  *count = slices();
  return 0;
}
FERRY_FAKE cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
FERRY_FAKE cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<std::size_t>(length), "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
  return 0;
}
FERRY_FAKE cuDeviceGetPCIBusId(char* bus, int length, int) {
  std::snprintf(bus, static_cast<std::size_t>(length), "0000:01:00.0");
  return 0;
}
FERRY_FAKE cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = std::size_t{40} << 30;
  return 0;
}
FERRY_FAKE cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kFakeMajor ? 9 : attribute == kFakeMinor ? 0 : 1;
  return 0;
}
FERRY_FAKE cuDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
FERRY_FAKE nvmlInit_v2() {
  return 0;
}
FERRY_FAKE nvmlShutdown() {
  return 0;
}
FERRY_FAKE nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return 0;
}
FERRY_FAKE nvmlDeviceGetHandleByIndex_v2(unsigned, void** gpu) {
  *gpu = gpu;
  return 0;
}
FERRY_FAKE nvmlDeviceGetMigMode(void*, unsigned* now, unsigned* later) {
  *now = *later = 1;
  return 0;
}
