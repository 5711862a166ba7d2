// The public measurement of links: for groups of the host engine.
#include "ferry/links.hpp"

#include "host/throughput/links.hpp"

namespace ferry {

Links measure_links(Group& group, const std::function<void(int done, int total)>& progress) {
  if (group.destroyed()) {
    throw Error(ErrorKind::destroyed, "measure_links: the group is destroyed");
  }
  const auto engine = std::dynamic_pointer_cast<host::HostEngine>(Access::engine(group));
  if (!engine) {
    throw Error(ErrorKind::unsupported,
                "measure_links: got a group of backend cuda, expected backend host");
  }
  return host::measure_links(*engine, progress);
}

}  // namespace ferry
