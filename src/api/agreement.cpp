#include "api/agreement.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace ferry {
namespace {

using Field = std::pair<std::string, std::string>;

/// Every field that must be the same, as text: it is compared and shown, never interpreted.
std::vector<Field> fields_of(const GroupConfig& config, int ranks) {
  const auto number = [](auto value) { return std::to_string(value); };
  return {{"Ferry's version", FERRY_VERSION},
          {"the number of ranks", number(ranks)},
          {"experts", number(config.experts)},
          {"deadline (ns)", number(config.deadline.count())},
          {"memory_bytes", number(config.memory_bytes)},
          {"fabric", number(static_cast<int>(config.fabric))},
          {"backend", number(static_cast<int>(config.backend))},
          {"sim_seed", number(config.sim_seed)}};
}

std::string to_text(const std::vector<Field>& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + "=" + value + "\n";
  return text;
}

/// The first line in which two texts differ, as (name, theirs, rank 0's).
std::string first_difference(const std::string& theirs, const std::string& zero, int rank) {
  std::istringstream a(theirs), b(zero);
  std::string x, y;
  while (true) {
    const bool more_a = static_cast<bool>(std::getline(a, x));
    const bool more_b = static_cast<bool>(std::getline(b, y));
    if (!more_a || !more_b) break;
    if (x == y) continue;
    const auto value = [](const std::string& line) { return line.substr(line.find('=') + 1); };
    return y.substr(0, y.find('=')) + " is " + value(x).substr(0, 80) + " on rank " +
           std::to_string(rank) + " but " + value(y) + " on rank 0";
  }
  return "rank " + std::to_string(rank) +
         " describes its configuration in another way: it runs "
         "another version of Ferry";
}

}  // namespace

void agree_on(Bootstrap& bootstrap, const GroupConfig& config) {
  const std::string mine = to_text(fields_of(config, bootstrap.size()));
  const auto all =
      bootstrap.all_gather(std::as_bytes(std::span(mine)), config.deadline, config.on_wait);
  std::vector<std::string> texts;
  for (const auto& bytes : all) {
    texts.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw Error(ErrorKind::mismatch,
                "Group: the ranks were given different configurations: " +
                    first_difference(texts[rank], texts[0], static_cast<int>(rank)),
                {bootstrap.rank(), static_cast<int>(rank), "Group: configuration", 0, 0, 0});
  }
}

}  // namespace ferry
