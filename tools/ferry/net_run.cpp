// A rank of `ferry doctor --net`: measures with the others; rank 0 tells.
#include <fmt/format.h>

#include <ferry/ferry.hpp>
#include <nlohmann/json.hpp>

#include "net.hpp"

namespace ferry::cli {

int run_net(FabricKind fabric, bool json) {
  try {
    const std::shared_ptr<Bootstrap> bootstrap = tcp_bootstrap(tcp_options_from_environment());
    GroupConfig config;
    config.experts = bootstrap->size();
    config.memory_bytes = std::size_t{1} << 20;
    config.backend = Backend::host;
    config.fabric = fabric;
    Group group(bootstrap, config);
    const Links links = measure_links(group);
    if (group.rank() != 0) return 0;
    if (json) {
      nlohmann::json told = to_json(links);
      told["fabric"] = group.fabric_name();
      fmt::print("{}\n", told.dump(2));
    } else {
      fmt::print("{} ranks, fabric {}\n{}", links.ranks(), group.fabric_name(),
                 describe_links(links));
    }
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "ferry doctor --net: {}\n", error.what());
    return 1;
  }
}

}  // namespace ferry::cli
