#include "plan.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "repr.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

template <auto Method>
auto without_gil_call(const HeldPlan& plan) {
  return without_gil([&] { return (plan.get().*Method)(); });
}

std::string repr(const HeldPlan& plan) {
  return repr_of("Plan", [&] {
    return std::to_string(plan->tokens()) + " tokens, top-" + std::to_string(plan->topk());
  });
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<HeldPlan>(
      m, "Plan", nb::is_weak_referenceable(),
      "Where every row goes and what arrives. Cheap to keep: it owns no registered memory and "
      "serves any\nnumber of dispatches and combines of its group, with any hidden size and dtype. "
      "Raises `DestroyedError`\nafter the group is destroyed.\n\n"
      "The methods block until the counts are known when the plan was made on a stream.")
      .def_prop_ro(
          "tokens", [](const HeldPlan& p) { return p->tokens(); }, "Tokens of this rank.")
      .def_prop_ro(
          "topk", [](const HeldPlan& p) { return p->topk(); }, "Slots of a route.")
      .def("recv_rows", &without_gil_call<&Plan::recv_rows>,
           "Rows that this rank receives: one for each (token, this rank).")
      .def("recv_rows_per_rank", &without_gil_call<&Plan::recv_rows_per_rank>,
           "Rows from each source rank, [ranks].")
      .def("send_rows_per_rank", &without_gil_call<&Plan::send_rows_per_rank>,
           "Rows that this rank sends to each rank, [ranks].")
      .def(
          "rank_rows",
          [](const HeldPlan& p) { return to_python(without_gil_call<&Plan::rank_rows>(p)); },
          nb::sig("def rank_rows(self) -> Tensor"),
          "i32 [ranks, ranks], where the group's tensors lie: rows that rank s (row) sends to rank "
          "d, "
          "as a\ntensor that speaks DLPack. Only to be read. Of a plan on a CUDA stream nothing "
          "blocks: the "
          "numbers\ncome in the stream's order.")
      .def(
          "routes", [](const HeldPlan& p) { return to_python(without_gil_call<&Plan::routes>(p)); },
          nb::sig("def routes(self) -> Tensor"),
          "i32 [tokens, topk], this rank's own routes, as a tensor that speaks DLPack. Only to be "
          "read. In CPU\nmemory alone, as the next.")
      .def(
          "received_routes",
          [](const HeldPlan& p) { return to_python(without_gil_call<&Plan::received_routes>(p)); },
          nb::sig("def received_routes(self) -> Tensor"),
          "i32 [recv_rows, topk], local ids of the rows received, -1 = not here; after a dispatch "
          "with the plan.")
      .def("slots_per_expert", &without_gil_call<&Plan::slots_per_expert>,
           "Route slots that name each expert of this rank, [local experts].")
      .def(
          "expert_major_rows",
          [](const HeldPlan& p, std::int64_t alignment) {
            return without_gil([&] { return p->expert_major_rows(alignment); });
          },
          nb::arg("alignment") = 1,
          "Rows of the expert-major output when every expert's block is padded to `alignment`.")
      .def(
          "crossing",
          [](const HeldPlan& p) {
            const Crossing crossing = without_gil([&] { return p->crossing(); });
            return std::string(name_of(crossing));
          },
          "How tokens cross between domains where a dispatch says \"automatic\": \"direct\" or "
          "\"hierarchical\".")
      .def("__repr__", &repr);
}

}  // namespace ferry::python
