#include "fabric/ofi/handshake_exchange.hpp"

#include <algorithm>
#include <ferry/error.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/process_limits.hpp"
#include "fabric/identity.hpp"
#include "fabric/ofi/handshake.hpp"
#include "fabric/ofi/nics/address.hpp"
#include "fabric/ofi/nics/nics.hpp"

namespace ferry::fabric::ofi {
namespace {

/// How long an endpoint's thread polls before it sleeps.
constexpr std::chrono::nanoseconds kSpin = std::chrono::microseconds(20);

/// The NICs that a rank may use, and where they are from there.
struct Near {
  std::vector<Nic> nics{};
  RankPlace place{};
  std::vector<Distance> distances{};

  std::vector<std::string> nearest_ids() const {
    std::vector<std::string> ids;
    for (const std::size_t i : nearest(distances)) ids.push_back(nics[i].id());
    return ids;
  }
};

Near look_around(const Library& library, int rank, const OfiOptions& options,
                 const std::string& own_address, const std::string& gpu) {
  const Sysfs sysfs;
  Near near{.nics = find_nics(library, rank, options, own_address, sysfs)};
  near.place.nodes = sysfs.nodes_of(allowed_cpus());
  if (!gpu.empty()) near.place.gpu = sysfs.pci_device(gpu);
  const NodeDistances nodes = sysfs.node_distances();
  for (const Nic& nic : near.nics) {
    near.distances.push_back(distance(nic.place, near.place, nodes));
  }
  return near;
}

/// Of the ranks of this machine that offer the same NICs.
Share share_of(const std::vector<Offer>& offers, int rank) {
  const Offer& mine = offers[static_cast<std::size_t>(rank)];
  Share share{0, 0};
  for (std::size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].boot_id != mine.boot_id || offers[r].nearest != mine.nearest) continue;
    if (r < static_cast<std::size_t>(rank)) ++share.index;
    ++share.ranks;
  }
  return share;
}

std::string why(const Near& near, std::size_t nic, const Share& share) {
  std::string text = describe(near.distances[nic], near.nics[nic].place, near.place);
  const std::vector<std::size_t> as_near = nearest(near.distances);
  if (near.nics.size() == 1) text += "; no other to choose from";
  if (as_near.size() > 1 && near.distances[nic] == near.distances[as_near.front()]) {
    text += "; one of " + std::to_string(as_near.size()) + " as near";
  }
  if (share.ranks > 1) text += "; shared by " + std::to_string(share.ranks) + " ranks";
  return text;
}

/// Whether each of so many ranks of this machine has so many cores.
bool has_cores(int each, int local) {
  return std::int64_t{each} * local <=
         static_cast<std::int64_t>(std::thread::hardware_concurrency());
}

std::chrono::nanoseconds spin_of(int local) {
  return has_cores(2, local) ? kSpin : std::chrono::nanoseconds(0);
}

/// Takes some of those that are near, and says why.
std::vector<Nic> taken(const Near& near, int rank, const OfiOptions& options, const Share& share,
                       std::vector<NicStats>& stats) {
  std::vector<Nic> nics;
  const auto most = static_cast<std::size_t>(kMaxOfiEndpoints / std::max(options.endpoints, 1));
  const auto count = static_cast<std::size_t>(std::max(options.nics_per_rank, 0));
  for (const std::size_t i : choose_nics(near.distances, share, count, most)) {
    nics.push_back(near.nics[i]);
    stats.push_back({nics.back().name, nics.back().address, why(near, i, share), 0});
    if (!logs(LogLevel::info)) continue;
    log(LogLevel::info, rank, "nic",
        {{"provider", nics.back().info->fabric_attr->prov_name},
         {"name", stats.back().name},
         {"address", stats.back().address},
         {"why", stats.back().why}});
  }
  return nics;
}

/// Opens the endpoints of a rank on its NICs; what it says of them.
Handshake open_endpoints(const EndpointSetting& all, const OfiOptions& options,
                         const std::vector<Nic>& nics,
                         std::vector<std::unique_ptr<EndpointSet>>& sets) {
  const Library& loaded = library(all.rank);
  for (int endpoint = 0; endpoint < std::max(options.endpoints, 1); ++endpoint) {
    std::vector<Info> infos;
    for (const Nic& nic : nics) infos.push_back(endpoint > 0 ? for_latency(loaded, nic) : nic.info);
    EndpointSetting setting = all;
    setting.beats = endpoint == 0;
    setting.several = nics.size() > 1;
    sets.push_back(std::make_unique<EndpointSet>(loaded, endpoint, infos, setting));
  }
  Handshake said;
  said.provider = nics.front().info->fabric_attr->prov_name;
  const Identity here = this_identity();
  said.boot_id = here.boot_id;
  said.processes = std::to_string(here.process.pid_namespace);
  said.address = nics.front().address;
  for (const Nic& nic : nics) said.networks.push_back(nic.network);
  for (const auto& set : sets) {
    for (auto& name : set->names()) said.names.push_back(std::move(name));
  }
  return said;
}

class HandshakeExchange {
 public:
  HandshakeExchange(Bootstrap& bootstrap, const OfiOptions& options,
                    std::chrono::nanoseconds deadline, const OnWait& on_wait)
      : bootstrap_(bootstrap), options_(options), deadline_(deadline), on_wait_(on_wait) {}

