// The extension module ferry._ferry. The package `ferry` wraps it; nothing else should use it.
#include "bind.hpp"
#include "ferry/version.hpp"
#include "gil.hpp"

NB_MODULE(_ferry, m) {
  namespace fp = ferry::python;
  m.doc() = "The C++ side of the package ferry: use the package, not this module.";
  nanobind::set_leak_warnings(false);  // objects that are alive at exit are no news to a user
  m.attr("version") = ferry::version().data();
  m.attr("has_cuda") = static_cast<bool>(FERRY_HAS_CUDA);
  fp::remember_main_thread();
  m.def("interpreter_ends", &fp::interpreter_ends,
        "The interpreter is about to end: ends the waits of all streams, for good.");
  fp::bind_error(m);
  fp::bind_dtype(m);
  fp::bind_tensor(m);
  fp::bind_stream(m);
  fp::bind_bootstrap(m);
  fp::bind_network(m);
  fp::bind_observe(m);
  fp::bind_ranged(m);
  fp::bind_plan(m);
  fp::bind_experts(m);
  fp::bind_group(m);
  fp::bind_latency(m);
  fp::bind_vault(m);
  fp::bind_collectives(m);
#if FERRY_HAS_COMMAND
  fp::bind_command(m);
#endif
}
