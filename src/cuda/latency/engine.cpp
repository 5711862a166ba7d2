// Latency mode: the memory of an exchange, how it is made and its results given back; whom this
// rank goes on without. The kernels find that out; here are the caller's wishes, and what the
// caller learns without asking the GPU.
#include "cuda/latency/engine.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/engine.hpp"
#include "cuda/runtime/event.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kMakeOnGpu = "LatencyExchange";
constexpr std::int64_t kFewSlots = 8;  // tokens of all ranks
/// Two blocks on an SM are in each other's way up to here where rows cross as LL128, unless links
/// are far from full, as between two ranks (docs/experiments/cuda_latency.md).
constexpr std::int64_t kTokensOfOneBlock = 128;

/// What the kernels need of every rank's segment.
void find_peers(CudaEngine& engine, const LatencyPlace* places, std::size_t bytes,
                const LatencyGroup& group, LatencyView& view) {
  fabric::DeviceMemory& wire = engine.gpu().wire();
  for (int peer = 0; peer < engine.size(); ++peer) {
    const fabric::SegmentId segment = places[peer].segment;
    const bool alone = group.members.empty();
    std::byte*& memory = view.peers[alone ? peer : group.members[static_cast<std::size_t>(peer)]];
    memory = wire.pointer(peer, segment);
    if (memory == nullptr || wire.bytes(peer, segment) < bytes) {
      engine.channel().throw_violation("LatencyExchange: buffers", peer,
                                       "named segment " + to_string(segment) + " of " +
                                           to_string(wire.bytes(peer, segment)) +
                                           " bytes, expected at least " + to_string(bytes));
    }
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
  view.ll128 = engine.carries_ll128() && memory.wire.ll128;
  view.dtype = config.dtype;
  return view;
}

constexpr const char* kRejoin = "latency rejoin";

/// Kernels write it meanwhile. Acquire: who sees it sees what was written before.
template <class T>
T load(const T& word) {
  return std::atomic_ref(const_cast<T&>(word)).load(std::memory_order_acquire);
}

}  // namespace

CallSignature latency_signature(const LatencyConfig& config, bool valid) {
  CallSignature call;
  call.kind = CallKind::latency;
  call.dtype = static_cast<std::uint32_t>(config.dtype);
  call.elements = valid ? config.hidden : -1;  // peers are told that this rank's cannot be
  call.latency.capacity = config.capacity;
  call.latency.topk = static_cast<std::uint32_t>(config.topk);
  call.latency.has_masks = config.masks ? 1 : 0;
  call.latency.order = static_cast<std::uint32_t>(config.order);
  return call;
}

CudaLatency::CudaLatency(std::shared_ptr<CudaEngine> engine, const LatencyConfig& config,
                         const LatencyMemory& memory, const fabric::Segment& segment,
                         const LatencyView& view, std::shared_ptr<std::byte> alarm,
                         const LatencyGroup& group)
    : engine_(std::move(engine)),
      config_(config),
      memory_(memory),
      segment_(segment),
      view_(view),
      alarm_(std::move(alarm)),
      outside_memory_(group.memory),
      told_(group.told) {}

LatencyLease::~LatencyLease() {
  engine_->drop(result_);
}

void CudaLatency::drop(std::size_t result) {
  std::scoped_lock lock(mutex_);
  results_[result].alive = false;
}

int CudaLatency::blocks(std::int64_t tokens) const {
  // All of a call must run at once; beside another rank's, whose next kernel may come early, too.
  const int num_sms = engine_->local_sms();
  // Where there is little to do, blocks that have nothing to do cost more than they save.
  if (config_.capacity * ranks() <= kFewSlots) return std::max(1, num_sms / 4);
  // As long as each part of a row finds a warp of its own, more blocks only have more to begin.
  const std::int64_t parts = tokens * ranks() * view_.parts;
  const bool fits = parts <= std::int64_t{num_sms} * (kLatencyThreads / 32);
  return engine_->shares_gpu() || fits ? num_sms : kLatencyBlocksPerSm * num_sms;
}

int CudaLatency::dispatch_blocks(std::int64_t tokens, Halves halves) const {
  const bool crowded = halves == Halves::send || (halves == Halves::both && ranks() > 2);
  const int most = blocks(tokens);
  return view_.ll128 && crowded && tokens <= kTokensOfOneBlock
             ? std::min(engine_->local_sms(), most)
             : most;
}

