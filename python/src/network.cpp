#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bind.hpp"
#include "ferry/network.hpp"

namespace ferry::python {

namespace nb = nanobind;

void bind_network(nb::module_& m) {
  nb::enum_<Crossing>(m, "Crossing")
      .value("automatic", Crossing::automatic)
      .value("direct", Crossing::direct)
      .value("hierarchical", Crossing::hierarchical);
  nb::class_<NetworkStats>(m, "NetworkStats", "What a rank has sent to ranks of other domains.")
      .def_ro("put_bytes", &NetworkStats::put_bytes,
              "Rows and what travels beside them, and messages of calls.")
      .def_ro("puts", &NetworkStats::puts, "Writes that carried them.")
      .def_ro("signals", &NetworkStats::signals, "8-byte flags, which are not in `put_bytes`.")
      .def("__repr__", [](const NetworkStats& u) {
        return "NetworkStats(put_bytes=" + std::to_string(u.put_bytes) +
               ", puts=" + std::to_string(u.puts) + ", signals=" + std::to_string(u.signals) + ")";
      });
  nb::class_<NicStats>(m, "NicStats", "A NIC of a rank, and what it has carried.")
      .def_ro("name", &NicStats::name, "\"eth0\", \"mlx5_0\".")
      .def_ro("address", &NicStats::address,
              "In numbers; empty where the provider has addresses of its own.")
      .def_ro("why", &NicStats::why, "Where it is, as seen from this rank.")
      .def_ro("bytes", &NicStats::bytes, "Of rows and what travels beside them, sent so far.")
      .def("__repr__", [](const NicStats& u) {
        return "NicStats(name='" + u.name + "', address='" + u.address + "', why=\"" + u.why +
               "\", bytes=" + std::to_string(u.bytes) + ")";
      });
}

}  // namespace ferry::python
