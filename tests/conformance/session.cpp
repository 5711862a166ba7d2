#include "session.hpp"

#include "core/domains.hpp"
#include "device.hpp"

namespace ferry::conformance {

Group& Session::group(const Case& c) {
  auto& slot = groups_[{c.experts(), c.small_memory}];
  if (!slot) {
    GroupConfig config = group_config(rank_, c.experts(), c.small_memory ? 4096 : 4 << 20);
    config.sim_seed = c.seed;
    slot = std::make_unique<Group>(rank_.bootstrap(), config);
    const MemoryStats hint = Group::memory_hint(config, rank_.size());
    const MemoryStats use = slot->memory();
    const Domains domains = Domains::blocks(rank_.size(), config.domain_size);
    const bool whole =
        domains.members(domains.of(rank_.rank())).size() == domains.members(0).size();
    rank_.check(
        whole ? use == hint
              : use.control_bytes <= hint.control_bytes && use.arena_bytes <= hint.arena_bytes,
        "memory() after creation differs from memory_hint()");
  }
  return *slot;
}

LatencyExchange& Session::latency(const Case& c) {
  Group& owner = group(c);
  // Rank-major results do without room to fan out, and with it.
  const RowOrder order = c.seed % 3 == 0 ? c.results : RowOrder::expert_major;
  auto& slot = exchanges_[{c.experts(), c.hidden, c.topk, c.dtype, c.capacity, order}];
  if (!slot) {
    LatencyConfig config{c.capacity, c.hidden, c.topk, c.dtype};
    config.order = order;
    const std::size_t before = owner.memory().latency_bytes;
    slot = std::make_unique<LatencyExchange>(owner, config);
    rank_.equal(owner.memory().latency_bytes - before,
                LatencyExchange::memory_hint(config, c.experts(), rank_.size(), rank_.where().kind,
                                             owner.domains()),
                "bytes of a latency exchange");
  }
  return *slot;
}

Stream* Session::stream(const Case& c) {
  if (!c.stream) return nullptr;
  if (!stream_) stream_ = make_stream(rank_.where());
  return stream_.get();
}

void Session::tidy() {
  if (exchanges_.size() < 8 && groups_.size() < 8) return;
  exchanges_.clear();
  // A rank may leave only when nobody still exchanges.
  for (auto& [key, group] : groups_) group->barrier();
  groups_.clear();
  poisoned_.clear();
}

int hierarchical_size(const Rank& rank, const Plan& plan) {
  const Wires& wires = rank.wires();
  const Crossing crossing =
      wires.crossing == Crossing::automatic ? plan.crossing() : wires.crossing;
  const bool one_domain = wires.domain_size >= rank.size();
  return crossing == Crossing::hierarchical && !one_domain ? wires.domain_size : 0;
}

bool shares_before(const Case& a, const Case& b) {
  const auto shared = [](const Case& c) {
    return std::tuple(c.expert_kind, c.small_memory, c.mode, c.dtype, c.hidden, c.topk);
  };
  return shared(a) < shared(b);
}

void run_case(Session& session, const Case& c, const std::string& label) {
  session.rank().begin(label + to_string(c));
  session.tidy();
  if (c.mode == Mode::throughput) {
    run_throughput(session, c);
  } else {
    run_latency(session, c);
  }
}

}  // namespace ferry::conformance
