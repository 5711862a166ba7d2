#include "run/environment.hpp"

#include <cstdlib>
#include <utility>

#include "platform/child_process.hpp"

namespace ferry::cli {

std::vector<std::string> environment_of_rank(const JobEnvironment& job, const std::string& secret,
                                             int rank, Entry entry) {
  std::vector<std::pair<std::string, std::string>> ours = {
      {"RANK", std::to_string(job.host * job.ranks + rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(job.hosts * job.ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(job.ranks)},
      {"MASTER_ADDR", job.master},
      {"MASTER_PORT", std::to_string(job.master_port)},
      {"FERRY_PORT", std::to_string(job.ferry_port)},
      // Also of a job that is not elastic: a rank of one that is may have started it.
      {"FERRY_BEGIN", entry == Entry::begins ? "1" : "0"},
      {"FERRY_JOIN", entry == Entry::joins ? "1" : "0"},
  };
  if (!secret.empty()) ours.emplace_back("FERRY_SECRET", secret);
  if (!job.address.empty() && getenv("FERRY_HOST") == nullptr)
    ours.emplace_back("FERRY_HOST", job.address);
  if (job.ranks > 1 && getenv("OMP_NUM_THREADS") == nullptr)
    ours.emplace_back("OMP_NUM_THREADS", "1");

  std::vector<std::string> result;
  for (std::string& text : own_environment()) {
    bool replaced = false;
    for (const auto& [name, value] : ours) {
      replaced = replaced || text.starts_with(name + "=");
    }
    if (!replaced) result.push_back(std::move(text));
  }
  for (const auto& [name, value] : ours) result.push_back(name + "=" + value);
  return result;
}

}  // namespace ferry::cli
