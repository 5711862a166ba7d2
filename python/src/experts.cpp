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
      .def_prop_ro("digest", &ExpertPlacement::digest)
      .def("held_by", &ExpertPlacement::held_by, nb::arg("rank"))
      .def(
          "places",
          [](const ExpertPlacement& p, const View& topk_idx, int rank,
             const std::vector<bool>& masked) {
            return HeldTensor(p.places(topk_idx.read(), rank, masked));
          },
          nb::arg("topk_idx"), nb::arg("rank"), nb::arg("masked"));
  nb::class_<BatchBalancer>(m, "BatchBalancer")
      .def(nb::init<std::int64_t, int, int, int, std::int64_t, std::int64_t>(), nb::arg("experts"),
           nb::arg("ranks"), nb::arg("slots"), nb::arg("domain_size"), nb::arg("copy_rows"),
           nb::arg("max_rows"))
      .def_prop_ro("experts", &BatchBalancer::experts)
      .def_prop_ro("ranks", &BatchBalancer::ranks)
      .def_prop_ro("slots", &BatchBalancer::slots)
      .def_prop_ro("group_experts", &BatchBalancer::group_experts)
      .def("counts", [](const BatchBalancer& b,
                        const View& topk_idx) { return HeldTensor(b.counts(topk_idx.read())); })
      .def("invalidate", &BatchBalancer::invalidate)
      .def("plan",
           [](BatchBalancer& b, const View& counts, bool again) { b.plan(counts.read(), again); })
      .def_prop_ro("table", &BatchBalancer::table)
      .def_prop_ro("fetches", &BatchBalancer::fetches)
      .def("fetching", &BatchBalancer::fetching)
      .def("fetched", &BatchBalancer::fetched)
      .def_prop_ro("load", &BatchBalancer::load)
      .def_prop_ro("plan_id", &BatchBalancer::plan_id)
      .def("places", [](const BatchBalancer& b, const View& topk_idx,
                        int rank) { return HeldTensor(b.places(topk_idx.read(), rank)); })
      .def("shares", [](const BatchBalancer& b, int rank) { return HeldTensor(b.shares(rank)); });
}

}  // namespace ferry::python
