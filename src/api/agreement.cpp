#include "api/agreement.hpp"

#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/tuning_file.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "base/wait_notice.hpp"
#include "core/check.hpp"
#include "fabric/ofi/ofi.hpp"
#include "ferry/version.hpp"

namespace ferry {
namespace {

using Field = std::pair<std::string, std::string>;

constexpr std::string_view kInvalid = "invalid: ";  // then why
constexpr std::size_t kMostText = 300;              // of another rank, shown
constexpr std::size_t kMostValue = 80;

/// Every field that must be the same, as text: it is compared and shown, never interpreted.
std::vector<Field> fields_of(const GroupConfig& config, int ranks) {
  const auto number = [](auto value) { return std::to_string(value); };
  return {{"Ferry's version", std::string(version())},
          {"the number of ranks", number(ranks)},
          {"experts", number(config.experts)},
          {"deadline", exact_seconds(config.deadline)},
          {"memory_bytes", number(config.memory_bytes)},
          {"fabric", std::string(name_of(config.fabric))},
          {"backend", std::string(name_of(config.backend))},
          {"sim_seed", number(config.sim_seed)},
          {"domain_size", number(config.domain_size)},
          {"network", std::string(name_of(config.network))},
          {"ofi.provider", config.ofi.provider},
          {"ofi.endpoints", number(config.ofi.endpoints)},
          {"crossing", std::string(name_of(config.crossing))},
          {"elastic", printable(config.elastic, kMostValue)},
          {"arbiter", config.arbiter.empty() ? "none" : "a directory"},  // hosts mount it anywhere
          {"tuning", tuning_text(config)}};
}

std::string to_text(const std::vector<Field>& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + "=" + value + "\n";
  return text;
}

/// The first line in which two texts differ, as (name, rank's, the other's).
std::string first_difference(const std::string& theirs, const std::string& zero, int rank,
                             int zero_rank = 0) {
  std::istringstream a(theirs), b(zero);
  std::string x, y;
  while (true) {
    const bool more_a = static_cast<bool>(std::getline(a, x));
    const bool more_b = static_cast<bool>(std::getline(b, y));
    if (!more_a || !more_b) break;
    if (x == y) continue;
    const auto value = [](const std::string& line) {
      return printable(line.substr(line.find('=') + 1), kMostValue);
    };
    return printable(y.substr(0, y.find('=')), kMostValue) + " is " + value(x) + " on rank " +
           std::to_string(rank) + " but " + value(y) + " on rank " + std::to_string(zero_rank);
  }
  return "rank " + std::to_string(rank) +
         " describes its configuration in another way: it runs "
         "another version of Ferry";
}

}  // namespace

void complete_config(GroupConfig& config) {
  check_config(config);
  config.ofi = with_environment(std::move(config.ofi));
  apply_tuning_environment(config);
  (void)wait_notice_after();
  read_log_level();
}

std::string config_text(const GroupConfig& config, int ranks) {
  return to_text(fields_of(config, ranks));
}

void check_same(const std::string& mine, int rank, const std::string& theirs, int peer) {
  if (mine == theirs) return;
  throw Error(ErrorKind::mismatch,
              "Group: rank " + std::to_string(rank) +
                  " cannot join: it was given another configuration than the group: " +
                  first_difference(mine, theirs, rank, peer),
              {rank, peer, "Group: configuration", 0, 0, 0});
}

void agree_on(Bootstrap& bootstrap, const GroupConfig& config,
              const std::optional<Error>& invalid) {
  const std::string mine = invalid ? std::string(kInvalid) + printable(invalid->what(), kMostText)
                                   : config_text(config, bootstrap.size());
  // An invalid deadline is no deadline to wait by.
  const auto deadline = invalid ? GroupConfig{}.deadline : config.deadline;
  std::vector<std::vector<std::byte>> all;
  bootstrap.set_stage("Group: configuration");
  try {
    all = bootstrap.all_gather(std::as_bytes(std::span(mine)), deadline, config.on_wait);
  } catch (const Error& error) {
    if (invalid) throw *invalid;
    if (error.kind() != ErrorKind::deadline) throw;
    throw Error(error.kind(),
                std::string("Group: not all ranks came to create the group: ") + error.what(),
                error.context());
  }
  if (invalid) throw *invalid;
  std::vector<std::string> texts;
  for (const auto& bytes : all) {
    texts.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].starts_with(kInvalid)) continue;
    throw Error(ErrorKind::mismatch,
                "Group: rank " + std::to_string(rank) + " was given a configuration that is " +
                    printable(texts[rank], kMostText) + " (on that rank)",
                {bootstrap.rank(), static_cast<int>(rank), "Group: configuration", 0, 0, 0});
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
