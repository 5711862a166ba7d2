#include "device.hpp"

#include <algorithm>

namespace ferry::conformance {
namespace {

/// Bytes from the first element to the end of the last one.
std::size_t span_bytes(const ConstTensorView& tensor) {
  if (tensor.shape.product() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < tensor.dims(); ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
  return static_cast<std::size_t>(last + 1) * size_of(tensor.dtype);
}

}  // namespace

Tensor to_device(const ConstTensorView& tensor, Device where) {
  if (where.kind == DeviceKind::cpu) {
    return {TensorView(const_cast<void*>(tensor.data), tensor.dtype, tensor.shape, tensor.strides,
                       where),
            nullptr};
  }
  const std::size_t bytes = span_bytes(tensor);
  auto memory = allocate(bytes, where);
  copy_bytes(memory.get(), tensor.data, bytes, where);
  return {TensorView(memory.get(), tensor.dtype, tensor.shape, tensor.strides, where), memory};
}

Tensor to_cpu(const Tensor& tensor) {
  const TensorView& view = tensor.view();
  if (view.device.kind == DeviceKind::cpu || view.data == nullptr) return tensor;
  auto memory = std::make_shared<std::vector<std::byte>>(std::max<std::size_t>(view.bytes(), 1));
  copy_bytes(memory->data(), view.data, view.bytes(), view.device);
  return {TensorView(memory->data(), view.dtype, view.shape), memory};
}

}  // namespace ferry::conformance
