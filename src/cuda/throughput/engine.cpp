// The CUDA engine of a group: its memory, the number of SMs of a call (sms_for), the end of its
// calls.
#include "cuda/throughput/engine.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "core/layout.hpp"
#include "cuda/kernels/base/barrier.hpp"
#include "cuda/kernels/base/group_view.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/exchange.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "cuda/throughput/regroup.hpp"
#include "cuda/throughput/turn.hpp"
#include "cuda/throughput/vault.hpp"
#include "engine/membership/aside.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {

using namespace std::chrono_literals;
using std::to_string;

ControlLayout offer_layout(int ranks) {
  ControlLayout layout = make_control_layout(ranks, sizeof(StepMessage) + fabric::kMaxHandleBytes);
  const auto sources = static_cast<std::size_t>(ranks);
  Carver carver{layout.bytes};
  layout.swap_flags = carver.take(sources * kLineBytes);
  layout.delivered = carver.take(sources * kLineBytes);
  layout.mailbox = carver.take(2 * sources * layout.message_bytes);
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

ControlLayout cpu_layout(int ranks) {
  ControlLayout layout = make_control_layout(ranks, sizeof(StepMessage) + fabric::kMaxHandleBytes);
  layout.bytes = offer_layout(ranks).bytes;
  return layout;
}

std::size_t cpu_control_bytes(const GroupConfig& config, int ranks) {
  const std::size_t flags = cpu_layout(ranks).bytes;
  if (!config.elastic.empty()) return flags + round_up(sizeof(GpuPage), 4096);
  return flags + (config.tune.value_or(false) ? engine::TimeSwap::bytes(ranks) : 0);
}

namespace {

std::size_t count_words(const Placement& placement, int rank) {
  const auto ranks = static_cast<std::size_t>(placement.ranks);
  return ranks * ranks + ranks * static_cast<std::size_t>(placement.local_experts(rank));
}

}  // namespace

CudaEngine::CudaEngine(const GroupConfig& config, Parts parts)
    : config_(config),
      parts_(std::move(parts)),
      placement_{config.experts, parts_.cpu->fabric->size()},
      channel_(parts_.cpu, config_, parts_.cpu_control, cpu_layout(placement_.ranks)),
      segments_(channel_, parts_.cpu_control, offer_layout(placement_.ranks)),
      tuner_(config_, placement_.ranks),
      clock_(parts_.gpu->device()),
      now_(channel_.rank(), channel_.size()) {
  channel_.swap_beside_calls();
  constexpr std::size_t kCalls = 256;  // records of calls in flight or kept by events
  const std::size_t slot =
      round_up(sizeof(HostCounts), 16) + count_words(placement_, rank()) * sizeof(std::int32_t);
  failures_ = PinnedPool::make(sizeof(CallSlot), kCalls);
  counts_ = PinnedPool::make(slot, plans_at_once(slot));
  constexpr std::size_t kExchanges = 4;  // with masks; more come when they are needed
  alarms_ = PinnedPool::make(sizeof(LatencyAlarm), kExchanges);
  words_.slot = PinnedPool::make(2 * kLineBytes + sizeof(Failure), 1)->take();
  words_.fatal = reinterpret_cast<Failure*>(words_.slot.get());
  words_.abort =
      reinterpret_cast<std::uint32_t*>(words_.slot.get() + round_up(sizeof(Failure), kLineBytes));
  staging_ = PinnedPool::make(kWriteBytes + sizeof(PeerWords) + kLineBytes, 1)->take();
  aux_ = make_urgent_stream();
  view_.rank = rank();
  view_.ranks = size();
  view_.control = parts_.control.data;
  view_.layout = parts_.layout;
  view_.segments = reinterpret_cast<const PeerSegment*>(parts_.control.data + parts_.layout.bytes);
  view_.fatal = words_.fatal;
  view_.abort = words_.abort;
  view_.deadline_ns = static_cast<std::uint64_t>(config_.deadline.count());
  if (tuner_.on() && !elastic()) {
    times_.emplace(channel_, *parts_.cpu->fabric, parts_.cpu_control, cpu_layout(size()).bytes);
  }
  control_bytes_ = parts_.cpu_control.bytes + 4096 + parts_.control.bytes;
}

void CudaEngine::start() {
  for (int peer = 0; peer < size(); ++peer) write_table(peer);
  load_copies();
  monitor_ = std::thread([this] { monitor(); });
}

void CudaEngine::start_alone(std::uint64_t ticket) {
  const OnDevice here(device().index);
  write_table(rank());
  load_copies();
  EpochChange(*this).enter(ticket);
  monitor_ = std::thread([this] { monitor(); });
}

/// The driver's own kernels for copies are loaded now, and not while a kernel waits for peers.
void CudaEngine::load_copies() {
  GpuMemory& memory = *parts_.gpu;
  const std::size_t most = std::min<std::size_t>(memory.registered().total_bytes() / 4, 1 << 20);
  const cudaStream_t own = memory.own().stream;
  const Held held = memory.take_registered(2 * most, memory.own());
  if (!held) return;
  for (const std::size_t odd : {0, 4}) {
    check(cudaMemsetAsync(held.data() + odd, 0xff, most - odd, own), "cudaMemsetAsync");
    for (const std::size_t bytes : {std::size_t{64}, most - odd}) {
      check(cudaMemcpyAsync(held.data() + most, held.data() + odd, bytes, cudaMemcpyDeviceToDevice,
                            own),
            "cudaMemcpyAsync");
    }
  }
  const GpuEvent done = memory.events()->take();
  check(cudaEventRecord(done.get(), own), "cudaEventRecord");
  poll([&] { return is_done(done); }, config_.deadline, config_.on_wait);
}

CudaEngine::~CudaEngine() {
  destroy();
  if (monitor_.joinable()) monitor_.join();
  try {
    const OnDevice here(device().index);
    // A kernel that does not end may still write: its memory is never given back.
    if (!drain(0s) || cudaStreamQuery(aux_) == cudaErrorNotReady) {
      new Parts(parts_);
      new GroupWords(words_);
      new std::deque<Flight>(in_flight_);
      new std::vector<LatencySegment>(latency_segments_);
      new std::vector<std::shared_ptr<void>>{failures_, counts_, alarms_, staging_};
    }
    cudaStreamDestroy(aux_);
  } catch (...) {  // the GPU is going away
  }
}

void CudaEngine::destroy() {
  if (leaving_.exchange(true, std::memory_order_acq_rel)) return;
  constexpr auto kPolite = 500ms;  // for calls that need no more than their own time
  constexpr auto kMost = 2s;       // for kernels that were told to stop
  bool drained = false;
  std::uint64_t ended = 0;  // unknown: missed in every call
  try {
    const OnDevice here(device().index);
    drained = !channel_.dead() && drain(kPolite);
    ended = ended_calls();
  } catch (...) {  // the GPU has failed: leave all the same
  }
  channel_.count(ended);  // who still needs this rank in a later call misses it
  const bool left = channel_.leave();
  words_.raise_abort();
  try {
    const OnDevice here(device().index);
    if (!drained) drained = drain(kMost);
    if (left && drained && comes_to_rest(kMost)) channel_.say_at_rest();
  } catch (...) {
  }
  stopping_.store(true, std::memory_order_release);
  if (monitor_.joinable() && monitor_.get_id() != std::this_thread::get_id()) monitor_.join();
}

bool CudaEngine::drain(std::chrono::nanoseconds most) {
  std::vector<std::shared_ptr<CallRecord>> flying;
  {
    std::scoped_lock lock(flight_mutex_);
    for (const Flight& flight : in_flight_) flying.push_back(flight.record);
  }
  const auto start = std::chrono::steady_clock::now();
  for (const auto& record : flying) {
    (void)record->end(*gpu().events());  // what has failed tells nothing
    while (!record->has_ended()) {
      if (std::chrono::steady_clock::now() - start >= most) return false;
      std::this_thread::sleep_for(50us);
    }
  }
  return true;
}

void CudaEngine::check_usable(const char* call) {
  if (words_.failed() && !channel_.left()) (void)fatal_error();  // tells the channel
  channel_.check_usable(call);
}

void CudaEngine::throw_untold(const char* call) {
  std::shared_ptr<CallRecord> refused;
  {
    std::scoped_lock lock(flight_mutex_);
    std::erase_if(untold_, [&](const std::shared_ptr<CallRecord>& record) {
      if (record->told.load(std::memory_order_acquire)) return true;
      if (refused || !record->asker.expired()) return false;
      refused = record;
      return true;
    });
  }
  std::erase_if(captured_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : captured_) {
    const auto record = weak.lock();
    if (refused || !record || !record->refused()) continue;
    if (std::exchange(record->told_replay, record->failure->written) != record->failure->written) {
      refused = record;
    }
  }
  if (!refused) return;
  refused->tell();
  const Error error = refusal(*this, *refused);
  throw Error(error.kind(),
              std::string(call) +
                  ": an earlier call failed, and nobody waited for its event: " + error.what(),
              error.context());
}

int CudaEngine::sms_for(const char* call, int asked, int by_default) const {
  if (asked < 0 || asked > parts_.num_sms) {
    refuse(call, "num_sms", to_string(asked),
           "1 … " + to_string(parts_.num_sms) + ", the SMs of this GPU, or 0: a default");
  }
  const int most = std::clamp(parts_.num_sms / parts_.sharing, 1, kMaxBlocks);
  return std::min(asked == 0 ? by_default : asked, most);
}

int CudaEngine::tuned_sms(Launch& launch, int asked, std::int64_t tokens, bool split,
                          TuningKey key) {
  if (asked != 0 || !tuner_.on()) return sms_for(launch.name(), asked);
  key.tokens_class = tokens_class_of(tokens);
  if (split || !times_) {
    const int given = tuner_.as_started(key);
    return given > 0 ? sms_for(launch.name(), 0, given) : sms_for(launch.name(), 0);
  }
  if (launch.capture().active) return sms_for(launch.name(), 0, tuner_.best(key));
  const engine::LateTuner::Choice choice = tuner_.next(key, tokens, calls_ + 1);
  if (choice.timed) launch.time(choice.number);
  return sms_for(launch.name(), 0, choice.num_sms);
}

void CudaEngine::take_times() {
  if (!times_) return;
  clock_.tell(tuner_);
  times_->go_on(tuner_);
}

std::vector<TunedCall> CudaEngine::tuning() const {
  return tuner_.tuned();
}

std::optional<std::vector<Held>> CudaEngine::take_registered(Launch& launch,
                                                             const std::vector<std::size_t>& sizes,
                                                             Pieces pieces) {
  constexpr int kTries = 4;  // other threads may take what was added
  for (int i = 0; i < kTries; ++i) {
    std::vector<Held> taken;
    for (const std::size_t bytes : sizes) {
      Held held = take_unwritten(bytes, launch.user(), pieces);
      if (!held) break;
      taken.push_back(std::move(held));
    }
    if (taken.size() == sizes.size()) return taken;
    taken.clear();
    if (pieces == Pieces::spare || !grow(launch.name(), engine::Regions::total(sizes))) break;
  }
  return std::nullopt;
}

/// A piece of registered memory to which no lost rank writes; nothing: there is none.
Held CudaEngine::take_unwritten(std::size_t bytes, const User& user, Pieces pieces) {
  constexpr auto kMost = 1s;  // after so long the lost process is no killed one: it may run on
  const auto until = std::chrono::steady_clock::now() + kMost;
  for (;;) {
    Held held =
        pieces == Pieces::idle ? gpu().take_idle(bytes, user) : gpu().take_registered(bytes, user);
    if (held && quarantine_.keeps(held)) {
      // It goes back by another thread, when the stream may be gone.
      gpu().settle(held, gpu().events()->record(gpu().own().stream));
      continue;
    }
    if (held || quarantine_.empty() || std::chrono::steady_clock::now() >= until) return held;
    std::this_thread::sleep_for(1ms);
    if (config_.on_wait) config_.on_wait();
  }
}

Tensor CudaEngine::local_tensor(Launch& launch, const Extents& shape, Dtype dtype) {
  Held held = gpu().take_local(checked_bytes("result", "shape", shape, dtype), launch.user());
  launch.outlives(held.owner);
  return {TensorView(held.data(), dtype, shape, device()), held.owner};
}

Plan CudaEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  return plan_routes(*this, topk_idx, options);
}

