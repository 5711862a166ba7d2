// Groups whose ranks are in several domains, joined by a network.
#pragma once
#include <cstdint>
#include <string_view>

namespace ferry {

/// How tokens cross from one domain to another. Within one domain it makes no difference.
enum class Crossing : std::uint8_t {
  automatic,     ///< by the cost model (docs/design.md), which every rank computes alike
  direct,        ///< one copy of a token for each destination rank
  hierarchical,  ///< one copy for each destination domain, to the rank on the same rail, which
                 ///< spreads it inside; sums inside a domain come back as one row
};

/// "automatic", "direct", "hierarchical".
constexpr std::string_view name_of(Crossing crossing) {
  switch (crossing) {
    case Crossing::automatic: return "automatic";
    case Crossing::direct: return "direct";
    case Crossing::hierarchical: return "hierarchical";
  }
  return "unknown";
}

/// What a rank has sent to ranks of other domains since its group was made.
struct NetworkUse {
  std::uint64_t put_bytes = 0;  ///< rows and what travels beside them, and messages of calls
  std::uint64_t puts = 0;       ///< writes that carried them
  std::uint64_t signals = 0;    ///< 8-byte flags, which are not in `put_bytes`
  friend bool operator==(const NetworkUse&, const NetworkUse&) = default;
};

}  // namespace ferry
