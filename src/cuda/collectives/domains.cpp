#include "cuda/collectives/domains.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace ferry::cuda {
namespace {

using namespace std::chrono_literals;
using std::to_string;

constexpr int kSlots = 2;                 // steps under way
constexpr std::int64_t kShareUnit = 128;  // elements; shares begin with whole vectors
constexpr auto kUntilTheyEnd = 24h;       // kernels and the host's collectives have deadlines

/// Waits for it; whoever holds the event learns how it ended.
void settle(const Event& done, std::chrono::nanoseconds most) {
  try {
    done.wait(most);
  } catch (const std::exception&) {
  }
}

/// What the GPU holds until a number goes on, however the call ends.
class Released {
 public:
  Released(DomainGpus& gpus, std::uint64_t number) : gpus_(gpus), number_(number) {}
  ~Released() { gpus_.release(number_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  DomainGpus& gpus_;
  std::uint64_t number_;
};

}  // namespace

Error told_of(const Error& error, const std::vector<int>& ranks, int self) {
  const auto name = [&](int rank) {
    return rank >= 0 && rank < static_cast<int>(ranks.size()) ? ranks[index(rank)] : rank;
  };
  ErrorContext context = error.context();
  const bool same = context.rank == name(context.rank) && context.peer == name(context.peer);
  context.rank = self;
  context.peer = name(context.peer);
  if (same) return Error(error.kind(), error.what(), context);
  std::string text = "rank " + to_string(self);
  if (context.peer >= 0 && context.peer != self) text += ", of rank " + to_string(context.peer);
  text += ": among ranks";
  for (const int rank : ranks) text += (rank == ranks.front() ? " " : ", ") + to_string(rank);
  return Error(error.kind(), text + ", counted from 0: " + error.what(), context);
}

DomainCollectives::DomainCollectives(DomainCollectivesParts parts)
    : parts_(std::move(parts)),
      rails_(parts_.domains.full_rails()),
      transfers_({*parts_.gpus, *parts_.all, [this] { return dead(); },
                  [this](const char* call, const Error& error) { return fail_all(call, error); }}) {
  for (int d = 0; d < domains(); ++d) {
    largest_domain_ = std::max(largest_domain_, std::ssize(parts_.domains.members(d)));
  }
  if (place() < rails_) rail_ = parts_.domains.on_rail(place());
}

DomainCollectives::~DomainCollectives() {
  destroy();
  parts_.thread = Stream(std::shared_ptr<Stream::Queue>());  // its last call has ended
}

void DomainCollectives::destroy() {
  if (leaving_.exchange(true, std::memory_order_acq_rel)) return;
  constexpr std::chrono::nanoseconds kPolite = 500ms,
                                     kMost = 10s;  // a call's own time; after it was told to stop
  if (!dead()) {
    settle(last(), kPolite);
    transfers_.settle(kPolite);
  }
  transfers_.stop();
  for (const auto& each : {parts_.calls, parts_.all, parts_.rail}) {
    if (each) each->engine().destroy();
  }
  parts_.gpus->engine().destroy();
  settle(last(), kMost);
}

std::optional<Error> DomainCollectives::dead() const {
  const std::scoped_lock lock(state_);
  return dead_;
}

Event DomainCollectives::last() const {
  const std::scoped_lock lock(state_);
  return last_;
}

void DomainCollectives::check_usable(const char* call) const {
  if (destroyed()) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the collectives are destroyed",
                {rank(), -1, call, 0, 0, 0});
  }
  const auto error = dead();
  if (!error) return;
  throw Error(
      error->kind(),
      std::string(call) +
          ": the collectives failed earlier; make new ones. They failed with: " + error->what(),
      error->context());
}

Event DomainCollectives::enter(const Call& call, Stream* stream, const Count& count,
                               const Steps& steps) {
  const char* name = name_of(call.signature.kind);
  std::unique_lock lock(turn_);
  check_usable(name);
  parts_.gpus->check_call(name, stream, call.num_sms);
  const Event before = stream != nullptr ? stream->record() : Event();
  std::optional<Error> refused;
  guard(name, [&] { refused = agree(name, call); });
  if (refused) throw Error(*refused);

  const StepRange range{steps_ + 1, count()};
  steps_ += static_cast<std::uint64_t>(range.count);
  const auto started = std::make_shared<std::promise<Event>>();
  // Before the GPU's work is started: that waits where a queue of the GPU is full.
  const Event done = parts_.thread.submit([=, this] {
    const Released released(*parts_.gpus, range.last());
    guard(name, [&] { carry(range, steps, *started); });
  });
  {
    const std::scoped_lock state(state_);
    last_ = done;
  }
  Event joined;
  try {
    guard(name, [&] {
      parts_.gpus->begin(before, call.num_sms);
      start(range, steps);
      if (stream != nullptr) joined = parts_.gpus->join(*stream, done, call.touched);
      started->set_value(parts_.gpus->mark());
    });
  } catch (...) {
    lock.unlock();
    started->set_value({});
    settle(done, kUntilTheyEnd);  // it uses the caller's memory
    throw;
  }
  if (stream != nullptr) return joined;
  lock.unlock();
  finish(name, done);
  return {};
}

