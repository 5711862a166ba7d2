#include "torch_view.hpp"

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
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
  PyObject *strided, *increment_version;
  PyObject *layout, *requires_grad, *is_neg, *is_inference;  // names
  PyObject *untyped_storage, *nbytes, *storage_offset;       // names
};

const Torch* find(PyTypeObject* type) {
  static const Torch* found = nullptr;
  static bool absent = false;
  if (found != nullptr || absent) return found;
  const nb::object class_name = nb::steal(PyType_GetName(type));
  if (PyUnicode_CompareWithASCIIString(class_name.ptr(), "Tensor") != 0) return nullptr;
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch")) return nullptr;
  const nb::object torch = modules["torch"];
  if (nb::getattr(torch, "Tensor", nb::none()).ptr() != reinterpret_cast<PyObject*>(type)) {
    return nullptr;
  }
  absent = true;
  const nb::object capsule =
      nb::getattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->major != 1) return nullptr;
  nb::object increment = torch.attr("autograd").attr("graph").attr("increment_version");
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  found = new Torch{type,
                    table,
                    nb::object(torch.attr("strided")).release().ptr(),
                    increment.release().ptr(),
                    name("layout"),
                    name("requires_grad"),
                    name("is_neg"),
                    name("is_inference"),
                    name("untyped_storage"),
                    name("nbytes"),
                    name("storage_offset")};
  return found;
}

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

bool is(nb::handle value, PyObject* name, PyObject* expected) {
  return checked(PyObject_GetAttr(value.ptr(), name)).ptr() == expected;
}

// Calls of the stable ABI; the first place is the callee's to write to.
nb::object answer(nb::handle value, PyObject* name) {
  PyObject* arguments[] = {nullptr, value.ptr()};
  constexpr auto kOne = 1 | PY_VECTORCALL_ARGUMENTS_OFFSET;
  return checked(PyObject_VectorcallMethod(name, arguments + 1, kOne, nullptr));
}

bool answers_yes(nb::handle value, PyObject* name) {
  return answer(value, name).ptr() == Py_True;
}

std::int64_t number(nb::handle value, PyObject* name) {
  return nb::cast<std::int64_t>(answer(value, name));
}

void call_with(PyObject* function, nb::handle value) {
  PyObject* arguments[] = {nullptr, value.ptr()};
  checked(
      PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

bool is_dense(const nb::dlpack::dltensor& tensor) {
  std::int64_t step = 1;
  for (int d = tensor.ndim - 1; d >= 0 && tensor.strides != nullptr; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != step) return false;
    step *= tensor.shape[d];
  }
  return true;
}

}  // namespace

std::optional<TorchMemory> plain_torch(nb::handle value, bool writable, TorchShape shape) {
  const Torch* torch = find(Py_TYPE(value.ptr()));
  if (torch == nullptr || Py_TYPE(value.ptr()) != torch->tensor) return std::nullopt;
  if (!is(value, torch->layout, torch->strided)) return std::nullopt;
  nb::dlpack::dltensor tensor{};
  if (torch->table->view(value.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<Dtype> dtype = natural_dtype(tensor.dtype);
  if (!dtype || tensor.device.device_type != nb::device::cpu::value || !is_dense(tensor)) {
    return std::nullopt;
  }
  if (!is(value, torch->requires_grad, Py_False) || answers_yes(value, torch->is_neg)) {
    return std::nullopt;
  }
  const auto dims = static_cast<std::size_t>(tensor.ndim);
  const bool fits = dims >= 1 && dims <= static_cast<std::size_t>(Extents::kMaxDims);
  if (shape == TorchShape::own && !fits) return std::nullopt;
  const std::span<const std::int64_t> extents(tensor.shape, dims);
  std::int64_t elements = 1;
  for (const std::int64_t extent : extents) elements *= extent;
  nb::object storage = answer(value, torch->untyped_storage);
  // Of a storage that was resized the tensor still says that it has elements.
  const std::int64_t held =
      number(storage, torch->nbytes) / static_cast<std::int64_t>(size_of(*dtype));
  if (elements > 0 && held < number(value, torch->storage_offset) + elements) return std::nullopt;
  if (writable && !answers_yes(value, torch->is_inference)) {
    call_with(torch->increment_version, value);
  }
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const TensorView view = shape == TorchShape::own ? TensorView(data, *dtype, Extents(extents))
                                                   : TensorView(data, *dtype, {elements});
  return TorchMemory{view, std::move(storage)};
}

}  // namespace ferry::python
