# What Ferry needs from the distribution, and how to see whether it is there. Sourced.
#
#   collect_missing PROFILE   fills missing_what, missing_package_of (one entry a missing thing)
#                             and missing_packages (all packages, once each)
#   find_python               prints a Python that can build Ferry and make a virtual environment
#   find_clangxx              prints a clang++ >= 16 that has libFuzzer

have() { command -v "$1" >/dev/null 2>&1; }

cxx() { echo "${CXX:-g++}"; }

# at_least 12.2.0 12  ->  true
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

have_cxx() {
  have "$(cxx)" || return 1
  if "$(cxx)" --version | grep -q clang; then
    at_least "$("$(cxx)" -dumpversion)" 16
  else
    at_least "$("$(cxx)" -dumpfullversion)" 12
  fi
}

have_cmake() { have cmake && at_least "$(cmake --version | sed -n '1s/.* //p')" 3.25; }

# Debian's wine64 alone puts no command on the PATH.
have_wine() { have wine64 || have wine || [[ -x /usr/lib/wine/wine64 ]]; }

have_header() {
  have "$(cxx)" &&
    printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
    "$(cxx)" -x c++ -E - >/dev/null 2>&1
}

# The interpreter must be 3.11 or newer (the pinned packages ask for it), able to make a virtual
# environment with pip, and have its headers.
python_is_fit() {
  have "$1" && "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
sys.exit(not (sys.version_info >= (3, 11)
              and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PY
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
    if python_is_fit "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  return 1
}

find_clangxx() {
  local candidate
  for candidate in clang++ clang++-{20,19,18,17,16}; do
    have "$candidate" || continue
    at_least "$("$candidate" -dumpversion)" 16 || continue
    if [[ -n $(find "$("$candidate" -print-resource-dir)/lib" -name '*clang_rt.fuzzer*.a' \
      -print -quit 2>/dev/null) ]]; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

# Debian 12's plain `clang` is 14: too old. Ubuntu 24.04 has 18.
clang_packages() {
  if [[ -r /etc/os-release ]] && (. /etc/os-release && [[ $ID == ubuntu ]]); then
    echo "clang-18 libclang-rt-18-dev"
  else
    echo "clang-16 libclang-rt-16-dev"
  fi
}

# need WHAT "PACKAGE..." PROBE [ARGUMENT...]
need() {
  local what=$1 packages=$2
  shift 2
  if "$@" >/dev/null; then
    return 0
  fi
  missing_what+=("$what")
  missing_package_of+=("$packages")
  local package
  for package in $packages; do
    if [[ " ${missing_packages[*]-} " != *" $package "* ]]; then
      missing_packages+=("$package")
    fi
  done
}

collect_missing() {
  missing_what=()
  missing_package_of=()
  missing_packages=()
  need "C++20 compiler (g++ >= 12)" "g++" have_cxx
  need "CMake >= 3.25" "cmake" have_cmake
  need "Ninja" "ninja-build" have ninja
  need "Python >= 3.11, venv, headers" "python3 python3-venv python3-dev" find_python
  need "CLI11 headers" "libcli11-dev" have_header CLI/CLI.hpp
  need "fmt headers" "libfmt-dev" have_header fmt/format.h
  need "nlohmann-json headers" "nlohmann-json3-dev" have_header nlohmann/json.hpp
  need "yaml-cpp headers" "libyaml-cpp-dev" have_header yaml-cpp/yaml.h
  if [[ $1 == windows ]]; then
    need "GoogleTest" "libgtest-dev" have_header gtest/gtest.h
    need "Windows cross compiler" "g++-mingw-w64-x86-64-posix" have x86_64-w64-mingw32-g++-posix
    need "wine" "wine64" have_wine
  fi
  if [[ $1 == deb ]]; then # Build-Depends of tools/debian/control, besides the above
    need "debhelper" "debhelper" have dh
    need "help2man" "help2man" have help2man
    need "pkg-config" "pkgconf" have pkg-config
    need "libfabric headers" "libfabric-dev" have_header rdma/fabric.h
  fi
  if [[ $1 == docs || $1 == test ]]; then
    need "Doxygen" "doxygen" have doxygen
  fi
  if [[ $1 == test ]]; then
    need "GoogleTest" "libgtest-dev" have_header gtest/gtest.h
    need "RapidCheck" "librapidcheck-dev" have_header rapidcheck.h
    need "Google Benchmark" "libbenchmark-dev" have_header benchmark/benchmark.h
    need "SimGrid headers" "libsimgrid-dev" have_header simgrid/s4u.hpp
    need "ccache" "ccache" have ccache
    need "advzip" "advancecomp" have advzip
    need "setarch" "util-linux" have setarch
    need "libfabric headers" "libfabric-dev" have_header rdma/fabric.h
    need "fi_info" "libfabric-bin" have fi_info
    need "ip" "iproute2" have ip
    need "Prometheus" "prometheus" have prometheus
    need "etcd" "etcd-server" have etcd
    need "clang with libFuzzer" "$(clang_packages)" find_clangxx
    if [[ $(uname -m) != aarch64 ]]; then
      need "Arm64 cross compiler" "g++-aarch64-linux-gnu" have aarch64-linux-gnu-g++
      need "Arm64 emulator" "qemu-user" have qemu-aarch64
    fi
  fi
}