/// Returns or throws when the call has ended: it uses the caller's memory.
void DomainCollectives::finish(const char* call, const Event& done) {
  constexpr auto kMost = 10s;
  try {
    done.wait(kUntilTheyEnd, parts_.config.on_wait);
  } catch (const std::exception& thrown) {
    if (done.ready()) throw;
    (void)fail_all(call, Error(ErrorKind::interrupted, thrown.what(), {rank(), -1, call, 0, 0, 0}));
    settle(done, kMost);  // what made us stop is the news
    throw;
  }
}

void DomainCollectives::guard(const char* call, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    throw Error(fail_all(call, error));
  } catch (const std::exception& thrown) {  // of whoever asked the caller meanwhile, mostly
    (void)fail_all(call, Error(ErrorKind::interrupted, thrown.what(), {rank(), -1, call, 0, 0, 0}));
    throw;
  }
}

/// First where calls are compared: there each says who is to blame, and the others learn it there.
Error DomainCollectives::fail_all(const char* call, const Error& error) {
  if (dead()) return error;
  Error told = parts_.calls->fail(call, error);
  const Error nobody(told.kind(), told.what(), {rank(), -1, call, 0, 0, 0});
  for (const auto& each : {parts_.all, parts_.rail}) {
    if (each) (void)each->fail(call, nobody);
  }
  parts_.gpus->fail(call, nobody);
  if (!destroyed()) {
    const std::scoped_lock lock(state_);
    if (!dead_) dead_ = told;
  }
  return same_reason(told, error) ? error : told;  // which says more of the call
}

void DomainCollectives::among(const std::vector<int>& ranks,
                              const std::function<void()>& work) const {
  try {
    work();
  } catch (const Error& error) {
    throw told_of(error, ranks, rank());
  }
}

/// All ranks learn all calls, so all come to the same: why nothing moves, or nothing.
std::optional<Error> DomainCollectives::agree(const char* name, const Call& call) {
  const std::size_t ranks = index(size());
  const std::size_t counts = 2 * ranks * sizeof(std::int64_t);
  std::vector<std::byte> mine(sizeof(CallSignature) + counts), told(ranks * mine.size());
  CallSignature own = call.signature;
  own.collective.blocks = call.num_sms;
  std::memcpy(mine.data(), &own, sizeof own);
  if (!call.counts.empty())
    std::memcpy(mine.data() + sizeof(CallSignature), call.counts.data(), counts);
  const auto bytes = [&](std::vector<std::byte>& all) {
    return host(all.data(), Dtype::u8, std::ssize(all));
  };
  parts_.calls->all_gather(bytes(mine), bytes(told), {});
  const auto refuse = [&](int peer, const std::string& why) {
    return Error(ErrorKind::mismatch, std::string(name) + ": " + why,
                 {rank(), peer, name, 0, 0, 0});
  };
  const auto at = [&](int rank) { return told.data() + index(rank) * mine.size(); };
  for (int peer = 0; peer < size(); ++peer) {
    CallSignature theirs;
    std::memcpy(&theirs, at(peer), sizeof(theirs));
    const std::string differs = difference(theirs, peer, own);
    if (differs.empty()) continue;
    return refuse(peer, "rank " + to_string(rank()) + " and rank " + to_string(peer) +
                            " made different calls: " + differs);
  }
  longest_block_ = 0;
  for (int source = 0; source < size(); ++source) {
    for (int target = 0; target < size(); ++target) {
      std::int64_t sent = 0, awaited = 0;
      std::memcpy(&sent, at(source) + sizeof(CallSignature) + index(target) * sizeof(sent),
                  sizeof(sent));
      std::memcpy(&awaited,
                  at(target) + sizeof(CallSignature) + (ranks + index(source)) * sizeof(sent),
                  sizeof(sent));
      longest_block_ = std::max(longest_block_, sent);
      if (sent == awaited) continue;
      return refuse(source == rank() ? target : source, "rank " + to_string(source) + " sends " +
                                                            to_string(sent) + " elements to rank " +
                                                            to_string(target) + ", which expects " +
                                                            to_string(awaited));
    }
  }
  return std::nullopt;
}

