#include "cuda/collectives/domains.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

namespace ferry::cuda {
namespace {

using namespace std::chrono_literals;
using std::to_string;

constexpr int kSlots = 2;                 // steps under way
constexpr std::int64_t kShareUnit = 128;  // elements; shares begin with whole vectors
constexpr auto kUntilTheyEnd = 24h;       // kernels and the host's collectives have deadlines

/// An error of ranks that are counted from 0 as the group counts them.
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

/// The caller's stream goes on, however the call ends.
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

DomainCollectives::DomainCollectives(DomainCollectivesParts parts)
    : parts_(std::move(parts)), rails_(parts_.domains.full_rails()) {
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
  const auto settle = [this](std::chrono::nanoseconds most) {
    Event last;
    {
      const std::scoped_lock lock(turn_);
      last = last_;
    }
    try {
      last.wait(most);
    } catch (const Error&) {  // whoever waits for its event learns it
    }
  };
  const bool failed = [this] {
    const std::scoped_lock lock(dead_mutex_);
    return dead_.has_value();
  }();
  if (!failed) settle(kPolite);
  parts_.all->engine().destroy();
  if (parts_.rail) parts_.rail->engine().destroy();
  parts_.gpus->engine().destroy();
  settle(kMost);
}

void DomainCollectives::check_usable(const char* call) const {
  if (destroyed()) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the collectives are destroyed",
                {rank(), -1, call, 0, 0, 0});
  }
  const std::scoped_lock lock(dead_mutex_);
  if (!dead_) return;
  throw Error(dead_->kind(),
              std::string(call) +
                  ": the collectives failed earlier; make new ones. They failed "
                  "with: " +
                  dead_->what(),
              dead_->context());
}

Event DomainCollectives::enter(Call call, Stream* stream, std::function<void()> work) {
  const char* name = name_of(call.signature.kind);
  std::unique_lock lock(turn_);
  check_usable(name);
  parts_.gpus->check_call(name, stream, call.num_sms);
  call.signature.collective.blocks = call.num_sms;
  const Event before = stream != nullptr ? stream->record() : Event();
  const std::uint64_t number = ++calls_;
  const Event done = parts_.thread.submit(
      [this, name, number, before, call = std::move(call), work = std::move(work)] {
        const Released released(*parts_.gpus, number);
        carry(name, call, before, work);
      });
  last_ = done;
  if (stream != nullptr) {
    try {
      return parts_.gpus->hold(*stream, number, done);
    } catch (const Error&) {
      lock.unlock();
      done.wait();  // it uses the caller's memory
      throw;
    }
  }
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
    const Error error(ErrorKind::interrupted, thrown.what(), {rank(), -1, call, 0, 0, 0});
    (void)parts_.all->fail(call, error);
    if (parts_.rail) (void)parts_.rail->fail(call, error);
    parts_.gpus->fail(call, error);
    try {
      done.wait(kMost);
    } catch (const std::exception&) {  // what made us stop is the news
    }
    throw;
  }
}

void DomainCollectives::carry(const char* name, const Call& call, const Event& before,
                              const std::function<void()>& work) {
  std::optional<Error> refused;
  try {
    check_usable(name);
    refused = agree(name, call);
    if (!refused) {
      parts_.gpus->begin(before, call.num_sms);
      work();
    }
  } catch (const Error& error) {
    fail_all(name, error);
  } catch (const std::exception& error) {
    fail_all(name, Error(ErrorKind::system, error.what()));
  }
  if (refused) throw Error(*refused);
}

/// First the collectives of all ranks, where each says who is to blame; the others learn it there.
void DomainCollectives::fail_all(const char* call, const Error& error) {
  {
    const std::scoped_lock lock(dead_mutex_);
    if (dead_) throw Error(error);
  }
  const Error told = parts_.all->fail(call, error);
  const Error nobody(told.kind(), told.what(), {rank(), -1, call, 0, 0, 0});
  if (parts_.rail) (void)parts_.rail->fail(call, nobody);
  parts_.gpus->fail(call, nobody);
  if (!destroyed()) {
    const std::scoped_lock lock(dead_mutex_);
    dead_ = told;
  }
  throw Error(told);
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
  std::memcpy(mine.data(), &call.signature, sizeof(CallSignature));
  if (!call.counts.empty())
    std::memcpy(mine.data() + sizeof(CallSignature), call.counts.data(), counts);
  const auto bytes = [&](std::vector<std::byte>& all) {
    return host(all.data(), Dtype::u8, std::ssize(all));
  };
  parts_.all->all_gather(bytes(mine), bytes(told), {});
  const auto refuse = [&](int peer, const std::string& why) {
    return Error(ErrorKind::mismatch, std::string(name) + ": " + why,
                 {rank(), peer, name, 0, 0, 0});
  };
  const auto at = [&](int rank) { return told.data() + index(rank) * mine.size(); };
  for (int peer = 0; peer < size(); ++peer) {
    CallSignature theirs;
    std::memcpy(&theirs, at(peer), sizeof(theirs));
    const std::string differs = difference(theirs, peer, call.signature);
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

void DomainCollectives::await(const Event& mark) {
  const auto stop = [this] {
    if (destroyed()) {
      throw Error(ErrorKind::destroyed, "the collectives were destroyed during the call");
    }
  };
  among(members(), [&] { mark.wait(kUntilTheyEnd, stop); });
}

/// A slot is free when the step before in it was spread: that comes before the next one leaves, and
/// what crosses next in it comes after that.
void DomainCollectives::take_steps(std::int64_t count, const Steps& steps) {
  std::array<Event, kSlots> left;
  const auto room = [this](std::int64_t step) {
    return parts_.gpus->room(static_cast<int>(step % kSlots));
  };
  const auto leave = [&](std::int64_t step) {
    if (step >= count) return;
    among(members(), [&] { steps.leave(step, room(step)); });
    left[index(step % kSlots)] = parts_.gpus->mark();
  };
  for (int step = 0; step < kSlots; ++step) leave(step);
  for (std::int64_t step = 0; step < count; ++step) {
    await(left[index(step % kSlots)]);
    steps.cross(step, room(step));
    among(members(), [&] { steps.spread(step, room(step)); });
    leave(step + kSlots);
  }
  await(parts_.gpus->mark());
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
  enter(std::move(call), nullptr, [] {});
}

Tensor DomainCollectives::empty(const Extents& shape, Dtype dtype) {
  check_usable("empty");
  return parts_.gpus->engine().empty(shape, dtype);
}

MemoryStats DomainCollectives::memory() const {
  MemoryStats sum = parts_.gpus->engine().memory();
  const auto add = [&sum](const MemoryStats& more) {
    sum.control_bytes += more.control_bytes + more.arena_bytes;
  };
  add(parts_.all->engine().memory());
  if (parts_.rail) add(parts_.rail->engine().memory());
  return sum;
}

NetworkStats DomainCollectives::network() const {
  NetworkStats sum = parts_.all->engine().network();
  if (!parts_.rail) return sum;
  const NetworkStats rail = parts_.rail->engine().network();
  sum.put_bytes += rail.put_bytes;
  sum.puts += rail.puts;
  sum.signals += rail.signals;
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
