#include "tensor.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bind.hpp"
#include "ferry/error.hpp"
#include "plain_array.hpp"

namespace ferry::python {
namespace {

using Code = nb::dlpack::dtype_code;

nb::dlpack::dtype make_type(Code code, std::size_t bytes) {
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bytes * 8), 1};
}

[[noreturn]] void refuse(const std::string& name, const std::string& got,
                         const std::string& expected) {
  throw Error(ErrorKind::invalid_argument, name + ": got " + got + "; expected " + expected);
}

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::str(nb::type_name(object.type())));
}

std::string describe(nb::dlpack::dtype type) {
  const char* kind = "type code ";
  switch (static_cast<Code>(type.code)) {
    case Code::Int: kind = "int"; break;
    case Code::UInt: kind = "uint"; break;
    case Code::Float: kind = "float"; break;
    case Code::Bfloat: kind = "bfloat"; break;
    case Code::Complex: kind = "complex"; break;
    case Code::Bool: return "bool";
    default: return kind + std::to_string(type.code);
  }
  return kind + std::to_string(type.bits);
}

Dtype dtype_of(const nb::ndarray<nb::ro>& array, const std::string& name, std::optional<Dtype> tag,
               const std::string& expected) {
  const nb::dlpack::dtype type = array.dtype();
  const std::optional<Dtype> natural = natural_dtype(type);
  if (!tag) {
    if (natural) return *natural;
    if (!expected.empty()) refuse(name, "dtype " + describe(type), "dtype " + expected);
    const bool two_bytes = type == make_type(Code::UInt, 2);
    refuse(name, "dtype " + describe(type),
           two_bytes ? "dtype=\"bf16\" or dtype=\"f16\" beside a uint16 array, which cannot say it"
                     : "dtype f32, bf16, f16, e4m3, e5m2, i32, i64 or u8");
  }
  const bool carrier = type == make_type(Code::UInt, size_of(*tag));
  if (natural != tag && !carrier) {
    const std::size_t bits = 8 * size_of(*tag);
    refuse(name, "dtype " + describe(type),
           "dtype " + std::string(name_of(*tag)) +
               (bits <= 16 ? ", or uint" + std::to_string(bits) + " that carries it" : ""));
  }
  return *tag;
}

nb::ndarray<nb::ro> import_array(nb::handle array, const std::string& name, bool writable) {
  nb::ndarray<nb::ro> imported;
  if (!nb::try_cast(array, imported) || !imported.is_valid()) {
    refuse(name,
           "an object of type " + class_name(array) + " that gives no DLPack tensor or buffer",
           "a dense or strided array in CPU memory: a NumPy array or a torch CPU tensor");
  }
  nb::ndarray<> for_writing;
  if (writable && !nb::try_cast(array, for_writing)) {
    refuse(name, "a read-only array", "one that can be written");
  }
  if (imported.ndim() < 1 || imported.ndim() > static_cast<std::size_t>(Extents::kMaxDims)) {
    refuse(name, std::to_string(imported.ndim()) + " dimensions", "1 to 3");
  }
  return imported;
}

/// Where an array lies. Memory of the CPU that a GPU reaches, too, is memory of the CPU.
Device device_of(const nb::ndarray<nb::ro>& array, const std::string& name) {
  switch (array.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value: return {};
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value: return {DeviceKind::cuda, array.device_id()};
    default: break;
  }
  refuse(name, "a tensor on DLPack device type " + std::to_string(array.device_type()),
         "one in CPU memory or on a CUDA GPU");
}

/// Without a framework: a DLPack capsule.
template <class... Framework>
nb::object export_tensor(const HeldTensor& held, nb::dlpack::dtype type) {
  const Tensor& tensor = held.get();
  nb::capsule owner(new HeldTensor(tensor),
                    [](void* pointer) noexcept { delete static_cast<HeldTensor*>(pointer); });
  std::vector<std::size_t> shape(tensor.shape().begin(), tensor.shape().end());
  std::vector<std::int64_t> strides(tensor.view().strides.begin(), tensor.view().strides.end());
  const Device device = tensor.view().device;
  const bool cpu = device.kind == DeviceKind::cpu;
  nb::ndarray<Framework...> array(tensor.data(), shape.size(), shape.data(), owner, strides.data(),
                                  type, cpu ? nb::device::cpu::value : nb::device::cuda::value,
                                  device.index);
  return nb::cast(array);
}

