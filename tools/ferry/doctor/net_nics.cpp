// Which NICs the ranks use, as text and JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "doctor/net.hpp"

namespace ferry::cli {

std::string describe_nics(const std::vector<std::vector<NicStats>>& nics) {
  std::string text;
  for (std::size_t rank = 0; rank < nics.size(); ++rank) {
    for (const NicStats& nic : nics[rank]) {
      const std::string at = nic.address.empty() ? "" : fmt::format(" ({})", nic.address);
      text += fmt::format("  rank {}: {}{}, {}\n", rank, nic.name, at, nic.why);
    }
  }
  return text.empty() ? text : "NICs\n" + text;
}

nlohmann::json to_json(const std::vector<NicStats>& nics) {
  nlohmann::json all = nlohmann::json::array();
  for (const NicStats& nic : nics) {
    all.push_back({{"name", nic.name}, {"address", nic.address}, {"why", nic.why}});
  }
  return all;
}

std::vector<NicStats> nics_from(const nlohmann::json& told) {
  std::vector<NicStats> nics;
  for (const nlohmann::json& one : told) {
    nics.push_back({one.at("name").get<std::string>(), one.at("address").get<std::string>(),
                    one.at("why").get<std::string>(), 0});
  }
  return nics;
}

}  // namespace ferry::cli
