// What every call between domains begins and ends with, and how its rows go to the proxy.
#include <algorithm>
#include <atomic>
#include <utility>

#include "cuda/domains/engine.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/runtime/stream_wait.hpp"
#include "cuda/throughput/turn.hpp"

namespace ferry::cuda {
namespace {

/// The end of a call: of its kernels, and of the proxy's part.
class DomainEvent final : public Event::State, public GpuPoint {
 public:
  DomainEvent(std::weak_ptr<DomainEngine> engine, std::shared_ptr<engine::CrossingCall> call,
              Event inside, GpuEvent end, int device)
      : engine_(std::move(engine)),
        call_(std::move(call)),
        inside_(std::move(inside)),
        end_(std::move(end)),
        device_(device) {}

  bool ready() override {
    const OnDevice here(device_);
    return has_ended();
  }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    const OnDevice here(device_);
    poll([&] { return has_ended(); }, deadline, on_wait);
    if (const auto engine = engine_.lock()) {
      engine->check_ended(*call_, inside_);
      return;
    }
    inside_.wait(deadline, on_wait);
    if (call_->refused) throw *call_->refused;
    if (call_->crossed.load(std::memory_order_acquire)) return;
    throw Error(ErrorKind::destroyed,
                "event: the call did not end well, and its group, which knows why, is gone");
  }
  GpuEvent gpu_event() const override { return end_; }

 private:
  /// The proxy of a group that has failed may still wait for a peer.
  bool has_ended() {
    if (!is_done(end_)) return false;
    if (call_->ended.load(std::memory_order_acquire)) return true;
    const auto engine = engine_.lock();
    return engine != nullptr && engine->failed();
  }

  std::weak_ptr<DomainEngine> engine_;
  std::shared_ptr<engine::CrossingCall> call_;
  Event inside_;
  GpuEvent end_;
  int device_;
};

}  // namespace

DomainCall::DomainCall(DomainEngine& engine, const char* call, Stream* stream)
    : engine_(engine),
      name_(call),
      blocking_(stream == nullptr),
      stream_(stream == nullptr ? &*engine.own_stream_ : stream) {
  engine_.check_usable(call);
  turn_ = take_turn(engine_.turn_, engine_.config_.on_wait, [&] { engine_.check_usable(call); });
  here_.emplace(engine_.device().index);
  native_ = static_cast<cudaStream_t>(stream_->native());
  if (capture_of(native_).active) {
    throw Error(ErrorKind::unsupported,
                std::string(call) +
                    ": its stream is being captured into a CUDA graph; a group of "
                    "several domains makes its calls with the CPU and cannot be "
                    "captured",
                {engine_.rank(), -1, call, 0, 0, 0});
  }
  id_ = id_of(native_);
  if (engine_.last_ && engine_.last_stream_ != id_) {
    check(cudaStreamWaitEvent(native_, engine_.last_.get(), 0), "cudaStreamWaitEvent");
  }
}

/// Later calls come after what was launched of a plan, or of a call that failed; and after all that
/// the proxy still takes from the staging buffer for it.
DomainCall::~DomainCall() {
  if (finished_ || !here_ || !turn_.owns_lock()) return;
  try {
    if (crossing_ && !received_) receive({});
  } catch (...) {  // the group has failed
  }
  GpuEvent end = engine_.inside().gpu().events()->record(native_);
  uses_->ends_at(end);
  if (!end) return;
  engine_.last_ = std::move(end);
  engine_.last_stream_ = id_;
}

User DomainCall::user() const {
  return {native_, id_, false, &engine_.config_.on_wait, name_, engine_.rank()};
}

Held DomainCall::take(std::size_t bytes) const {
  return engine_.inside().gpu().take_local(bytes, user());
}

void DomainCall::use(const Held& held) const {
  if (held) engine_.inside().gpu().record_use(held.data(), id_, uses_);
}

const float* DomainCall::floats(const std::optional<ConstTensorView>& tensor) const {
  return tensor ? static_cast<const float*>(tensor->data) : nullptr;
}