std::shared_ptr<CudaLatency> make_cuda_latency(std::shared_ptr<CudaEngine> engine,
                                               const LatencyConfig& config,
                                               const LatencyGroup& group) {
  const Placement placement = group.members.empty() ? engine->placement() : group.placement;
  LatencyMemory memory{};
  std::optional<Error> invalid;
  try {
    memory = make_latency_memory(config, placement.experts, placement.ranks, group.domains);
  } catch (const Error& error) {
    invalid = error;
  }
  Launch launch(*engine, kMakeOnGpu, nullptr);
  LatencyOpenParameters open;
  open.group = engine->view();
  open.call = latency_signature(config, !invalid);
  open.failure = launch.record()->failure;
  fabric::Segment segment{};
  if (!invalid) segment = engine->add_segment(kMakeOnGpu, memory.bytes);
  if (!invalid && segment.bytes == 0) {
    open.status = StepStatus::no_room;
    open.need_bytes = static_cast<std::int64_t>(memory.bytes);
  }
  open.segment = segment.id;
  static_assert(sizeof(LatencyPlace) == 4);
  const std::shared_ptr<std::byte> slot = engine->pinned_words();
  open.places = reinterpret_cast<LatencyPlace*>(slot.get());
  launch.keep(slot);
  launch.enter(open.call);
  launch.run(launch_latency_open(open, launch.stream()), "launch_latency_open");
  const Event event = launch.finish();
  try {
    engine->finish(kMakeOnGpu, event);
  } catch (const Error&) {
    if (invalid) throw *invalid;
    throw;
  }
  if (invalid) throw *invalid;
  LatencyView view = make_view(*engine, config, memory, group);
  view.words = reinterpret_cast<LatencyWords*>(segment.data + memory.words);
  find_peers(*engine, open.places, memory.bytes, group, view);
  join_domain(view);
  if (!group.members.empty()) join_others(group, view);
  std::shared_ptr<std::byte> alarm;
  if (config.masks) {
    alarm = engine->take_alarm();
    view.alarm = reinterpret_cast<LatencyAlarm*>(alarm.get());
  }
  engine->add_latency_memory(segment, config.masks ? view.layout.gone : 0);
  return std::make_shared<CudaLatency>(std::move(engine), config, memory, segment, view,
                                       std::move(alarm), group);
}

std::shared_ptr<LatencyEngine> CudaEngine::make_latency(const LatencyConfig& config) {
  now_.check_whole("LatencyExchange");
  check_not_elastic(config_, rank());
  return make_cuda_latency(shared_from_this(), config);
}

void throw_evicted(const LatencyAlarm& alarm, const char* call, int rank) {
  const std::uint32_t behind = load(alarm.behind);
  if (behind == 0) return;
  const int peer = static_cast<int>(behind) - 1;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank) + ": " + call + ": rank " + to_string(peer) +
                  " has masked this rank and goes on without it: evicted; its results since "
                  "may lack rows. Call rejoin on all ranks to come back",
              {rank, peer, call, 0, 0, 0});
}

LatencyAlarm& CudaLatency::alarm() const {
  if (!alarm_) {
    throw Error(ErrorKind::invalid_argument,
                "latency masks: the exchange was made without masks; expected "
                "LatencyConfig::masks = true");
  }
  return *reinterpret_cast<LatencyAlarm*>(alarm_.get());
}

void CudaLatency::check_evicted(const char* call) const {
  if (!alarm_) return;
  if (must_rejoin_.load()) {
    throw Error(ErrorKind::evicted,
                "rank " + to_string(rank()) + ": " + call +
                    ": the last rejoin of this exchange failed on this rank; rejoin again",
                {rank(), rank(), call, 0, 0, 0});
  }
  throw_evicted(alarm(), call, rank());
}

void CudaLatency::check_current(const char* call, const LatencyRound& round) const {
  if (round.rejoins == rejoins_.load()) return;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank()) + ": " + call +
                  ": this result is of a dispatch before the last rejoin; its rows may still be "
                  "read, but neither received nor combined",
              {rank(), rank(), call, 0, 0, 0});
}

std::vector<bool> CudaLatency::masked() const {
  const LatencyAlarm& told = alarm();
  std::vector<bool> masked;
  for (int r = 0; r < ranks(); ++r) masked.push_back(load(told.ranks[r]) != 0);
  return masked;
}

const std::uint64_t* CudaLatency::mask_count() const {
  return &alarm().masked;
}

/// Behind all earlier calls; on return it is done.
void CudaLatency::change_mask(const char* call, int rank, bool masked) {
  in_group(call, [&] {
    Launch launch(*engine_, call, nullptr);
    launch.enter_apart(signature(CallKind::latency));
    launch.run(launch_latency_mask(view_, rank, masked, launch.stream()), "launch_latency_mask");
    engine_->finish(call, launch.finish());
  });
}

void CudaLatency::set_mask(int rank, bool masked) {
  (void)alarm();
  if (rank < 0 || rank >= ranks() || rank == view_.group.rank) {
    refuse("set_mask", "rank", to_string(rank),
           "another rank of the group, 0 … " + to_string(ranks() - 1));
  }
  change_mask("set_mask", rank, masked);
}

void CudaLatency::clear_masks() {
  (void)alarm();
  change_mask("clear_masks", -1, false);
}

void CudaLatency::rejoin() {
  (void)alarm();
  in_group(kRejoin, [&] { launch_rejoin(); });
}

void CudaLatency::launch_rejoin() {
  Launch launch(*engine_, kRejoin, nullptr);
  LatencyRejoinParameters parameters;
  parameters.view = view_;
  parameters.failure = launch.record()->failure;
  // From here on the other ranks may have gone on to generations that this one does not know.
  must_rejoin_.store(true);
  rejoins_.fetch_add(1);
  launch.enter_apart(signature(CallKind::latency));
  launch.run(launch_latency_rejoin(parameters, launch.stream()), "launch_latency_rejoin");
  engine_->finish(kRejoin, launch.finish());
  must_rejoin_.store(false);
}

}  // namespace ferry::cuda
