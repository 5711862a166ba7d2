// The command `ferry`, for the script that pip installs.
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.hpp"
#include "entry.hpp"
#include "gil.hpp"

namespace ferry::python {
namespace {

// Bytes: arguments of a program need not be UTF-8.
int command(const std::vector<nb::bytes>& arguments) {
  std::vector<std::string> words;
  for (const nb::bytes& argument : arguments) words.emplace_back(argument.c_str(), argument.size());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return without_gil(
      [&] { return cli::run_command(static_cast<int>(words.size()), pointers.data()); });
}

}  // namespace

void bind_command(nb::module_& module) {
  module.def("command", &command, nb::arg("arguments"),
             "Runs the command `ferry` with these words, the first of which is its name; returns "
             "the exit code.");
}

}  // namespace ferry::python
