#include "ferry/experts.hpp"

#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

/// Where what a batch's plan says lies in the balancer's memory: table, fetches, load, plan_id.
std::vector<std::size_t> offsets_of(const GpuBalancer& b, std::uintptr_t memory) {
  std::vector<std::size_t> offsets;
  for (const ConstTensorView& part : {b.table(), b.fetches(), b.load(), b.plan_id()}) {
    offsets.push_back(reinterpret_cast<std::uintptr_t>(part.data) - memory);
  }
  return offsets;
}

/// Arrays of all calls are torch's, whose memory goes back in the order of the stream.
void bind_gpu_balancer(nb::module_& m) {
  nb::class_<GpuBalancer>(m, "GpuBalancer")
      .def_static("memory_bytes", &GpuBalancer::memory_bytes, nb::arg("experts"), nb::arg("ranks"),
                  nb::arg("slots"))
      .def(
          "__init__",
          [](GpuBalancer* self, std::int64_t experts, int ranks, int slots, int domain_size,
             std::int64_t copy_rows, std::int64_t max_rows, const View& memory,
             PythonStream& stream) {
            new (self) GpuBalancer(experts, ranks, slots, domain_size, copy_rows, max_rows,
                                   memory.write(), stream.stream());
          },
          nb::arg("experts"), nb::arg("ranks"), nb::arg("slots"), nb::arg("domain_size"),
          nb::arg("copy_rows"), nb::arg("max_rows"), nb::arg("memory"), nb::arg("stream"))
      .def_prop_ro("experts", &GpuBalancer::experts)
      .def_prop_ro("ranks", &GpuBalancer::ranks)
      .def_prop_ro("slots", &GpuBalancer::slots)
      .def_prop_ro("group_experts", &GpuBalancer::group_experts)
      .def("offsets", &offsets_of, nb::arg("memory"))
      .def("counts",
           [](const GpuBalancer& b, const View& topk_idx, const View& out, PythonStream& stream) {
             b.counts(topk_idx.read(), out.write(), stream.stream());
           })
      .def("invalidate", &GpuBalancer::invalidate)
      .def("plan", [](GpuBalancer& b, const View& counts, PythonStream& stream,
                      bool again) { b.plan(counts.read(), stream.stream(), again); })
      .def("fetching", &GpuBalancer::fetching)
      .def("fetched", [](GpuBalancer& b, PythonStream& stream) { b.fetched(stream.stream()); })
      .def("places", [](const GpuBalancer& b, const View& topk_idx, int rank, const View& out,
                        PythonStream& stream) {
        b.places(topk_idx.read(), rank, out.write(), stream.stream());
      });
}

}  // namespace

void bind_experts(nb::module_& m) {
  bind_gpu_balancer(m);
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
