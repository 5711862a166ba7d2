// A rank of `ferry doctor --net`: measures with the others; rank 0 tells.
#include <fmt/format.h>

#include <ferry/ferry.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "bench/plot.hpp"
#include "command.hpp"
#include "doctor/net.hpp"
#include "progress.hpp"

namespace ferry::cli {
namespace {

/// Rank 0 says how far it is.
Links measured_links(Group& group) {
  if (group.rank() != 0) return measure_links(group);
  const int pairs = group.size() * (group.size() - 1) / 2;
  const std::string what = fmt::format("{} pairs of ranks, three times each", pairs);
  std::unique_ptr<Progress> shown;
  return measure_links(group, [&](int done, int total) {
    if (!shown) shown = std::make_unique<Progress>("doctor", total);
    shown->show(done, what);
  });
}

/// Collective: of all ranks.
std::vector<std::vector<NicStats>> nics_of_all(Bootstrap& bootstrap, const Group& group) {
  const std::string mine = to_json(group.nics()).dump();
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(mine)), group.config().deadline);
  std::vector<std::vector<NicStats>> nics;
  for (const auto& bytes : all) {
    const auto* first = reinterpret_cast<const char*>(bytes.data());
    nics.push_back(nics_from(nlohmann::json::parse(first, first + bytes.size())));
  }
  return nics;
}

}  // namespace

int run_net(FabricKind fabric, bool json, const std::string& image) {
  try {
    const std::shared_ptr<Bootstrap> bootstrap = tcp_bootstrap(tcp_options_from_environment());
    if (bootstrap->rank() == 0 && !may_draw("doctor --net", image)) return 1;
    GroupConfig config;
    config.experts = bootstrap->size();
    config.memory_bytes = std::size_t{1} << 20;
    config.backend = Backend::host;
    config.fabric = fabric;
    Group group(bootstrap, config);
    const Links links = measured_links(group);
    const auto nics = nics_of_all(*bootstrap, group);
    if (group.rank() != 0) return 0;
    nlohmann::json told = to_json(links);
    if (json) {
      told["fabric"] = group.fabric_name();
      told["nics"] = nlohmann::json::array();
      for (const auto& of_rank : nics) told["nics"].push_back(to_json(of_rank));
      fmt::print("{}\n", told.dump(2));
    } else {
      fmt::print("{} ranks, fabric {}\n{}{}", links.ranks(), group.fabric_name(),
                 describe_nics(nics), describe_links(links));
    }
    if (image.empty()) return 0;
    return draw_text(kMatrixPlot, told.dump(), image) ? 0 : 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "ferry doctor --net: {}\n", error.what());
    return 1;
  }
}

}  // namespace ferry::cli
