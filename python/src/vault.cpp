#include "ferry/vault.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "group.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

using HeldVault = Held<Vault>;

/// Bytes of a tensor as u8, and its dtype and shape in words.
struct Part {
  std::int64_t key;
  const View* bytes;
  std::string type;
};

std::vector<VaultPart> parts_of(const std::vector<Part>& parts) {
  std::vector<VaultPart> all;
  all.reserve(parts.size());
  for (const Part& part : parts) all.push_back({part.key, part.bytes->read(), part.type});
  return all;
}

}  // namespace

void bind_vault(nb::module_& m) {
  nb::class_<Part>(m, "VaultPart")
      .def(
          "__init__",
          [](Part* self, std::int64_t key, const View& bytes, std::string type) {
            new (self) Part{key, &bytes, std::move(type)};
          },
          nb::keep_alive<1, 3>());
  nb::class_<HeldVault>(m, "Vault")
      .def("__init__",
           [](HeldVault* self, const HeldGroup& group, std::size_t version_bytes) {
             new (self) HeldVault(Vault(group.get(), version_bytes));
           })
      .def("recover",
           [](const HeldVault& vault, const std::vector<std::int64_t>& wanted) {
             return without_gil([&] { return vault->recover(wanted); });
           })
      .def("keys",
           [](const HeldVault& vault) { return without_gil([&] { return vault->keys(); }); })
      .def(
          "get",
          [](const HeldVault& vault, std::int64_t key, const std::vector<Part>& into,
             PythonStream* stream) {
            std::vector<VaultTarget> targets;
            for (const Part& part : into) targets.push_back({part.bytes->write(), part.type});
            without_gil([&] { vault->get(key, targets, stream_or_null(stream)); });
          },
          nb::arg("key"), nb::arg("into"), nb::arg("stream").none())
      .def(
          "put",
          [](const HeldVault& vault, std::uint64_t step, const std::vector<Part>& parts,
             PythonStream* stream) {
            const std::vector<VaultPart> all = parts_of(parts);
            without_gil([&] { vault->put(step, all, stream_or_null(stream)); });
          },
          nb::arg("step"), nb::arg("parts"), nb::arg("stream").none())
      .def_static("bytes_of",
                  [](const std::vector<Part>& parts) { return Vault::bytes_of(parts_of(parts)); });
}

}  // namespace ferry::python
