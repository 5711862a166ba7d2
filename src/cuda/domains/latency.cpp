// Latency mode of a group of several domains: the engine inside makes the exchange for the ranks of
// its domain, as it always does; for those beyond, all ranks register memory with the network
// between their CPUs, and a proxy carries what crosses (latency/proxy/crossing.hpp).
#include <optional>
#include <utility>

#include "core/exchange_signature.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/latency/engine.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kMakeCrossing = "LatencyExchange";

}  // namespace

/// Registered memory that the GPU uses, for as long as anybody may.
struct PinnedSegment {
  std::shared_ptr<engine::Memory> memory;
  std::byte* data;
  int device;
  ~PinnedSegment() { unpin(data, device); }
};

/// What becomes of one exchange, before it is one.
struct DomainEngine::LatencyStep {
  LatencyConfig config{};
  LatencyMemory memory{};
  std::optional<Error> invalid{};
  engine::AddedSegments segments{};
  std::shared_ptr<PinnedSegment> pinned{};
};

Error DomainEngine::told_of_latency(const char* call, const Error& error) {
  if (!inside().channel().dead()) return error;
  if (const auto dead = channel_.dead()) return *dead;
  return told(call, error);
}

/// On the thread that talks to the peers, on all ranks alike.
void DomainEngine::share_latency_memory(LatencyStep& step) {
  StepMessage head;
  head.call = latency_signature(step.config, !step.invalid);
  channel_.swap(kMakeCrossing, head);
  engine::check_same_call(channel_, kMakeCrossing, head.call);
  if (step.invalid) throw *step.invalid;
  const std::size_t bytes = step.memory.crossing.bytes;
  step.segments =
      engine::add_segments(channel_, *parts_.memory,
                           {kMakeCrossing, "capacity, hidden, topk and the ranks", bytes, bytes});
  latency_bytes_.fetch_add(step.segments.mine.bytes, std::memory_order_relaxed);
}

/// No rank goes on alone: some domain may have found no memory for its part.
void DomainEngine::agree_on_latency(const std::optional<Error>& failed) {
  StepMessage head;
  head.call.kind = CallKind::latency;
  head.status = failed ? StepStatus::exhausted : StepStatus::ok;
  channel_.swap(kMakeCrossing, head);
  engine::check_same_call(channel_, kMakeCrossing, head.call);
  if (failed) throw *failed;
  for (int peer = 0; peer < size(); ++peer) {
    if (channel_.head(peer).status == StepStatus::ok) continue;
    throw Error(ErrorKind::exhausted,
                std::string(kMakeCrossing) + ": rank " + to_string(peer) +
                    " could not make its part of the exchange; nothing was made",
                {rank(), peer, kMakeCrossing, channel_.generation(), 0, 0});
  }
}

std::unique_ptr<LatencyCrossing> DomainEngine::make_crossing(const LatencyStep& step,
                                                             const LatencyView& view) {
  std::vector<int> beyond;
  for (int peer = 0; peer < size(); ++peer) {
    if (domain_of(peer) != domain_of(rank())) beyond.push_back(peer);
  }
  const std::uint64_t space = ++exchanges_;  // tags that the group's calls do not use
  return std::make_unique<LatencyCrossing>(
      CrossingParts{.view = view,
                    .beyond = std::move(beyond),
                    .layout = step.memory.crossing,
                    .data = step.segments.mine.data,
                    .memory = step.pinned,
                    .reach = engine::FabricReach(*parts_.memory->fabric, space, step.segments.ids),
                    .is_gone = [this](int peer) { return channel_.gone(peer); },
                    .violation =
                        [this](int peer, const std::string& what) {
                          channel_.throw_violation(kMakeCrossing, peer, what);
                        }});
}

std::shared_ptr<LatencyEngine> DomainEngine::make_latency(const LatencyConfig& config) {
  DomainCall call(*this, kMakeCrossing, nullptr);
  now_.check_whole(kMakeCrossing);
  auto step = std::make_shared<LatencyStep>(LatencyStep{.config = config});
  try {
    if (size() > kMaxDomain) {
      throw Error(ErrorKind::unsupported,
                  std::string(kMakeCrossing) + ": got " + to_string(size()) +
                      " ranks; the CUDA engine serves at most " + to_string(kMaxDomain));
    }
    step->memory = make_latency_memory(config, config_.experts, size(), domains());
  } catch (const Error& error) {
    step->invalid = error;
  }
  try {
    proxy_->run([this, step] { share_latency_memory(*step); }, config_.on_wait);
  } catch (const Error&) {
    if (step->invalid && !channel_.dead()) throw *step->invalid;
    throw;
  }
  std::shared_ptr<CudaLatency> made;
  std::optional<Error> failed;
  try {
    const fabric::Segment& segment = step->segments.mine;
    pin_for_gpu(segment, device().index);
    step->pinned = std::make_shared<PinnedSegment>(parts_.memory, segment.data, device().index);
  } catch (const Error& error) {
    failed = error;
  }
  // The domain makes its part in any case: its ranks wait for each other there.
  try {
    LatencyGroup group;
    group.rank = rank();
    group.placement = placement_;
    group.members = parts_.domains.members(domain_of(rank()));
    group.domains = domains();
    group.outbox = step->segments.mine.data + step->memory.crossing.outbox;
    group.inbox = step->segments.mine.data + step->memory.crossing.inbox;
    group.memory = step->pinned;
    group.told = [weak = weak_from_this()](const char* name, const Error& error) {
      const auto engine = weak.lock();
      return engine ? engine->told_of_latency(name, error) : error;
    };
    made = make_cuda_latency(parts_.inside, config, group);
  } catch (const Error& error) {
    if (!failed) failed = error;
    if (inside().channel().dead()) throw told(kMakeCrossing, error);
  }
  proxy_->run([this, failed] { agree_on_latency(failed); }, config_.on_wait);
  if (!latency_proxy_) {
    latency_proxy_ =
        std::make_unique<LatencyProxy>(*parts_.memory->fabric, [this](const std::exception& error) {
          if (channel_.left()) return;
          if (!channel_.dead()) channel_.fail(kMakeCrossing, error.what(), ErrorKind::system);
          inside().give_up(kMakeCrossing, error);
        });
  }
  latency_proxy_->add(make_crossing(*step, made->view()));
  return made;
}

}  // namespace ferry::cuda