/// fp8 crosses as uint8: not every version of every framework reads DLPack's fp8 codes.
nb::dlpack::dtype crossing_type(Dtype dtype, bool has_bf16) {
  switch (dtype) {
    case Dtype::f32: return make_type(Code::Float, 4);
    case Dtype::f16: return make_type(Code::Float, 2);
    case Dtype::bf16: return make_type(has_bf16 ? Code::Bfloat : Code::UInt, 2);
    case Dtype::i32: return make_type(Code::Int, 4);
    case Dtype::i64: return make_type(Code::Int, 8);
    case Dtype::e4m3:
    case Dtype::e5m2:
    case Dtype::u8: break;
  }
  return make_type(Code::UInt, 1);
}

}  // namespace

std::optional<Dtype> natural_dtype(nb::dlpack::dtype type) {
  if (type.lanes != 1) return std::nullopt;
  for (Dtype dtype : {Dtype::f32, Dtype::f16}) {
    if (type == make_type(Code::Float, size_of(dtype))) return dtype;
  }
  if (type == make_type(Code::Bfloat, 2)) return Dtype::bf16;
  if (type == make_type(Code::Int, 4)) return Dtype::i32;
  if (type == make_type(Code::Int, 8)) return Dtype::i64;
  if (type == make_type(Code::UInt, 1)) return Dtype::u8;
  if (type == make_type(Code::Float8_E4M3FN, 1)) return Dtype::e4m3;
  if (type == make_type(Code::Float8_E5M2, 1)) return Dtype::e5m2;
  return std::nullopt;
}

View::View(nb::handle array, const std::string& name, std::optional<Dtype> dtype, bool writable,
           const std::string& expected)
    : array_(import_array(array, name, writable)) {
  const std::size_t dims = array_.ndim();
  view_ = ConstTensorView(array_.data(), dtype_of(array_, name, dtype, expected),
                          Extents(std::span(array_.shape_ptr(), dims)),
                          Extents(std::span(array_.stride_ptr(), dims)), device_of(array_, name));
}

View::View(nb::object owner, const std::string& name, const ConstTensorView& view, bool ordered)
    : owner_(std::move(owner)), view_(view), ordered_(ordered) {
  if (view.dims() < 1) refuse(name, "0 dimensions", "1 to 3");
}

TensorView View::write() const {
  return {const_cast<void*>(view_.data), view_.dtype, view_.shape, view_.strides, view_.device};
}

std::optional<HeldTensor> to_python(const Tensor& tensor) {
  return tensor ? std::optional<HeldTensor>(std::in_place, tensor) : std::nullopt;
}

std::optional<ConstTensorView> optional_read(const View* view) {
  return view ? std::optional(view->read()) : std::nullopt;
}

std::optional<TensorView> optional_write(const View* view) {
  return view ? std::optional(view->write()) : std::nullopt;
}