const std::byte* DomainCall::aligned(const ConstTensorView& rows, Held& copy) const {
  const auto* data = static_cast<const std::byte*>(rows.data);
  if (rows.bytes() == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  copy = take(rows.bytes());
  check(cudaMemcpyAsync(copy.data(), data, rows.bytes(), cudaMemcpyDeviceToDevice, native_),
        "cudaMemcpyAsync");
  return copy.data();
}

std::size_t CrossingWay::place(int target, int source) const {
  std::size_t bytes = 0;
  for (int s = 0; s < source; ++s) {
    bytes +=
        layout.block_bytes(back ? crossing_rows(plan->exchange, plan->crossing, how, target, s)
                                : crossing_rows(plan->exchange, plan->crossing, how, s, target));
  }
  return bytes;
}

void DomainCall::order(cudaStream_t before, cudaStream_t behind) {
  const GpuEvent event = engine_.inside().gpu().events()->take();
  check(cudaEventRecord(event.get(), before), "cudaEventRecord");
  check(cudaStreamWaitEvent(behind, event.get(), 0), "cudaStreamWaitEvent");
}

void DomainCall::send(const CrossingWay& way, const CrossingTables& tables, const StepMessage& head,
                      PackParameters pack, std::function<void(engine::Channel&)> agree) {
  DomainEngine& engine = engine_;
  auto call = std::make_shared<engine::CrossingCall>();
  call->stage = way.stage;
  call->head = head;
  call->head.staging_segment = engine.staging_.segment(StagingBuffers::kIn);
  call->from = engine.staging_.data(StagingBuffers::kOut);
  call->agree = std::move(agree);
  std::uint64_t from = 0;
  for (const CrossingBlock& block : way.sent(tables)) {
    const std::size_t bytes = way.layout.block_bytes(block.rows);
    call->windows.push_back({block.rank, from, way.place(block.rank, engine.rank()), bytes});
    from += bytes;
    call->puts += static_cast<std::uint64_t>(way.layout.chunks(block.rows));
  }
  std::int64_t most = 0;
  for (const CrossingBlock& block : way.received(tables)) {
    call->sources.push_back({block.rank, way.layout.chunks(block.rows)});
    most = std::max(most, call->sources.back().chunks);
  }
  call->portions = crossing_portions(most);
  const Domains& live = engine.topology_;
  if (!way.back) call->together = live.members(live.of(engine.rank()));
  call->first = engine.commands_;
  call->number = engine.portions_ += static_cast<std::uint64_t>(call->portions);
  engine.commands_ += 1 + call->puts;
  engine.proxy_->submit(call);
  crossing_ = call;
  pack.layout = way.layout;
  pack.blocks = way.back ? tables.in : tables.out;
  pack.index = way.back ? tables.returned : tables.sent;
  pack.staging = engine.staging_.data(StagingBuffers::kOut);
  try {
    order(native_, engine.beside_);
    pack_in_parts(*call, pack);
  } catch (const Error& error) {
    engine.fail(name_, error);  // the peers are in this call, or will be
    throw;
  }
}

void DomainCall::await_portion(int portion) {
  const auto behind = static_cast<std::uint64_t>(crossing_->portions - 1 - portion);
  wait_for_word(engine_.beside_, engine_.words_.arrived, crossing_->number - behind);
}

void DomainCall::receive(const std::function<void(int portion, cudaStream_t stream)>& use) {
  received_ = true;
  try {
    order(native_, engine_.beside_);
    for (int portion = use ? 0 : portions() - 1; portion < portions(); ++portion) {
      await_portion(portion);
      if (use) use(portion, engine_.beside_);
    }
    order(engine_.beside_, native_);
  } catch (const Error& error) {
    engine_.fail(name_, error);
    // Whatever was launched ends now, and before what comes next.
    if (const GpuEvent end = engine_.inside().gpu().events()->record(engine_.beside_)) {
      (void)cudaStreamWaitEvent(native_, end.get(), 0);
    }
    throw;
  }
}

/// The ring never overflows: a part is started when its last command has room.
void DomainCall::pack_in_parts(const engine::CrossingCall& call, PackParameters pack) {
  pack.ring = reinterpret_cast<protocol::CommandSlot*>(engine_.ring_memory_.get());
  pack.ring_size = kRingSlots;
  pack.first_command = call.first;
  const std::uint64_t* taken = engine_.words_.taken;
  const protocol::CommandRing<> ring(pack.ring, kRingSlots, engine_.words_.taken);
  const auto chunks = static_cast<std::int64_t>(call.puts);
  constexpr auto kMostCommands = static_cast<std::int64_t>(kRingSlots / 2);
  for (std::int64_t first = 0; first == 0 || first < chunks; first += kMostCommands) {
    pack.first_chunk = first;
    pack.end_chunk = std::min(chunks, first + kMostCommands);
    const std::uint64_t needed =
        ring.needed(call.first + static_cast<std::uint64_t>(pack.end_chunk));
    const std::atomic_ref word(*engine_.words_.taken);
    if (word.load(std::memory_order_acquire) < needed) {
      wait_for_word(engine_.beside_, taken, needed);
    }
    check(launch_pack(pack, engine_.beside_), "launch_pack");
  }
}

Event DomainCall::finish(Event inside) {
  GpuEvent end = engine_.inside().gpu().events()->take();
  check(cudaEventRecord(end.get(), native_), "cudaEventRecord");
  engine_.last_ = end;
  engine_.last_stream_ = id_;
  uses_->ends_at(end);
  finished_ = true;
  const int device = engine_.device().index;
  turn_.unlock();
  Event event(std::make_shared<DomainEvent>(engine_.weak_from_this(), crossing_, std::move(inside),
                                            std::move(end), device));
  if (!blocking_) return event;
  engine_.finish(name_, event);
  return {};
}

}  // namespace ferry::cuda
