// The making of a latency exchange: its memory, and what all ranks tell each other of theirs.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "cuda/engine.hpp"
#include "cuda/latency/engine.hpp"
#include "cuda/runtime/links.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kMakeOnGpu = "LatencyExchange";

/// What the kernels need of every rank's segment. `places`: of all ranks, but of holes.
std::vector<LatencyPeer> find_peers(CudaEngine& engine, const std::vector<LatencyPlace>& places,
                                    std::size_t bytes, const LatencyGroup& group,
                                    LatencyView& view) {
  fabric::DeviceMemory& wire = engine.gpu().wire();
  std::vector<LatencyPeer> peers(places.size());
  for (int peer = 0; peer < engine.size(); ++peer) {
    if (!engine.channel().has(peer)) continue;
    const fabric::SegmentId segment = places[static_cast<std::size_t>(peer)].segment();
    LatencyPeer& there = peers[static_cast<std::size_t>(peer)];
    there = {segment, wire.hold(peer, segment)};
    const bool alone = group.members.empty();
    view.peers[alone ? peer : group.members[static_cast<std::size_t>(peer)]] = there.memory.get();
    if (!there.memory || wire.bytes(peer, segment) < bytes) {
      engine.channel().throw_violation("LatencyExchange: buffers", peer,
                                       "named segment " + to_string(segment) + " of " +
                                           to_string(wire.bytes(peer, segment)) +
                                           " bytes, expected at least " + to_string(bytes));
    }
  }
  return peers;
}

/// What this rank would write to lost ranks stays here, where those would write: nobody reads it.
void join_holes(const CudaEngine& engine, std::byte* own, LatencyView& view) {
  for (int r = 0; r < engine.size(); ++r) {
    if (view.peers[r] == nullptr) join_rank(view, r, own, r, own);
  }
}

/// The ranks of other domains; the own one has joined.
void join_others(const LatencyGroup& group, LatencyView& view) {
  view.inbox = group.inbox;
  view.ll = 0;
  for (int r = 0; r < view.group.ranks; ++r) {
    if (std::binary_search(group.members.begin(), group.members.end(), r)) continue;
    const auto bit = static_cast<unsigned>(r);
    join_rank(view, r, group.outbox, r, group.inbox);
    view.beyond[bit / 32] |= 1u << bit % 32;
    if (view.layout.sum_blocks > 1) view.slots[r] = first_slot_row(view.layout, r, view.topk);
  }
}

LatencyView make_view(CudaEngine& engine, const LatencyConfig& config, const LatencyMemory& memory,
                      const LatencyGroup& group) {
  LatencyView view;
  view.group = engine.view();
  view.placement = engine.placement();
  if (!group.members.empty()) {
    view.group.rank = group.rank;
    view.group.ranks = group.placement.ranks;
    view.placement = group.placement;
  }
  view.layout = memory.wire;
  view.capacity = config.capacity;
  view.hidden = config.hidden;
  view.topk = config.topk;
  view.parts = latency_parts(config.hidden);
  view.ll = kLLTokens;
  view.dtype = config.dtype;
  return view;
}

/// Between this rank and all others of the epoch.
bool carries_ll128_to_all(CudaEngine& engine) {
  std::vector<cudaUUID_t> gpus;
  for (int peer = 0; peer < engine.size(); ++peer) {
    if (!engine.channel().has(peer)) continue;
    const auto bytes = engine.gpu().wire().gpu_of(peer);
    static_assert(sizeof(cudaUUID_t) == sizeof bytes);
    std::memcpy(&gpus.emplace_back(), bytes.data(), sizeof bytes);
  }
  return carries_ll128(engine.device().index, gpus);
}

/// All ranks say the same and where their memory is; what they said.
std::vector<LatencyPlace> open_exchange(Launch& launch, CudaEngine& engine,
                                        LatencyOpenParameters& open) {
  static_assert(sizeof(LatencyPlace) == 4);
  const std::shared_ptr<std::byte> slot = engine.pinned_words();
  open.group = engine.view();
  open.failure = launch.record()->failure;
  open.places = reinterpret_cast<LatencyPlace*>(slot.get());
  launch.keep(slot);
  launch.enter(open.call);
  launch.run(launch_latency_open(open, launch.stream()), "launch_latency_open");
  engine.finish(kMakeOnGpu, launch.finish());
  return {open.places, open.places + engine.size()};
}

}  // namespace

std::shared_ptr<CudaLatency> make_cuda_latency(std::shared_ptr<CudaEngine> engine,
                                               const LatencyConfig& config,
                                               const LatencyGroup& group) {
  const Placement placement = group.members.empty() ? engine->placement() : group.placement;
  LatencyParts parts{.config = config};
  std::optional<Error> invalid;
  Launch launch(*engine, kMakeOnGpu, nullptr);
  try {
    parts.memory = make_latency_memory(config, placement.experts, placement.ranks, group.domains);
    check_nobody_lost(config, engine->group_view().lost);
  } catch (const Error& error) {
    invalid = error;
  }
  parts.epoch = engine->epoch();
  LatencyOpenParameters open;
  open.call = latency_signature(config, !invalid);
  if (!invalid) parts.segment = engine->add_segment(kMakeOnGpu, parts.memory.bytes);
  if (!invalid && parts.segment.bytes == 0) {
    open.status = StepStatus::no_room;
    open.need_bytes = static_cast<std::int64_t>(parts.memory.bytes);
  }
  const bool ll128 = parts.memory.wire.ll128 && carries_ll128_to_all(*engine);
  open.place.word = parts.segment.id | (ll128 ? kCarriesLL128 : 0);
  std::vector<LatencyPlace> places;
  try {
    places = open_exchange(launch, *engine, open);
  } catch (const Error&) {
    if (invalid) throw *invalid;
    throw;
  }
  if (invalid) throw *invalid;
  const Launch turn(*engine, kMakeOnGpu, nullptr);  // no epoch begins before the exchange is one
  if (engine->epoch() != parts.epoch) {
    throw Error(ErrorKind::peer_failed,
                "LatencyExchange: the group has gone on in epoch " + to_string(engine->epoch()) +
                    " meanwhile; make the exchange anew",
                {engine->rank(), -1, kMakeOnGpu, 0, 0, 0});
  }
  LatencyView& view = parts.view = make_view(*engine, config, parts.memory, group);
  view.words = reinterpret_cast<LatencyWords*>(parts.segment.data + parts.memory.words);
  parts.peers = find_peers(*engine, places, parts.memory.bytes, group, view);
  join_domain(view);
  if (group.members.empty()) {
    join_holes(*engine, parts.segment.data, view);
  } else {
    join_others(group, view);
  }
  view.ll128 = parts.memory.wire.ll128;
  for (int peer = 0; peer < engine->size(); ++peer) {
    const bool can = places[static_cast<std::size_t>(peer)].carries_ll128();
    if (engine->channel().has(peer) && !can) view.ll128 = false;
  }
  if (config.masks) {
    parts.alarm = engine->take_alarm();
    view.alarm = reinterpret_cast<LatencyAlarm*>(parts.alarm.get());
  }
  const auto made = std::make_shared<CudaLatency>(std::move(engine), std::move(parts), group);
  made->begin();
  return made;
}

std::shared_ptr<LatencyEngine> CudaEngine::make_latency(const LatencyConfig& config) {
  return make_cuda_latency(shared_from_this(), config);
}

}  // namespace ferry::cuda
