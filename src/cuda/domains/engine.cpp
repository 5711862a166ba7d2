#include "cuda/domains/engine.hpp"

#include <chrono>
#include <thread>
#include <utility>

#include "cuda/domains/regroup.hpp"
#include "cuda/domains/vault.hpp"
#include "cuda/runtime/event.hpp"
#include "engine/agreement.hpp"
#include "engine/gather.hpp"
#include "engine/growth.hpp"
#include "engine/membership/arbiter_creation.hpp"

namespace ferry::cuda {

using namespace std::chrono_literals;
using std::to_string;

namespace {

GroupConfig without_caller(GroupConfig config) {
  config.on_wait = {};
  return config;
}

engine::ProxyWords words_in(std::byte* memory) {
  return {reinterpret_cast<std::uint64_t*>(memory),
          reinterpret_cast<std::uint64_t*>(memory + kLineBytes)};
}

}  // namespace

DomainEngine::DomainEngine(const GroupConfig& config, DomainParts parts)
    : config_(config),
      proxy_config_(without_caller(config)),
      parts_(std::move(parts)),
      topology_(parts_.domains),
      placement_{config.experts, parts_.memory->fabric->size()},
      channel_(parts_.memory, proxy_config_, parts_.control, parts_.layout),
      carrier_(engine::Carrier::make(*parts_.memory->fabric, parts_.domains, parts_.control.data,
                                     parts_.layout)),
      arbiter_(engine::arbiter_of(config_, parts_.domains, *parts_.memory->fabric)),
      now_(channel_.rank(), channel_.size()),
      staging_(channel_, parts_.memory, parts_.inside->device().index) {
  inside().join_group(parts_.domains.members(domain_of(rank())));
  const OnDevice here(device().index);
  ring_memory_ = PinnedPool::make(kRingSlots * sizeof(protocol::CommandSlot), 1)->take();
  words_memory_ = PinnedPool::make(2 * kLineBytes, 1)->take();
  words_ = words_in(words_memory_.get());
  constexpr std::size_t kRoutes = std::size_t{2} << 20;  // of most plans
  (void)buffer_.take(kRoutes);
  check(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  own_stream_ = Stream::of_cuda(inside().gpu().own().stream, device().index);
  const protocol::CommandRing<> ring(reinterpret_cast<protocol::CommandSlot*>(ring_memory_.get()),
                                     kRingSlots, words_.taken);
  proxy_ = std::make_unique<engine::Proxy>(channel_, ring, words_, config_.deadline,
                                           [this](const Error& error) {
                                             if (!channel_.left())
                                               inside().give_up("crossing", error);
                                           });
}

DomainEngine::~DomainEngine() {
  destroy();
  proxy_.reset();
  try {
    const OnDevice here(device().index);
    constexpr auto kMost = 2s;
    const auto start = std::chrono::steady_clock::now();
    bool ended = false;
    while (!ended && std::chrono::steady_clock::now() - start < kMost) {
      ended = is_done(last_) && is_done(buffer_used_);
      if (!ended) std::this_thread::sleep_for(50us);
    }
    if (!ended) {  // the GPU may still write: its memory is never given back
      new std::vector<std::shared_ptr<void>>{ring_memory_, words_memory_, buffer_.memory(),
                                             parts_.memory};
    }
    if (latency_proxy_ && !inside().settle(0s)) (void)latency_proxy_.release();  // the same
    cudaStreamDestroy(beside_);
  } catch (...) {  // the GPU is going away
  }
}

void DomainEngine::destroy() {
  if (leaving_.exchange(true, std::memory_order_acq_rel)) return;
  constexpr auto kPolite = 500ms;  // for calls that need no more than their own time
  try {
    const OnDevice here(device().index);
    const auto start = std::chrono::steady_clock::now();
    while (!channel_.dead() && !is_done(last_) &&
           std::chrono::steady_clock::now() - start < kPolite) {
      std::this_thread::sleep_for(50us);
    }
  } catch (...) {  // the GPU has failed: leave all the same
  }
  if (latency_proxy_) {  // peers may wait for what kernels have left to it
    try {
      const OnDevice here(device().index);
      if (!channel_.dead()) (void)inside().settle(kPolite);
    } catch (...) {
    }
    latency_proxy_->stop();
  }
  if (channel_.leave() && carrier_) {
    carrier_->leave();
    engine::leave_arbiter(arbiter_, now_.get());
  }
  proxy_->stop();
  inside().destroy();
}

void DomainEngine::check_usable(const char* call) {
  channel_.check_usable(call);
}

void DomainEngine::fail(const char* call, const Error& error) {
  if (!channel_.dead()) channel_.fail(call, error.what(), error.kind());
  inside().give_up(call, error);
  proxy_->let_go();
}

std::shared_ptr<DomainPlan> DomainEngine::plan_of(const Plan& plan, const char* call) {
  (void)checked(plan, call, *this);
  return std::static_pointer_cast<DomainPlan>(Access::state(plan));  // this engine made it
}

Error DomainEngine::outside(const Error& error) const {
  const std::vector<int>& members = parts_.domains.members(domain_of(rank()));
  const auto global = [&](int inside) {
    return inside >= 0 && inside < static_cast<int>(members.size())
               ? members[static_cast<std::size_t>(inside)]
               : inside;
  };
  ErrorContext context = error.context();
  const bool same = context.rank == global(context.rank) && context.peer == global(context.peer);
  context.rank = global(context.rank);
  context.peer = global(context.peer);
  if (same) return error;
  std::string text = "rank " + to_string(rank());
  if (context.peer >= 0 && context.peer != rank()) text += ", of rank " + to_string(context.peer);
  text += ": in domain " + to_string(domain_of(rank())) + ", whose ranks are counted from " +
          to_string(members.front()) + ": ";
  return Error(error.kind(), text + error.what(), context);
}

void DomainEngine::check_ended(const engine::CrossingCall& call, const Event& event) {
  if (call.ended.load(std::memory_order_acquire) && call.refused) {
    try {
      event.wait();
    } catch (const Error&) {  // says no more
    }
    throw *call.refused;
  }
  if (!call.crossed.load(std::memory_order_acquire)) {
    if (const auto dead = channel_.dead()) throw *dead;
    channel_.check_usable(call.stage);
    throw Error(ErrorKind::peer_failed,
                std::string(call.stage) +
                    ": the exchange failed, and the group has gone on in another epoch",
                {rank(), -1, call.stage, channel_.generation(), 0, 0});
  }
  try {
    event.wait();
  } catch (const Error& error) {
    throw told(call.stage, error);
  }
}

/// What the engine inside threw, in the group's words. If it is dead the group is, too, and all
/// ranks are told who is to blame.
Error DomainEngine::told(const char* stage, const Error& thrown) {
  const auto beyond = inside().failed_beyond();
  const Error error = beyond ? thrown : outside(thrown);
  if (!inside().channel().dead()) return error;
  // What other ranks said comes first: they may know who really failed.
  const int culprit = beyond ? beyond->peer : error.peer();
  (void)channel_.poll(
      stage, [] { return engine::Channel::kUnknownEnd; },
      [culprit](int peer) { return peer == culprit; });
  if (!channel_.dead() && error.kind() == ErrorKind::deadline && culprit >= 0) {
    const std::uint64_t expected = beyond ? beyond->expected : error.context().expected;
    (void)channel_.late(stage, culprit, expected, beyond ? beyond->seen : error.context().seen);
  }
  if (!channel_.dead()) channel_.fail(stage, error.what(), error.kind());
  return channel_.dead() ? *channel_.dead() : error;
}

void DomainEngine::finish(const char* call, const Event& event) {
  constexpr auto kMost = 10s;
  try {
    event.wait(kUntilItEnds, config_.on_wait);
  } catch (const std::exception& thrown) {
    if (event.ready()) throw;
    fail(call, Error(ErrorKind::interrupted, thrown.what()));
    try {
      event.wait(kMost);
    } catch (const std::exception&) {  // what made us stop is the news
    }
    throw;
  }
}

Received DomainEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                                const DispatchOptions& options) {
  return cuda::dispatch(*this, x, plan, options);
}

Combined DomainEngine::combine(const ConstTensorView& rows, const Plan& plan,
                               const CombineOptions& options) {
  return cuda::combine(*this, rows, plan, options);
}

/// Every rank knows who needs more, so all do this together or none.
void DomainEngine::make_room(const CrossingWay& way, const CrossingTables& tables) {
  std::vector<std::size_t> needs;
  for (int r = 0; r < size(); ++r) needs.push_back(way.place(r, size()));
  std::size_t out = 0;
  for (const CrossingBlock& block : way.sent(tables)) out += way.layout.block_bytes(block.rows);
  if (staging_.has(StagingBuffers::kIn, needs) && staging_.has_out(out)) return;
  proxy_->run(
      [this, needs, out, stage = way.stage] {
        if (!staging_.has_out(out)) staging_.grow_out(out);
        if (!staging_.has(StagingBuffers::kIn, needs)) {
          staging_.grow(stage, StagingBuffers::kIn, needs);
        }
      },
      config_.on_wait);
}

Tensor DomainEngine::empty(const Extents& shape, Dtype dtype) {
  check_usable("empty");
  return inside().empty(shape, dtype);
}

std::shared_ptr<VaultEngine> DomainEngine::make_vault(std::size_t version_bytes) {
  constexpr const char* kVault = "Vault";
  engine::Regroup::check_possible(kVault, *parts_.memory, carrier_ != nullptr, domains());
  const DomainCall call(*this, kVault, nullptr);
  if (!vault_group_) {
    poll([&] { return is_done(last_); }, config_.deadline, config_.on_wait);
    vault_group_ = std::make_unique<DomainVault>(*this);
  }
  return vault_.open(*vault_group_, version_bytes);
}

void DomainEngine::meet_inside(const char* call) {
  try {
    inside().barrier();
  } catch (const Error& error) {
    throw told(call, error);
  }
}

void DomainEngine::barrier() {
  DomainCall call(*this, "barrier", nullptr);
  meet_inside("barrier");
  proxy_->run(
      [this] {
        StepMessage head;
        head.call.kind = CallKind::barrier;
        channel_.swap("barrier", head);
        engine::check_same_call(channel_, "barrier", head.call);
      },
      config_.on_wait);
}

ferry::GroupView DomainEngine::regroup() {
  return DomainEpochChange(*this).run();
}

bool DomainEngine::commit(std::uint64_t step) {
  DomainCall call(*this, "commit", nullptr);
  if (carrier_) channel_.lose_silent();
  meet_inside("commit");
  proxy_->run(
      [this, step] {
        StepMessage head;
        head.call.kind = CallKind::commit;
        head.call.commit.step = step;
        engine::agree_on_validity(channel_, "commit", head, now_.refusal_of(step));
      },
      config_.on_wait);
  now_.commit(step);
  return false;  // nobody joins
}

std::vector<std::vector<std::byte>> DomainEngine::gather(std::span<const std::byte> mine) {
  struct Step {
    std::vector<std::byte> mine;
    std::vector<std::vector<std::byte>> all{};
  };
  DomainCall call(*this, "bootstrap", nullptr);
  const auto step = std::make_shared<Step>(Step{{mine.begin(), mine.end()}});
  proxy_->run(
      [this, step] {
        CallSignature signature;
        signature.kind = CallKind::bootstrap;
        step->all = engine::gather(channel_, "bootstrap: all_gather", signature, step->mine);
      },
      config_.on_wait);
  return std::move(step->all);
}

MemoryStats DomainEngine::memory() const {
  MemoryStats use = inside().memory();
  constexpr std::size_t kSpare = 4096;
  use.control_bytes += parts_.control.bytes + kSpare;
  const engine::Arena& shared = parts_.memory->arena;  // of a vault
  use.arena_bytes += staging_.bytes() + shared.total_bytes();
  use.arena_used_bytes += staging_.bytes() + shared.used_bytes();
  use.latency_bytes += latency_bytes_.load(std::memory_order_relaxed);
  return use;
}

Crossing DomainEngine::crossing_of(const DomainPlan& state, Crossing asked) const {
  return asked == Crossing::automatic ? state.crossing.chosen : asked;
}

}  // namespace ferry::cuda