/// A slot is free when the step before in it was spread: that comes before the next one leaves, and
/// what crosses next in it comes after that.
void DomainCollectives::start(const StepRange& range, const Steps& steps) {
  DomainGpus& gpus = *parts_.gpus;
  const auto leave = [&](std::int64_t step) {
    if (step >= range.count) return;
    steps.leave(step, room(step));
    gpus.tell(range.number(step));
  };
  among(members(), [&] {
    for (int step = 0; step < kSlots; ++step) leave(step);
    for (std::int64_t step = 0; step < range.count; ++step) {
      gpus.hold(range.number(step));
      steps.spread(step, room(step));
      leave(step + kSlots);
    }
  });
}

DomainRoom DomainCollectives::room(std::int64_t step) const {
  return parts_.gpus->room(static_cast<int>(step % kSlots));
}

void DomainCollectives::carry(const StepRange& range, const Steps& steps,
                              std::promise<Event>& started) {
  DomainGpus& gpus = *parts_.gpus;
  std::int64_t crossed = 0;
  for (; crossed < range.count && !gpus.failed(); ++crossed) {
    await([&] { return gpus.told(range.number(crossed)) || gpus.failed(); });
    if (gpus.failed()) break;
    steps.cross(crossed, room(crossed));
    gpus.release(range.number(crossed));
  }
  gpus.release(range.last());  // the GPU comes to its end, also after a failure there
  const Event end = started.get_future().get();
  among(members(), [&] {
    end.wait(kUntilTheyEnd, [this] { check_alive(); });
    // Its kernels may all have ended before the domain failed.
    if (crossed < range.count) throw gpus.failure();
  });
  check_alive();
}

void DomainCollectives::await(const std::function<bool()>& done) const {
  constexpr auto kSpin = 100us, kLongest = 200us;
  const auto start = std::chrono::steady_clock::now();
  auto pause = 2us;
  while (!done()) {
    check_alive();
    if (std::chrono::steady_clock::now() - start < kSpin) continue;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongest);
  }
}

void DomainCollectives::check_alive() const {
  if (destroyed()) {
    throw Error(ErrorKind::destroyed, "the collectives were destroyed during the call");
  }
  if (const auto error = dead()) throw Error(*error);
}

void DomainCollectives::no_rows(bool adds) const {
  throw Error(ErrorKind::unsupported,
              std::string(adds ? "add_rows" : "copy_rows") + ": got ranks in " +
                  to_string(domains()) +
                  " domains; expected one domain: use all_to_all between domains");
}

std::int64_t DomainCollectives::share_of(std::int64_t count) const {
  const std::int64_t each = (count + rails_ - 1) / rails_;
  return (each + kShareUnit - 1) / kShareUnit * kShareUnit;
}

std::int64_t DomainCollectives::own_share(std::int64_t count, std::int64_t share) const {
  return std::clamp<std::int64_t>(count - place() * share, 0, share);
}

void DomainCollectives::barrier() {
  Call call;
  call.signature.kind = CallKind::barrier;
  enter(call, nullptr, [] { return 0; }, {});
}

Tensor DomainCollectives::empty(const Extents& shape, Dtype dtype) {
  check_usable("empty");
  return parts_.gpus->engine().empty(shape, dtype);
}

MemoryStats DomainCollectives::memory() const {
  MemoryStats sum = parts_.gpus->engine().memory();
  for (const auto& each : {parts_.calls, parts_.all, parts_.rail}) {
    if (!each) continue;
    const MemoryStats more = each->engine().memory();
    sum.control_bytes += more.control_bytes + more.arena_bytes;
  }
  return sum;
}

NetworkStats DomainCollectives::network() const {
  NetworkStats sum{};
  for (const auto& each : {parts_.calls, parts_.all, parts_.rail}) {
    if (!each) continue;
    const NetworkStats more = each->engine().network();
    sum.put_bytes += more.put_bytes;
    sum.puts += more.puts;
    sum.signals += more.signals;
  }
  return sum;
}

namespace {

[[noreturn]] void no_experts(const char* call) {
  throw Error(ErrorKind::unsupported, std::string(call) + ": collectives have no experts");
}

}  // namespace

Plan DomainCollectives::plan(const ConstTensorView&, const PlanOptions&) {
  no_experts("plan");
}
Received DomainCollectives::dispatch(const ConstTensorView&, const Plan&, const DispatchOptions&) {
  no_experts("dispatch");
}
Combined DomainCollectives::combine(const ConstTensorView&, const Plan&, const CombineOptions&) {
  no_experts("combine");
}
std::shared_ptr<LatencyEngine> DomainCollectives::make_latency(const LatencyConfig&) {
  no_experts("make_latency");
}

}  // namespace ferry::cuda
