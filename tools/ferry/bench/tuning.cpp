#include "bench/tuning.hpp"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "ferry/group.hpp"

namespace ferry::cli {

void write_tuning(const std::string& file, const std::vector<TunedCall>& calls) {
  nlohmann::json entries = nlohmann::json::array();
  for (const TunedCall& one : calls) {
    const bool expert_major = one.order == RowOrder::expert_major;
    entries.push_back({{"ranks", one.ranks},
                       {"call", one.call},
                       {"dtype", ferry::name_of(one.dtype)},
                       {"order", expert_major ? "expert_major" : "rank_major"},
                       {"hidden", one.hidden},
                       {"tokens", one.tokens},
                       {"first", one.first},
                       {"mode", "throughput"},
                       {"crossing", ferry::name_of(one.crossing)},
                       {"chunk_bytes", one.chunk_bytes},
                       {"us", one.seconds * 1e6},
                       {"probes", one.probes},
                       {"settled", one.settled},
                       {"why", one.why}});
    if (one.num_sms > 0) entries.back()["num_sms"] = one.num_sms;
  }
  std::ofstream out(file);
  out << nlohmann::json{{"format", 1}, {"program", "ferry bench"}, {"entries", entries}}.dump(2)
      << '\n';
  if (!out.flush()) throw std::runtime_error(fmt::format("--tune: {} cannot be written", file));
}

std::string tuning_table(const std::string& file) {
  std::ifstream in(file);
  std::string text = "\nTuned:\n";
  const nlohmann::json tuned = nlohmann::json::parse(in);
  for (const nlohmann::json& one : tuned.at("entries")) {
    const std::string call = one["call"].get<std::string>() + (one["first"] ? ", first" : "");
    text += fmt::format("{:<16} {:<5} {:<13} {:>5} KiB  {}\n", call,
                        one["dtype"].get<std::string>(), one["crossing"].get<std::string>(),
                        one["chunk_bytes"].get<int>() / 1024, one["why"].get<std::string>());
  }
  return text;
}

}  // namespace ferry::cli
