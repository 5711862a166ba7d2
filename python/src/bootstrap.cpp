#include "bootstrap.hpp"

#include <nanobind/stl/string.h>

#include <vector>

#include "arguments.hpp"
#include "bind.hpp"
#include "group.hpp"
#include "repr.hpp"

namespace ferry::python {
namespace {

using Bytes = std::vector<std::byte>;

nb::bytes to_bytes(std::span<const std::byte> data) {
  return nb::bytes(data.data(), data.size());
}

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

[[noreturn]] void refuse_result(const std::string& got, int size) {
  throw Error(ErrorKind::invalid_argument, "from_all_gather: fn returned " + got +
                                               "; expected a list of " + std::to_string(size) +
                                               " bytes objects, one for each rank");
}

/// Calls the Python function `fn(bytes) -> list[bytes]`, from any thread of Python's.
std::vector<Bytes> call_all_gather(const PythonCallable& fn, int size,
                                   std::span<const std::byte> mine) {
  nb::gil_scoped_acquire gil;
  const nb::object result = fn.get()(to_bytes(mine));
  if (!nb::isinstance<nb::sequence>(result)) {
    refuse_result("an object of type " + nb::cast<std::string>(nb::type_name(result.type())), size);
  }
  const std::size_t count = nb::len(result);
  if (count != static_cast<std::size_t>(size)) {
    refuse_result(std::to_string(count) + " elements", size);
  }
  std::vector<Bytes> all;
  for (nb::handle item : result) {
    if (!PyBytes_Check(item.ptr())) {
      refuse_result("an element of type " + nb::cast<std::string>(nb::type_name(item.type())),
                    size);
    }
    const auto data = span_of(nb::borrow<nb::bytes>(item));
    all.emplace_back(data.begin(), data.end());
  }
  return all;
}

HeldBootstrap connect(TcpOptions options, double deadline) {
  options.deadline = to_nanoseconds(deadline, "deadline");
  options.on_wait = python_on_wait();
  return HeldBootstrap(without_gil([&] { return tcp_bootstrap(options); }));
}

HeldBootstrap tcp(int rank, int size, const std::string& address, std::uint16_t port,
                  const std::string& secret, double deadline, bool join, bool begin) {
  TcpOptions options;
  options.join = join;
  options.begin = begin;
  options.rank = rank;
  options.size = size;
  options.address = address;
  options.port = port;
  options.secret = secret;
  return connect(std::move(options), deadline);
}

/// `job_key`: returns bytes, from any thread of Python's.
HeldBootstrap from_all_gather(int rank, int size, nb::object fn, const std::string& own_address,
                              const std::string& job, nb::object job_key, bool join, bool begin) {
  PythonCallable callable(std::move(fn)), key(std::move(job_key));
  return HeldBootstrap(
      custom_bootstrap(rank, size,
                       [callable = std::move(callable), size](std::span<const std::byte> mine) {
                         return call_all_gather(callable, size, mine);
                       },
                       own_address,
                       {.name = job,
                        .key =
                            [key = std::move(key)] {
                              nb::gil_scoped_acquire gil;
                              const nb::bytes bytes = nb::cast<nb::bytes>(key.get()());
                              return std::string(bytes.c_str(), bytes.size());
                            },
                        .join = join,
                        .begin = begin}));
}

nb::list threads(int ranks) {
  nb::list list;
  for (auto& bootstrap : thread_bootstrap(ranks)) {
    list.append(nb::cast(HeldBootstrap(std::move(bootstrap))));
  }
  return list;
}

nb::list all_gather(const HeldBootstrap& bootstrap, const nb::bytes& mine, double deadline) {
  const auto limit = to_nanoseconds(deadline, "deadline");
  const auto data = span_of(mine);
  const std::vector<Bytes> all =
      without_gil([&] { return bootstrap.get()->all_gather(data, limit, python_on_wait()); });
  nb::list list;
  for (const Bytes& bytes : all) list.append(to_bytes(bytes));
  return list;
}

std::string repr(const HeldBootstrap& bootstrap) {
  return repr_of("Bootstrap", [&] {
    return "rank " + std::to_string(bootstrap.get()->rank()) + " of " +
           std::to_string(bootstrap.get()->size());
  });
}

}  // namespace

void bind_bootstrap(nb::module_& m) {
  nb::class_<HeldBootstrap>(m, "Bootstrap", "How the ranks of a group find each other.")
      .def_prop_ro("rank", [](const HeldBootstrap& b) { return b.get()->rank(); })
      .def_prop_ro("size", [](const HeldBootstrap& b) { return b.get()->size(); })
      .def_prop_ro(
          "joins", [](const HeldBootstrap& b) { return b.get()->joins(); },
          "Whether this process takes the place of a rank that is not there, in a group that runs.")
      .def_prop_ro(
          "begins", [](const HeldBootstrap& b) { return b.get()->begins(); },
          "Whether this process begins a group alone, which the others join.")
      .def("all_gather", &all_gather, nb::arg("mine"), nb::arg("deadline") = 60.0,
           nb::sig("def all_gather(self, mine: bytes, deadline: float = 60.0) -> list[bytes]"),
           "Collective: every rank gets the bytes of all ranks, in rank order.")
      .def("__repr__", &repr);
  m.def("threads", &threads, nb::arg("ranks"),
        nb::sig("def threads(ranks: int) -> list[Bootstrap]"));
  m.def("tcp", &tcp, nb::arg("rank"), nb::arg("size"), nb::arg("address"), nb::arg("port"),
        nb::arg("secret"), nb::arg("deadline"), nb::arg("join"), nb::arg("begin"));
  m.def(
      "from_environment",
      [](int rank, int size, double deadline) {
        TcpOptions options = tcp_options_from_environment();
        // Other ranks than the environment's meet at a store of their own.
        if (size > 0) {
          options.rank = rank, options.size = size;
          options.join = options.begin = false;
        }
        return connect(std::move(options), deadline);
      },
      nb::arg("rank"), nb::arg("size"), nb::arg("deadline"));
  m.def(
      "from_group",
      [](const HeldGroup& group) { return HeldBootstrap(group_bootstrap(group.get())); },
      nb::arg("group"), nb::sig("def from_group(group: Group) -> Bootstrap"));
  m.def("from_all_gather", &from_all_gather, nb::arg("rank"), nb::arg("size"), nb::arg("fn"),
        nb::arg("own_address"), nb::arg("job"), nb::arg("job_key"), nb::arg("join"),
        nb::arg("begin"),
        nb::sig("def from_all_gather(rank: int, size: int, fn: "
                "collections.abc.Callable[[bytes], list[bytes]], own_address: str, job: str, "
                "job_key: collections.abc.Callable[[], bytes], join: bool, begin: bool) -> "
                "Bootstrap"));
}

}  // namespace ferry::python