Received CudaEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                              const DispatchOptions& options) {
  return cuda::dispatch(*this, x, plan, options);
}

Received CudaEngine::plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                       const DispatchOptions& options) {
  return cuda::plan_and_dispatch(*this, x, topk_idx, options);
}

Combined CudaEngine::combine(const ConstTensorView& rows, const Plan& plan,
                             const CombineOptions& options) {
  return cuda::combine(*this, rows, plan, options);
}

Tensor CudaEngine::empty(const Extents& shape, Dtype dtype) {
  check_usable("empty");
  const std::size_t bytes = checked_bytes("empty", "shape", shape, dtype);
  const OnDevice here(device().index);
  const Held held = take_unwritten(bytes, gpu().own(), Pieces::spare);
  if (!held) {
    throw Error(ErrorKind::exhausted,
                "empty: shape " + to_string(shape) + " of " + std::string(name_of(dtype)) +
                    " needs " + to_string(bytes) + " bytes, but " +
                    to_string(gpu().registered().used_bytes()) + " of the group's " +
                    to_string(gpu().registered().total_bytes()) +
                    " bytes of registered memory are used, and it holds the tensor in one piece; "
                    "use a smaller shape, drop tensors, or make the group with larger memory_bytes",
                {rank(), rank(), "empty", channel_.generation(), 0, 0});
  }
  // The caller writes on any stream, so its memory must be free for all of them now.
  const GpuEvent free = gpu().events()->take();
  check(cudaEventRecord(free.get(), gpu().own().stream), "cudaEventRecord");
  poll([&] { return is_done(free); }, config_.deadline, config_.on_wait);
  return {TensorView(held.data(), dtype, shape, device()), held.owner};
}

