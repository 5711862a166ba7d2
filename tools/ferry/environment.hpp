// What the ranks of a job find in their environment.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "unique_fd.hpp"

namespace ferry::cli {

/// A TCP port of the loopback interface that is free now, below the range from which the kernel
/// serves itself, and that no other `ferry` on this machine takes while this object lives.
class ReservedPort {
 public:
  /// Picks one. Throws std::runtime_error when none can be found.
  ReservedPort();
  /// Exactly this one. Throws std::runtime_error when somebody listens there.
  explicit ReservedPort(std::uint16_t port);
  std::uint16_t number() const { return port_; }

 private:
  std::uint16_t port_ = 0;
  UniqueFd claim_;
};

/// 128 random bits in hexadecimal.
std::string random_secret();

struct JobEnvironment {
  int ranks = 1;
  std::uint16_t master_port = 0;
  std::uint16_t ferry_port = 0;
};

/// "NAME=value" strings for one rank: this process's environment with RANK, LOCAL_RANK,
/// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, FERRY_PORT and `secret` as
/// FERRY_SECRET set; with several ranks OMP_NUM_THREADS=1 unless it is already there.
std::vector<std::string> environment_of_rank(const JobEnvironment& job, const std::string& secret,
                                             int rank);

}  // namespace ferry::cli
