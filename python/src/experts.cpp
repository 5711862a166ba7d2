#include "ferry/experts.hpp"

#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "tensor.hpp"

namespace ferry::python {

void bind_experts(nb::module_& m) {
  nb::class_<ExpertPlacement>(m, "ExpertPlacement")
      .def(nb::init<std::int64_t, int, int>(), nb::arg("experts"), nb::arg("ranks"),
           nb::arg("slots"))
      .def_prop_ro("experts", &ExpertPlacement::experts)
      .def_prop_ro("ranks", &ExpertPlacement::ranks)
      .def_prop_ro("slots", &ExpertPlacement::slots)
      .def(
          "balance",
          [](ExpertPlacement& p, const std::vector<int>& ranks, const std::vector<double>& load,
             int copies) { p.balance(ranks, load, copies); },
          nb::arg("ranks"), nb::arg("load"), nb::arg("copies"))
      .def("held_by", &ExpertPlacement::held_by, nb::arg("rank"))
      .def(
          "places",
          [](const ExpertPlacement& p, const View& topk_idx, int rank) {
            return HeldTensor(p.places(topk_idx.read(), rank));
          },
          nb::arg("topk_idx"), nb::arg("rank"));
}

}  // namespace ferry::python
