// What the ranks of a job find in their environment.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "run/unique_fd.hpp"

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

/// Which of the addresses (numbers or names) is this machine's. Throws std::runtime_error unless
/// exactly one is.
int own_place(const std::vector<std::string>& addresses);

/// 128 random bits in hexadecimal.
std::string random_secret();

struct JobEnvironment {
  int ranks = 1;  // of this host
  int hosts = 1;
  int host = 0;  // this one, by its place among all
  std::string master = "127.0.0.1";
  std::string address{};  // of this host for the others; empty: one host
  std::uint16_t master_port = 0;
  std::uint16_t ferry_port = 0;
  bool elastic = false;
};

/// "NAME=value" strings for one rank: this process's environment with RANK, LOCAL_RANK,
/// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, FERRY_PORT and `secret`, unless empty,
/// as FERRY_SECRET set; of several hosts FERRY_HOST, with several ranks OMP_NUM_THREADS=1, unless
/// they are already there; of an elastic job FERRY_JOIN, 1 if `joins`: the process takes the place
/// of one that has ended. `rank`: of this host, from 0.
std::vector<std::string> environment_of_rank(const JobEnvironment& job, const std::string& secret,
                                             int rank, bool joins = false);

}  // namespace ferry::cli
