// `ferry doctor --net`: from latency and rate between all pairs of ranks to what is odd.
#pragma once
#include <ferry/links.hpp>
#include <ferry/network.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace ferry::cli {

/// One thing that is odd about the ways between ranks.
struct OddLink {
  enum class Kind {
    sends,     ///< all of `from` sends slowly to what is beyond
    receives,  ///< all of `to` receives slowly
    both,      ///< `from` does both
    way,       ///< what goes from `from` to `to` is slow, the way back is not
    link,      ///< between `from` and `to`, both ways
    late,      ///< flags between `from` and `to`, or `from` and all others, take long
  };
  Kind kind = Kind::link;
  std::vector<int> from{}, to{};  ///< ranks: one, or those of a domain; empty: all others
  double value = 0;               ///< bytes in a second, or nanoseconds
  double usual = 0;               ///< elsewhere, or on the way back
};

/// Links inside domains are compared with each other, and so are those across. Slow: a third
/// of the rate that is usual elsewhere; late: three times the usual latency, and 50 us more. A host
/// is named before its ranks, and a rank before its links.
std::vector<OddLink> odd_links(const Links& links);

/// The matrices as text, and a sentence for each odd thing, or one that says that nothing is odd.
std::string describe_links(const Links& links);

nlohmann::json to_json(const Links& links);

/// By rank. A line for each NIC and what it was chosen for; nothing where no rank has any.
std::string describe_nics(const std::vector<std::vector<NicStats>>& nics);
/// Of one rank, and back. Throws nlohmann::json::exception for other JSON.
nlohmann::json to_json(const std::vector<NicStats>& nics);
std::vector<NicStats> nics_from(const nlohmann::json& told);

/// A rank of the job that the environment describes: measures with the others; rank 0 tells, as
/// text or JSON, and draws an `image` unless that is "". Returns the exit code.
int run_net(FabricKind fabric, bool json, const std::string& image);

}  // namespace ferry::cli
