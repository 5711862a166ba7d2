// Ordinary memory only: this build has no CUDA engine.
#include <cstring>
#include <stdexcept>

#include "device.hpp"

namespace ferry::conformance {
namespace {

void need_cpu(Device where) {
  if (where.kind != DeviceKind::cpu) throw std::runtime_error("this build has no CUDA engine");
}

}  // namespace

std::vector<std::size_t> free_gpu_bytes() {
  return {};
}
void use_device(Device where) {
  need_cpu(where);
}
int sms_of(Device where) {
  need_cpu(where);
  return 0;
}
std::size_t free_bytes(Device where) {
  need_cpu(where);
  return 0;
}
std::shared_ptr<void> allocate(std::size_t bytes, Device where) {
  need_cpu(where);
  return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
}
void copy_bytes(void* to, const void* from, std::size_t bytes, Device where) {
  need_cpu(where);
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void fill_bytes(void* data, int value, std::size_t bytes, Device where) {
  need_cpu(where);
  if (bytes > 0) std::memset(data, value, bytes);
}
std::shared_ptr<Stream> make_stream(Device where) {
  need_cpu(where);
  return std::make_shared<Stream>();
}

}  // namespace ferry::conformance
