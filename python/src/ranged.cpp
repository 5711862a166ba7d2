// Calls that are ranges while torch's profiler runs (ferry/trace.py).
//
// A function of Python around each call, which looks for the profiler, takes 60 to 270 ns of every
// call: more than 0.1 % of a decode round. This callable looks from C and passes the arguments on
// as they lie.
#include "bind.hpp"

#include <structmember.h>  // after Python.h, which has what it names only from 3.12 on

#include <cstddef>

namespace ferry::python {
namespace {

namespace nb = nanobind;

struct Ranged {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* plain;   ///< the call
  PyObject* ranged;  ///< the same in a range; knows its keywords by earlier names, too
  PyObject* names;   ///< those names: a tuple
  PyObject* dict;
};

Ranged& as_ranged(PyObject* self) {
  return *reinterpret_cast<Ranged*>(self);
}

/// Of torch, if it is imported.
bool profiler_runs() {
  static PyObject* const name = PyUnicode_InternFromString("torch.autograd.profiler");
  static PyObject* const enabled = PyUnicode_InternFromString("_is_profiler_enabled");
  PyObject* const module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  return module != nullptr && PyModule_Check(module) &&
         PyDict_GetItemWithError(PyModule_GetDict(module), enabled) == Py_True;
}

bool has_earlier_name(const Ranged& call, PyObject* keywords) {
  const nb::error_scope kept;
  for (const nb::handle name : nb::borrow<nb::tuple>(call.names)) {
    if (PySequence_Contains(keywords, name.ptr()) == 1) return true;
  }
  return false;
}

PyObject* call_ranged(PyObject* self, PyObject* const* arguments, std::size_t count,
                      PyObject* keywords) {
  const Ranged& call = as_ranged(self);
  if (!profiler_runs()) {
    PyObject* const made = PyObject_Vectorcall(call.plain, arguments, count, keywords);
    if (made != nullptr || keywords == nullptr || !PyErr_ExceptionMatches(PyExc_TypeError) ||
        !has_earlier_name(call, keywords)) {
      return made;
    }
    PyErr_Clear();  // the call did not begin: it has no keyword of an earlier name
  }
  return PyObject_Vectorcall(call.ranged, arguments, count, keywords);
}

PyObject* bind_to(PyObject* self, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  static PyObject* const types = PyImport_ImportModule("types");
  static PyObject* const method = PyObject_GetAttrString(types, "MethodType");
  return PyObject_CallFunctionObjArgs(method, self, object, nullptr);
}

int visit_ranged(PyObject* self, visitproc visit, void* arg) {
  const Ranged& call = as_ranged(self);
  for (PyObject* one : {call.plain, call.ranged, call.names, call.dict}) Py_VISIT(one);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_ranged(PyObject* self) {
  Ranged& call = as_ranged(self);
  Py_CLEAR(call.plain);
  Py_CLEAR(call.ranged);
  Py_CLEAR(call.names);
  Py_CLEAR(call.dict);
  return 0;
}

void free_ranged(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_ranged(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyTypeObject* ranged_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Ranged, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Ranged, dict), READONLY, nullptr},
      {}};
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind_to)},
                                {Py_tp_traverse, reinterpret_cast<void*>(visit_ranged)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_ranged)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_ranged)},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {}};
  static PyType_Spec spec{"ferry._ferry.Ranged", sizeof(Ranged), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                              Py_TPFLAGS_METHOD_DESCRIPTOR,
                          slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  return reinterpret_cast<PyTypeObject*>(type);
}

nb::object ranged_call(nb::object plain, nb::object ranged, nb::tuple names) {
  const nb::object made = nb::steal(PyType_GenericAlloc(ranged_type(), 0));
  if (!made) throw nb::python_error();
  Ranged& call = as_ranged(made.ptr());
  call.vectorcall = call_ranged;
  call.plain = plain.release().ptr();
  call.ranged = ranged.release().ptr();
  call.names = names.release().ptr();
  return made;
}

}  // namespace

void bind_ranged(nb::module_& module) {
  module.def("ranged_call", &ranged_call, nb::arg("plain"), nb::arg("ranged"), nb::arg("names"),
             "Calls plain; while torch's profiler runs, and with keywords among names, ranged.");
}

}  // namespace ferry::python