bool CudaEngine::is_registered(const void* pointer) const {
  return parts_.gpu->registered().find(pointer, 1).has_value() || is_latency_memory(pointer);
}

void CudaEngine::record_stream(const void* pointer, const Stream& stream) {
  check_stream("record_stream", &stream, device());
  if (gpu().record_stream(pointer, static_cast<cudaStream_t>(stream.native()))) return;
  if (is_latency_memory(pointer)) return;  // never goes back while the exchange lives
  refuse("record_stream", "pointer", "memory of others", "memory of a tensor of this group");
}

void CudaEngine::barrier() {
  Launch launch(*this, "barrier", nullptr);
  BarrierParameters parameters;
  parameters.group = view_;
  parameters.call.kind = CallKind::barrier;
  parameters.failure = launch.record()->failure;
  launch.enter(parameters.call);
  launch.run(launch_barrier(parameters, launch.stream()), "launch_barrier");
  finish("barrier", launch.finish());
}

std::vector<std::vector<std::byte>> CudaEngine::gather(std::span<const std::byte> mine) {
  return cuda::gather(*this, mine);
}

bool CudaEngine::commit(std::uint64_t step) {
  const std::optional<Error> refusal = now_.refusal_of(step);
  Launch launch(*this, "commit", nullptr);
  const auto slot = launch.record()->slot;
  BarrierParameters parameters;
  parameters.group = view_;
  parameters.call.kind = CallKind::commit;
  parameters.call.commit.step = step;
  parameters.one_waits = regroup_ && regroup_->one_waits();
  parameters.any_waits = &launch.record()->pinned().any_waits;
  parameters.failure = launch.record()->failure;
  launch.enter(parameters.call);
  launch.run(launch_barrier(parameters, launch.stream()), "launch_barrier");
  try {
    finish("commit", launch.finish());
  } catch (const Error& error) {
    if (refusal && error.kind() == ErrorKind::mismatch) throw *refusal;
    throw;
  }
  if (refusal) throw *refusal;  // on all ranks alike: they have the same step
  now_.commit(step);
  return reinterpret_cast<const CallSlot*>(slot.get())->any_waits != 0;
}

