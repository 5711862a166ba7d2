// libfabric, loaded at run time: one binary serves machines with and without it.
#pragma once
#include <rdma/fabric.h>

#include <string>
#include <string_view>

namespace ferry::fabric::ofi {

/// The functions of libfabric.so.1 that are not inline in its headers.
struct Library {
  decltype(&fi_getinfo) getinfo = nullptr;
  decltype(&fi_freeinfo) freeinfo = nullptr;
  decltype(&fi_dupinfo) dupinfo = nullptr;
  decltype(&fi_fabric) fabric = nullptr;
  decltype(&fi_strerror) strerror = nullptr;
  decltype(&fi_version) version = nullptr;
};

/// Loads it at the first call and keeps it: its own threads and handlers may outlive a group.
/// Throws Error(unsupported) naming `rank`, with what to install.
const Library& library(int rank);

/// What a negative return value of libfabric says: "Connection refused (111)".
std::string error_text(const Library& library, long code);

/// Error(system), or Error(exhausted) where files or memory are short: "rank 1: fi_endpoint: ...".
[[noreturn]] void throw_ofi(const Library& library, int rank, std::string_view what, long code);

}  // namespace ferry::fabric::ofi
