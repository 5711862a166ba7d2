// NCCL, found at run time: this tool is built without it. Only what an all-to-all needs.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"

namespace ferry::cli {

/// What a look for the library came to.
struct Nccl {
  std::string library{};  ///< as dlopen takes it; "": there is none
  std::string version{};  ///< "2.28.9"
  std::string reason{};   ///< why there is none
};

/// `asked`: a library, "off", or "auto": $FERRY_NCCL, else "libnccl.so.2". Loads it in a child:
/// this process is to be forked. A library that was named, here or in $FERRY_NCCL, and cannot be
/// used is an error of the caller's: std::runtime_error.
Nccl find_nccl(const std::string& asked);

/// How NCCL writes a version: 22809 is 2.28.9.
std::string nccl_version(int code);

/// What a rank sends to a peer and receives from it, places in bytes.
struct NcclBlock {
  std::size_t send_offset = 0, send_bytes = 0;
  std::size_t receive_offset = 0, receive_bytes = 0;
};

/// One rank's communicator, on the current GPU. Throws std::runtime_error.
class NcclRank {
 public:
  /// Collective.
  NcclRank(const Nccl& nccl, Bootstrap& bootstrap);
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;
  /// Collective, on a cudaStream_t: one block for each rank, itself too, sent as one group.
  void all_to_all(const void* from, void* to, const std::vector<NcclBlock>& blocks,
                  void* stream) const;

 private:
  struct Functions;
  void need(int result, const char* call) const;

  std::unique_ptr<const Functions> functions_;
  void* communicator_ = nullptr;
};

}  // namespace ferry::cli
