// Latency mode: how results are given back; whom this rank goes on without, in an epoch of the
// group and from one to the next. The kernels find out who is late; here are the caller's wishes,
// and what the caller learns without asking the GPU.
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

constexpr std::int64_t kFewSlots = 8;  // tokens of all ranks
/// Two blocks on an SM are in each other's way up to here where rows cross as LL128, unless links
/// are far from full, as between two ranks (docs/experiments/cuda_latency.md).
constexpr std::int64_t kTokensOfOneBlock = 128;

constexpr const char* kRejoin = "latency rejoin";

/// Kernels write it meanwhile. Acquire: who sees it sees what was written before.
template <class T>
T load(const T& word) {
  return std::atomic_ref(const_cast<T&>(word)).load(std::memory_order_acquire);
}

}  // namespace

CudaLatency::CudaLatency(std::shared_ptr<CudaEngine> engine, LatencyParts parts,
                         const LatencyGroup& group)
    : engine_(std::move(engine)),
      config_(parts.config),
      memory_(parts.memory),
      segment_(std::move(parts.segment)),
      view_(parts.view),
      alarm_(std::move(parts.alarm)),
      peers_(std::move(parts.peers)),
      made_in_(parts.epoch),
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

void throw_evicted(const LatencyAlarm& alarm, const char* call, int rank) {
  const std::uint32_t behind = load(alarm.behind);
  if (behind == 0) return;
  const int peer = static_cast<int>(behind) - 1;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank) + ": " + call + ": rank " + to_string(peer) +
                  " has masked this rank and goes on without it: evicted; its results since "
                  "may lack rows. Call rejoin on all ranks to come back, or regroup",
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
  if (!alarm_) return check_nobody_lost_since(call, made_in_, lost());
  if (must_rejoin_.load()) {
    throw Error(ErrorKind::evicted,
                "rank " + to_string(rank()) + ": " + call +
                    ": the last rejoin of this exchange, or regroup of its group, failed on this "
                    "rank; rejoin again, or regroup",
                {rank(), rank(), call, 0, 0, 0});
  }
  throw_evicted(alarm(), call, rank());
}

void CudaLatency::check_current(const char* call, const LatencyRound& round) const {
  if (round.rejoins == rejoins_.load()) return;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank()) + ": " + call +
                  ": this result is of a dispatch before the last rejoin or regroup; its rows may "
                  "still be read, but neither received nor combined",
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
  const std::vector<int> gone = lost();
  if (!masked && std::binary_search(gone.begin(), gone.end(), rank)) {
    refuse("set_mask", "rank", to_string(rank) + ", which was lost", "a rank that is here");
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

std::vector<int> CudaLatency::lost() const {
  const std::scoped_lock lock(mutex_);
  return lost_;
}

template <class LaunchKernel>
void CudaLatency::run_alone(const char* kernel, const LaunchKernel& launch) const {
  const OnDevice here(engine_->device().index);
  GpuMemory& gpu = engine_->gpu();
  const cudaStream_t own = gpu.own().stream;
  check(launch(own), kernel);
  const GpuEvent done = gpu.events()->take();
  check(cudaEventRecord(done.get(), own), "cudaEventRecord");
  poll([&] { return is_done(done); }, engine_->config().deadline, engine_->config().on_wait);
}

std::uint64_t CudaLatency::newest_used() {
  const std::shared_ptr<std::byte> word = engine_->pinned_words();
  auto* newest = reinterpret_cast<std::uint64_t*>(word.get());
  run_alone("launch_latency_newest",
            [&](cudaStream_t stream) { return launch_latency_newest(view_, newest, stream); });
  return load(*newest);
}

void CudaLatency::go_on_after(std::uint64_t generation, std::uint64_t epoch) {
  LatencyEpochParameters parameters;
  parameters.view = view_;
  parameters.generation = generation;
  parameters.epoch = static_cast<std::uint32_t>(epoch);
  for (const int r : lost()) parameters.lost[r / 32] |= 1u << r % 32;
  run_alone("launch_latency_epoch",
            [&](cudaStream_t stream) { return launch_latency_epoch(parameters, stream); });
}

void CudaLatency::begin() {
  constexpr std::uint64_t kFirst = 2;  // below it there are no two buffers
  std::vector<std::shared_ptr<std::byte>> held;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].memory) lost_.push_back(static_cast<int>(r));
    held.push_back(peers_[r].memory);
  }
  if (!lost_.empty()) go_on_after(kFirst, made_in_);
  engine_->add_latency_memory({.memory = segment_,
                               .gone = alarm_ ? view_.layout.gone : 0,
                               .exchange = weak_from_this(),
                               .held = std::move(held)});
}

/// A rank that is lost to the exchange remains so: another process has other memory.
void CudaLatency::begin_epoch(const engine::Epoch& next) {
  const fabric::DeviceMemory& wire = engine_->gpu().wire();
  std::vector<int> gone;
  for (int r = 0; r < ranks(); ++r) {
    const LatencyPeer& peer = peers_[static_cast<std::size_t>(r)];
    const bool here = peer.memory && engine_->channel().has(r) &&
                      wire.pointer(r, peer.segment) == peer.memory.get();
    if (!here) gone.push_back(r);
  }
  {
    const std::scoped_lock lock(mutex_);
    lost_ = std::move(gone);
  }
  rejoins_.fetch_add(1);
  if (!alarm_ && !lost().empty()) return;  // no call comes any more
  go_on_after(next.first, next.number);
  must_rejoin_.store(false);
}

}  // namespace ferry::cuda
