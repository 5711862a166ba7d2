// OfiOptions from the environment. The fabrics read environment variables here and nowhere else:
//
//   FERRY_OFI_PROVIDER       OfiOptions::provider
//   FERRY_HOST               OfiOptions::host
//   FERRY_OFI_ENDPOINTS      OfiOptions::endpoints
//   FERRY_OFI_NICS           OfiOptions::nics
//   FERRY_OFI_NICS_PER_RANK  OfiOptions::nics_per_rank
//   FERRY_OFI_TRAFFIC_CLASS  OfiOptions::traffic_class
//
// libfabric itself reads FI_* (`fi_info -e` lists them).
#include <charconv>
#include <cstdlib>
#include <ferry/error.hpp>
#include <ferry/network.hpp>
#include <string_view>

#include "base/text.hpp"

namespace ferry {
namespace {

constexpr std::size_t kMostOfValueShown = 40;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

/// 1 … kMaxOfiEndpoints; `otherwise` where it is not set.
int number_from(const char* name, int otherwise) {
  const std::string_view value = variable(name);
  if (value.empty()) return otherwise;
  int number = 0;
  const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc() && stop == value.data() + value.size() && number >= 1 &&
      number <= kMaxOfiEndpoints) {
    return number;
  }
  throw Error(ErrorKind::invalid_argument, "environment variable " + std::string(name) + " is \"" +
                                               printable(value, kMostOfValueShown) +
                                               "\", expected an integer from 1 to " +
                                               std::to_string(kMaxOfiEndpoints));
}

}  // namespace

OfiOptions with_environment(OfiOptions options) {
  if (options.provider.empty()) options.provider = variable("FERRY_OFI_PROVIDER");
  if (options.host.empty()) options.host = variable("FERRY_HOST");
  if (options.traffic_class.empty()) options.traffic_class = variable("FERRY_OFI_TRAFFIC_CLASS");
  if (options.nics.empty()) options.nics = variable("FERRY_OFI_NICS");
  if (options.endpoints == 0) options.endpoints = number_from("FERRY_OFI_ENDPOINTS", 1);
  if (options.nics_per_rank == 0) {
    options.nics_per_rank = number_from("FERRY_OFI_NICS_PER_RANK", 0);
  }
  return options;
}

}  // namespace ferry
