#include "plain_array.hpp"

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "tensor.hpp"

namespace ferry::python {
namespace {

/// DLPackExchangeAPI of DLPack 1.3, as far as it is used here.
struct ExchangeTable {
  std::uint32_t major, minor;
  ExchangeTable* older;
  void* unused[3];
  int (*view)(PyObject* tensor, nb::dlpack::dltensor* out);
};

/// What is asked of torch in each call. Made once and never dropped: the interpreter's end comes
/// before that of this library.
struct Torch {
  PyTypeObject* tensor;
  const ExchangeTable* table;
  PyObject* requires_grad;                                             // a name
  PyObject *is_neg, *untyped_storage, *storage_offset, *is_inference;  // methods
  PyObject* count_version;                                             // of a tuple of tensors
};

/// What tells autograd that tensors of a tuple are written over. torch's public function is one of
/// Python around another one, which is taken where it takes the same.
nb::object version_counter(const nb::object& torch) {
  try {
    nb::object inner = torch.attr("_C").attr("_increment_version");
    inner(nb::make_tuple());
    return inner;
  } catch (const nb::python_error&) {
  }
  return torch.attr("autograd").attr("graph").attr("increment_version");
}

/// The module, if `type` is its class of this name and it was imported.
nb::object module_of(PyTypeObject* type, const char* module, const char* name) {
  const nb::object own_name = nb::steal(PyType_GetName(type));
  if (PyUnicode_CompareWithASCIIString(own_name.ptr(), name) != 0) return {};
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains(module)) return {};
  nb::object found = modules[module];
  const nb::object there = nb::getattr(found, name, nb::none());
  return there.ptr() == reinterpret_cast<PyObject*>(type) ? found : nb::object();
}

const Torch* find_torch(PyTypeObject* type) {
  static const Torch* found = nullptr;
  static bool absent = false;
  if (found != nullptr || absent) return found;
  const nb::object torch = module_of(type, "torch", "Tensor");
  if (!torch) return nullptr;
  absent = true;
  const nb::object capsule =
      nb::getattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->major != 1) return nullptr;
  const auto method = [&](const char* name) {
    return nb::object(torch.attr("Tensor").attr(name)).release().ptr();
  };
  found = new Torch{type,
                    table,
                    PyUnicode_InternFromString("requires_grad"),
                    method("is_neg"),
                    method("untyped_storage"),
                    method("storage_offset"),
                    method("is_inference"),
                    version_counter(torch).release().ptr()};
  return found;
}

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

/// With one argument.
PyObject* call_one(PyObject* function, nb::handle argument) {
  PyObject* arguments[] = {nullptr, argument.ptr()};  // the first place is the callee's to write to
  constexpr auto kOne = 1 | PY_VECTORCALL_ARGUMENTS_OFFSET;
  return PyObject_Vectorcall(function, arguments + 1, kOne, nullptr);
}

nb::object answer(PyObject* method, nb::handle value) {
  return checked(call_one(method, value));
}

void count_version(const Torch& torch, nb::handle value) {
  const nb::object one = nb::make_tuple(value);
  if (nb::steal(call_one(torch.count_version, one))) return;
  const nb::python_error error;
  // These have no count.
  if (answer(torch.is_inference, value).ptr() != Py_True) throw error;
}

bool is_dense(const nb::dlpack::dltensor& tensor) {
  std::int64_t step = 1;
  for (int d = tensor.ndim - 1; d >= 0 && tensor.strides != nullptr; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != step) return false;
    step *= tensor.shape[d];
  }
  return true;
}

bool is_numpy_array(PyTypeObject* type) {
  static PyTypeObject* found = nullptr;
  if (found == nullptr && module_of(type, "numpy", "ndarray")) found = type;
  return type == found;
}

/// By the letters of Python's module struct.
std::optional<Dtype> buffer_dtype(const Py_buffer& buffer) {
  if (buffer.format == nullptr || std::strlen(buffer.format) != 1) return std::nullopt;
  switch (buffer.format[0]) {
    case 'B': return Dtype::u8;
    case 'e': return Dtype::f16;
    case 'f': return Dtype::f32;
    case 'i':
    case 'l':
    case 'q': return buffer.itemsize == 4 ? Dtype::i32 : Dtype::i64;
    default: return std::nullopt;
  }
}

std::optional<PlainArray> plain_numpy(nb::handle value, bool writable) {
  if (!is_numpy_array(Py_TYPE(value.ptr()))) return std::nullopt;
  Py_buffer buffer;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(value.ptr(), &buffer, flags) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::optional<PlainArray> plain;
  if (const std::optional<Dtype> dtype = buffer_dtype(buffer)) {
    plain = {{buffer.buf, *dtype, {buffer.len / buffer.itemsize}}, nb::borrow(value)};
  }
  PyBuffer_Release(&buffer);  // the array keeps its memory
  return plain;
}

}  // namespace

std::optional<PlainArray> plain_torch(nb::handle value, bool writable, TorchShape shape) {
  const Torch* torch = find_torch(Py_TYPE(value.ptr()));
  if (torch == nullptr || Py_TYPE(value.ptr()) != torch->tensor) return std::nullopt;
  nb::dlpack::dltensor tensor{};
  if (torch->table->view(value.ptr(), &tensor) != 0) {  // sparse, say
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<Dtype> dtype = natural_dtype(tensor.dtype);
  if (!dtype || tensor.device.device_type != nb::device::cpu::value || !is_dense(tensor)) {
    return std::nullopt;
  }
  if (checked(PyObject_GetAttr(value.ptr(), torch->requires_grad)).ptr() != Py_False ||
      answer(torch->is_neg, value).ptr() != Py_False) {
    return std::nullopt;
  }
  const auto dims = static_cast<std::size_t>(tensor.ndim);
  const bool fits = dims >= 1 && dims <= static_cast<std::size_t>(Extents::kMaxDims);
  if (shape == TorchShape::own && !fits) return std::nullopt;
  const std::span<const std::int64_t> extents(tensor.shape, dims);
  std::int64_t elements = 1;
  for (const std::int64_t extent : extents) elements *= extent;
  nb::object storage = answer(torch->untyped_storage, value);
  // Of a storage that was resized the tensor still says that it has elements.
  const auto held = static_cast<std::int64_t>(nb::len(storage) / size_of(*dtype));
  const auto first = nb::cast<std::int64_t>(answer(torch->storage_offset, value));
  if (elements > 0 && held < first + elements) return std::nullopt;
  if (writable) count_version(*torch, value);
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const TensorView view = shape == TorchShape::own ? TensorView(data, *dtype, Extents(extents))
                                                   : TensorView(data, *dtype, {elements});
  return PlainArray{view, std::move(storage)};
}

std::optional<PlainArray> plain_array(nb::handle value, bool writable) {
  std::optional<PlainArray> plain = plain_torch(value, writable);
  return plain ? std::move(plain) : plain_numpy(value, writable);
}

}  // namespace ferry::python
