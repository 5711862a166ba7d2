// What the ranks of a job find in their environment.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ferry::cli {

struct JobEnvironment {
  int ranks = 1;  // of this host
  int hosts = 1;
  int host = 0;  // this one, by its place among all
  std::string master = "127.0.0.1";
  std::string address{};  // of this host for the others; empty: one host
  std::uint16_t master_port = 0;
  std::uint16_t ferry_port = 0;
};

/// How a rank comes into its group.
enum class Entry {
  together,  ///< all ranks are there at first
  begins,    ///< alone; the others join it
  joins,     ///< takes the place of a rank that is not there
};

/// "NAME=value" strings for one rank: this process's environment with RANK, LOCAL_RANK,
/// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, FERRY_PORT, FERRY_BEGIN, FERRY_JOIN and
/// `secret`, unless empty, as FERRY_SECRET set; of several hosts FERRY_HOST, with several ranks
/// OMP_NUM_THREADS=1, unless they are already there. `rank`: of this host, from 0.
std::vector<std::string> environment_of_rank(const JobEnvironment& job, const std::string& secret,
                                             int rank, Entry entry = Entry::together);

}  // namespace ferry::cli