  HandshakeResult run(const std::string& gpu) {
    offer(gpu);
    choose();
    exchange();
    start();
    return std::move(result_);
  }

 private:
  int rank() const { return bootstrap_.rank(); }

  /// Collective: a rank that cannot says so, so that nobody waits for it.
  template <class Said, class Make>
  std::vector<std::vector<std::byte>> tell(Said& said, Make make) {
    std::optional<Error> problem;
    try {
      in_words(rank(), "Group: network", make);
    } catch (const Error& error) {
      problem = error;
      said = {};
      said.problem = error.what();
    }
    auto all = bootstrap_.all_gather(to_bytes(said), deadline_, on_wait_);
    if (problem) throw *problem;
    return all;
  }

  void offer(const std::string& gpu) {
    Offer mine;
    const auto all = tell(mine, [&] {
      if (rank() == 0) mine.key = random_key(rank());
      mine.boot_id = this_identity().boot_id;
      near_ = look_around(library(rank()), rank(), options_, bootstrap_.own_address(), gpu);
      mine.nearest = near_.nearest_ids();
    });
    for (int peer = 0; peer < bootstrap_.size(); ++peer) {
      offers_.push_back(offer_from(all[static_cast<std::size_t>(peer)], rank(), peer));
    }
    check_offers(offers_, rank());
    result_.key = offers_[0].key;
  }

  void choose() { nics_ = taken(near_, rank(), options_, share_of(offers_, rank()), result_.nics); }

  void exchange() {
    Handshake mine;
    const auto all = tell(mine, [&] {
      const EndpointSetting setting{
          .rank = rank(), .size = bootstrap_.size(), .deadline = deadline_};
      mine = open_endpoints(setting, options_, nics_, result_.endpoint_sets);
    });
    for (int peer = 0; peer < bootstrap_.size(); ++peer) {
      handshakes_.push_back(handshake_from(all[static_cast<std::size_t>(peer)], rank(), peer));
    }
    check_handshakes(handshakes_, rank());
  }

  void start() {
    const Offer& mine = offers_[static_cast<std::size_t>(rank())];
    const auto local = std::count_if(offers_.begin(), offers_.end(), [&](const Offer& other) {
      return other.boot_id == mine.boot_id;
    });
    result_.local = static_cast<int>(local);
    result_.own = handshakes_[static_cast<std::size_t>(rank())];
    for (const Handshake& handshake : handshakes_) result_.places.push_back(place_of(handshake));
    result_.cores = has_cores(1, result_.local);
    for (std::size_t endpoint = 0; endpoint < result_.endpoint_sets.size(); ++endpoint) {
      std::vector<std::vector<Partner>> partners;
      for (int peer = 0; peer < bootstrap_.size(); ++peer) {
        partners.push_back(peer == rank() ? std::vector<Partner>()
                                          : partners_of(rank(), result_.own, peer,
                                                        handshakes_[static_cast<std::size_t>(peer)],
                                                        endpoint));
      }
      result_.endpoint_sets[endpoint]->start(result_.key, partners, spin_of(result_.local));
    }
  }

  Bootstrap& bootstrap_;
  const OfiOptions& options_;
  std::chrono::nanoseconds deadline_;
  const OnWait& on_wait_;
  Near near_{};
  std::vector<Nic> nics_{};
  std::vector<Offer> offers_{};
  std::vector<Handshake> handshakes_{};
  HandshakeResult result_{};
};

}  // namespace

fabric::Place place_of(const Handshake& handshake) {
  return {handshake.boot_id, handshake.processes,
          is_loopback(handshake.address) ? std::string() : handshake.address};
}

std::vector<Partner> partners_of(int rank, const Handshake& mine, int peer, const Handshake& theirs,
                                 std::size_t endpoint) {
  std::vector<Partner> partners;
  for (const NicPair& pair : pair_nics({rank, mine.networks}, {peer, theirs.networks})) {
    const std::size_t there = endpoint * theirs.networks.size() + pair.theirs;
    partners.push_back({pair.mine, there, theirs.names[there]});
  }
  return partners;
}

HandshakeResult join_handshakes(int rank, int size, const OfiOptions& options,
                                const Invitation& invitation, std::chrono::nanoseconds deadline) {
  HandshakeResult result;
  in_words(rank, "Group: network", [&] {
    const Near near = look_around(library(rank), rank, options, invitation.address, {});
    const auto local = static_cast<std::size_t>(invitation.local);
    const Share share{static_cast<std::size_t>(rank) % local, local};
    const std::vector<Nic> nics = taken(near, rank, options, share, result.nics);
    const EndpointSetting setting{.rank = rank, .size = size, .deadline = deadline};
    result.own = open_endpoints(setting, options, nics, result.endpoint_sets);
  });
  result.places.resize(static_cast<std::size_t>(size));
  result.key = invitation.key;
  result.local = invitation.local;
  result.cores = has_cores(1, result.local);
  const std::vector<std::vector<Partner>> nobody(static_cast<std::size_t>(size));
  for (const auto& set : result.endpoint_sets) {
    set->start(result.key, nobody, spin_of(result.local));
  }
  return result;
}

HandshakeResult exchange_handshakes(Bootstrap& bootstrap, const OfiOptions& options,
                                    const std::string& gpu, std::chrono::nanoseconds deadline,
                                    const OnWait& on_wait) {
  return HandshakeExchange(bootstrap, options, deadline, on_wait).run(gpu);
}

}  // namespace ferry::fabric::ofi
