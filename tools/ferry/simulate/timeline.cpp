#include "simulate/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace ferry::cli {

void Timeline::add(int rank, const std::string& link, double begin_s, double seconds) {
  double& longest = spans_[{rank, link}][begin_s];
  longest = std::max(longest, seconds);
}

void Timeline::write(const std::string& file) const {
  nlohmann::json events = nlohmann::json::array();
  for (const auto& [track, spans] : spans_) {
    const auto& [rank, link] = track;
    int call = 0;
    for (const auto& [begin, seconds] : spans) {
      events.push_back({{"name", call++ == 0 ? "dispatch" : "combine"},
                        {"ph", "X"},
                        {"ts", begin * 1e6},
                        {"dur", seconds * 1e6},
                        {"pid", rank},
                        {"tid", link}});
    }
    if (link == "NIC in" || link == "NVLink in") {
      events.push_back({{"name", "process_name"},
                        {"ph", "M"},
                        {"pid", rank},
                        {"args", {{"name", fmt::format("rank {}", rank)}}}});
    }
  }
  std::ofstream out(file);
  out << nlohmann::json{{"traceEvents", events}, {"displayTimeUnit", "ns"}}.dump() << '\n';
  if (!out.flush()) throw std::runtime_error(fmt::format("{} cannot be written", file));
}

}  // namespace ferry::cli
