// OfiOptions from the environment. The fabrics read environment variables here and nowhere else:
//
//   FERRY_OFI_PROVIDER       OfiOptions::provider
//   FERRY_HOST               OfiOptions::host
//   FERRY_OFI_ENDPOINTS      OfiOptions::endpoints
//   FERRY_OFI_TRAFFIC_CLASS  OfiOptions::traffic_class
//
// libfabric itself reads FI_* (`fi_info -e` lists them).
#include <charconv>
#include <cstdlib>
#include <ferry/error.hpp>
#include <ferry/network.hpp>
#include <string_view>

#include "core/text.hpp"

namespace ferry {
namespace {

constexpr std::size_t kMostShown = 40;

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

int endpoints_from(std::string_view value) {
  int number = 0;
  const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc() && stop == value.data() + value.size() && number >= 1 &&
      number <= kMaxOfiEndpoints) {
    return number;
  }
  throw Error(ErrorKind::invalid_argument,
              "environment variable FERRY_OFI_ENDPOINTS is \"" + printable(value, kMostShown) +
                  "\", expected an integer from 1 to " + std::to_string(kMaxOfiEndpoints));
}

}  // namespace

OfiOptions with_environment(OfiOptions options) {
  if (options.provider.empty()) options.provider = variable("FERRY_OFI_PROVIDER");
  if (options.host.empty()) options.host = variable("FERRY_HOST");
  if (options.traffic_class.empty()) options.traffic_class = variable("FERRY_OFI_TRAFFIC_CLASS");
  if (options.endpoints == 0) {
    const std::string_view value = variable("FERRY_OFI_ENDPOINTS");
    options.endpoints = value.empty() ? 1 : endpoints_from(value);
  }
  return options;
}

}  // namespace ferry
