// ferry::Error becomes the exception class of its kind in ferry/errors.py.
#include "ferry/error.hpp"

#include <nanobind/nanobind.h>

#include <string_view>

#include "bind.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

/// `ferry.errors.make(kind, message, ...)` returns the exception to raise.
void raise_in_python(const Error& error) {
  const ErrorContext& context = error.context();
  const std::string_view what = error.what();
  const nb::object message = nb::steal(  // which may name a file in other bytes than UTF-8
      PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "replace"));
  nb::object made =
      nb::module_::import_("ferry.errors")
          .attr("make")(name_of(error.kind()), message, context.rank, context.peer,
                        context.stage.c_str(), context.generation, context.expected, context.seen);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

}  // namespace

void bind_error(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      try {
        raise_in_python(error);
      } catch (nb::python_error& broken) {
        broken.restore();
      }
    }
  });
}

}  // namespace ferry::python