void CudaEngine::check_can_regroup(const char* call) const {
  engine::Regroup::check_possible(call, *parts_.cpu, false, domains());
}

std::string CudaEngine::still_runs(const char* call) const {
  return "rank " + to_string(rank()) + ": " + call + ": work on cuda:" + to_string(device().index) +
         " did not end within the deadline, so its calls may still run; call " + call + " again";
}

void CudaEngine::await_calls(const char* call) {
  const OnDevice here(device().index);
  if (drain(config_.deadline)) return;
  throw Error(ErrorKind::deadline, still_runs(call),
              {rank(), rank(), call, channel_.generation(), 0, 0});
}

/// Whether this rank writes to no other any more; throws where the GPU has failed or is late.
bool CudaEngine::comes_to_rest(std::chrono::nanoseconds most) {
  const std::unique_lock turn(turn_, most);  // a call of another thread may have begun
  if (!turn) return false;
  if (has_graphs_) await_device(most, "destroy");  // of replays the group knows nothing
  return true;
}

void CudaEngine::await_device(std::chrono::nanoseconds most, const char* call) {
  engine::at_most_for<void>(most, still_runs(call), [device = device().index] {
    const OnDevice here(device);
    // Or a capture of any thread would be broken off.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}

std::shared_ptr<VaultEngine> CudaEngine::make_vault(std::size_t version_bytes) {
  check_usable("Vault");
  check_can_regroup("Vault");
  const auto turn = take_turn(turn_, config_.on_wait, [this] { check_usable("Vault"); });
  if (!vault_on_gpu_) {
    await_calls("Vault");
    vault_on_gpu_ = std::make_unique<VaultOnGpu>(*this);
  }
  return vault_.open(*vault_on_gpu_, version_bytes);
}

ferry::GroupView CudaEngine::regroup() {
  return EpochChange(*this).run();
}

void CudaEngine::regroup_inside(
    const std::function<engine::Epoch(engine::Generation used)>& agree) {
  EpochChange(*this).run_inside(agree);
}

MemoryStats CudaEngine::memory() const {
  GpuMemory& memory = *parts_.gpu;
  std::size_t latency_bytes = 0;
  {
    std::scoped_lock lock(latency_mutex_);
    for (const LatencySegment& segment : latency_segments_) latency_bytes += segment.memory.bytes;
  }
  const engine::Arena& shared = parts_.cpu->arena;  // of a vault, in CPU memory
  return {control_bytes_,
          memory.registered().total_bytes() + memory.local().total_bytes() + shared.total_bytes(),
          memory.registered().used_bytes() + memory.local().used_bytes() + shared.used_bytes(),
          latency_bytes};
}

TimeStats CudaEngine::time() const {
  return {exchange_ns_.load(std::memory_order_relaxed), wait_ns_.load(std::memory_order_relaxed)};
}

void CudaEngine::add_latency_memory(LatencySegment segment) {
  segment.told.resize(segment.gone == 0 ? 0 : static_cast<std::size_t>(size()));
  std::scoped_lock lock(latency_mutex_);
  latency_segments_.push_back(std::move(segment));
}

/// Those that are left, while no kernel of the group runs.
std::vector<std::shared_ptr<EpochMember>> CudaEngine::exchanges() {
  std::vector<std::shared_ptr<EpochMember>> all;
  std::vector<std::shared_ptr<std::byte>> unused;  // dropped without the lock
  std::scoped_lock lock(latency_mutex_);
  for (LatencySegment& segment : latency_segments_) {
    if (auto exchange = segment.exchange.lock()) {
      all.push_back(std::move(exchange));
    } else {
      std::move(segment.held.begin(), segment.held.end(), std::back_inserter(unused));
      segment.held.clear();
    }
  }
  return all;
}

bool CudaEngine::is_latency_memory(const void* pointer) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  std::scoped_lock lock(latency_mutex_);
  return std::any_of(latency_segments_.begin(), latency_segments_.end(),
                     [&](const LatencySegment& segment) {
                       const fabric::Segment& memory = segment.memory;
                       return at >= memory.data && at < memory.data + memory.bytes;
                     });
}

void CudaEngine::give_up(const char* call, const std::exception& why) {
  channel_.fail(call, why.what());
  words_.raise_abort();
}

void CudaEngine::stay_in(CallKind kind) {
  std::scoped_lock lock(flight_mutex_);
  stays_ = true;
  channel_.enter_call({kind, 0});
}

void CudaEngine::finish(const char* call, const Event& event) {
  constexpr auto kMost = 10s;  // for kernels that were told to stop
  const auto start = std::chrono::steady_clock::now();
  const auto count = [&] {
    const auto ns = (std::chrono::steady_clock::now() - start).count();
    exchange_ns_.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
    wait_ns_.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
  };
  try {
    event.wait(kUntilItEnds, config_.on_wait);
    count();
  } catch (const std::exception& thrown) {
    count();
    if (event.ready()) throw;
    give_up(call, thrown);
    try {
      event.wait(kMost);
    } catch (const std::exception&) {  // what made us stop is the news
    }
    throw;
  }
}

}  // namespace ferry::cuda