void bind_tensor(nb::module_& m) {
  nb::class_<View>(m, "View", "A caller's array as Ferry reads it; keeps its memory alive.")
      .def(
          "__init__",
          [](View* self, nb::handle array, const std::string& name, std::optional<Dtype> dtype,
             bool writable, const std::string& expected) {
            new (self) View(array, name, dtype, writable, expected);
          },
          nb::arg("array").none(), nb::arg("name"), nb::arg("dtype") = nb::none(),
          nb::arg("writable") = false, nb::arg("expected") = "")
      .def_static(
          "of_gpu",
          [](nb::object owner, const std::string& name, std::uintptr_t address,
             const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
             Dtype dtype, int device, bool ordered) {
            if (shape.size() > static_cast<std::size_t>(Extents::kMaxDims)) {
              refuse(name, std::to_string(shape.size()) + " dimensions", "1 to 3");
            }
            return View(std::move(owner), name,
                        ConstTensorView(reinterpret_cast<const void*>(address), dtype,
                                        Extents(std::span(shape)), Extents(std::span(strides)),
                                        Device{DeviceKind::cuda, device}),
                        ordered);
          },
          nb::arg("owner"), nb::arg("name"), nb::arg("address"), nb::arg("shape"),
          nb::arg("strides"), nb::arg("dtype"), nb::arg("device"), nb::arg("ordered"),
          "Memory of `owner` on a GPU. `ordered`: it goes back in the order of the call's stream.")
      .def_static(
          "of_elements",
          [](nb::object owner, const std::string& name, std::uintptr_t address,
             std::int64_t elements, Dtype dtype) {
            return View(std::move(owner), name,
                        ConstTensorView(reinterpret_cast<const void*>(address), dtype, {elements}),
                        false);
          },
          nb::arg("owner"), nb::arg("name"), nb::arg("address"), nb::arg("elements"),
          nb::arg("dtype"), "Memory of `owner` in CPU memory, one behind the other.")
      .def_static(
          "of_torch",
          [](nb::object value, const std::string& name, bool writable) -> std::optional<View> {
            auto plain = plain_torch(value, writable, TorchShape::own);
            if (!plain) return std::nullopt;
            return View(std::move(plain->owner), name, plain->view, false);
          },
          nb::arg("value").none(), nb::arg("name"), nb::arg("writable"),
          "A plain torch tensor in CPU memory; None: something else.")
      .def_prop_ro("dtype", &View::dtype)
      .def_prop_ro(
          "gpu",
          [](const View& v) -> std::optional<int> {
            const Device device = v.read().device;
            return device.kind == DeviceKind::cuda ? std::optional(device.index) : std::nullopt;
          },
          "Ordinal of the GPU that holds it; None: CPU memory.")
      .def_prop_ro("address",
                   [](const View& v) { return reinterpret_cast<std::uintptr_t>(v.read().data); });

  nb::class_<HeldTensor>(m, "Tensor", "Memory that Ferry made; arrays made from it share it.")
      .def_prop_ro("dtype", [](const HeldTensor& t) { return t->dtype(); })
      .def_prop_ro(
          "shape",
          [](const HeldTensor& t) {
            nb::list shape;
            for (std::int64_t extent : t->shape()) shape.append(extent);
            return nb::tuple(shape);
          },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "gpu",
          [](const HeldTensor& t) -> std::optional<int> {
            const Device device = t->view().device;
            return device.kind == DeviceKind::cuda ? std::optional(device.index) : std::nullopt;
          },
          "Ordinal of the GPU that holds it; None: CPU memory.")
      .def_prop_ro("address",
                   [](const HeldTensor& t) { return reinterpret_cast<std::uintptr_t>(t->data()); })
      .def(
          "numpy",
          [](const HeldTensor& t) {
            return export_tensor<nb::numpy>(t, crossing_type(t->dtype(), false));
          },
          nb::sig("def numpy(self) -> typing.Any"),
          "A NumPy array of this memory; bf16 as uint16, fp8 as uint8.")
      .def(
          "torch",
          [](const HeldTensor& t) {
            return export_tensor<nb::pytorch>(t, crossing_type(t->dtype(), true));
          },
          nb::sig("def torch(self) -> typing.Any"), "A torch tensor of this memory; fp8 as uint8.")
      .def(
          "cupy",
          [](const HeldTensor& t) {
            return export_tensor<nb::cupy>(t, crossing_type(t->dtype(), false));
          },
          nb::sig("def cupy(self) -> typing.Any"),
          "A CuPy array of this memory; bf16 as uint16, fp8 as uint8.")
      .def(
          "__dlpack__",
          [](const HeldTensor& t, const nb::kwargs&) {
            return export_tensor<>(t, crossing_type(t->dtype(), true));
          },
          nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing.Any"),
          "For from_dlpack of any framework; fp8 as uint8. The caller orders the streams.")
      .def(
          "__dlpack_device__",
          [](const HeldTensor& t) {
            const Device device = t->view().device;
            const bool cpu = device.kind == DeviceKind::cpu;
            return nb::make_tuple(cpu ? nb::device::cpu::value : nb::device::cuda::value,
                                  device.index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def(
          "dlpack",
          [](const HeldTensor& t) { return export_tensor<>(t, crossing_type(t->dtype(), true)); },
          nb::sig("def dlpack(self) -> typing.Any"),
          "A DLPack capsule of this memory, without a word about streams; fp8 as uint8.");

  m.def(
      "set_storage",
      [](std::uintptr_t storage, std::size_t resizable_at, std::size_t allocator_at,
         std::uintptr_t allocator) {
        auto* fields = reinterpret_cast<std::byte*>(storage);
        std::memcpy(fields + allocator_at, &allocator, sizeof(allocator));
        fields[resizable_at] = std::byte{1};
      },
      nb::arg("storage"), nb::arg("resizable_at"), nb::arg("allocator_at"), nb::arg("allocator"),
      "Of a storage of torch at that address; ferry/torch_storage.py finds the offsets.");
}

}  // namespace ferry::python
