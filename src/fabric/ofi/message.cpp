#include "fabric/ofi/message.hpp"

#include "fabric/shm/names.hpp"

namespace ferry::fabric::ofi {

WayKey make_way_key(const JobKey& job, int source, int target, int endpoint) {
  const auto way = static_cast<std::uint64_t>(static_cast<std::uint32_t>(source)) << 32 |
                   static_cast<std::uint32_t>(target);
  const auto place = static_cast<std::uint64_t>(endpoint) << 1;
  return {siphash(job, way, place), siphash(job, way, place | 1)};
}

JobKey job_since(const JobKey& job, std::uint64_t since) {
  if (since <= 1) return job;
  return {siphash(job, since, ~0ull), siphash(job, since, ~1ull)};
}

}  // namespace ferry::fabric::ofi
