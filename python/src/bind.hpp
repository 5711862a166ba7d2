// One function for each public header, and for ranges of profilers; module.cpp calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace ferry::python {

void bind_command(nanobind::module_& module);
void bind_error(nanobind::module_& module);
void bind_dtype(nanobind::module_& module);
void bind_tensor(nanobind::module_& module);
void bind_stream(nanobind::module_& module);
void bind_bootstrap(nanobind::module_& module);
void bind_network(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_group(nanobind::module_& module);
void bind_latency(nanobind::module_& module);
void bind_collectives(nanobind::module_& module);
void bind_observe(nanobind::module_& module);
void bind_ranged(nanobind::module_& module);
void bind_vault(nanobind::module_& module);

}  // namespace ferry::python
