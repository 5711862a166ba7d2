#include "cuda/collectives/domain_transfers.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "cuda/collectives/domains.hpp"

namespace ferry::cuda {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kHere = 1;   // the stream has come to it
constexpr std::uint64_t kTaken = 2;  // and has copied what was received

/// Starts transfers of the host engine at once; nothing is queued.
struct AtOnce final : Stream::Queue {
  Event submit(std::function<void()> work) override {
    work();
    return {};
  }
  void start(std::function<void()> start, const Event& /*end*/) override { start(); }
  Event record() override { return {}; }
  void wait(const Event& /*event*/) override {}
  void synchronize() override {}
};

/// Of what a GPU may still write.
void keep_for_ever(const CrossingTransfer& one) {
  new std::shared_ptr<std::byte>(one.memory);
}

/// The end of a transfer inside a domain, with the ranks of all.
class NamedEvent final : public Event::State {
 public:
  NamedEvent(Event inside, std::vector<int> ranks, int self)
      : inside_(std::move(inside)), ranks_(std::move(ranks)), self_(self) {}
  bool ready() override { return inside_.ready(); }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    try {
      inside_.wait(deadline, on_wait);
    } catch (const Error& error) {
      throw told_of(error, ranks_, self_);
    }
  }

 private:
  Event inside_;
  std::vector<int> ranks_;
  int self_;
};

KeptError destroyed(const CrossingTransfer& one, const char* when) {
  std::string text(one.call());
  text.append(": the collectives were destroyed").append(when);
  return KeptError::of(Error(ErrorKind::destroyed, text));
}

}  // namespace

Event DomainCollectives::transfer(bool sends, const TensorView& x, int peer, int tag,
                                  const CollectiveOptions& options) {
  const char* name = sends ? "send" : "recv";
  check_usable(name);
  DomainGpus& gpus = *parts_.gpus;
  gpus.check_call(name, options.stream, options.num_sms);
  Event event;
  if (domain_of(peer) == domain()) {
    among(members(),
          [&] { event = gpus.transfer(sends, x, parts_.domains.index(peer), tag, options); });
    if (options.stream == nullptr) return {};
    return gpus.ends(*options.stream, Event(std::make_shared<NamedEvent>(event, members(), rank())),
                     {});
  }
  std::optional<Error> refused;  // this call alone
  guard(name, [&] {
    try {
      event = transfers_.transfer(sends, x, peer, tag, options.stream);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::mismatch && error.kind() != ErrorKind::exhausted) throw;
      refused.emplace(error);
    }
  });
  if (refused) throw Error(*refused);
  return event;
}

Event DomainCollectives::send(const ConstTensorView& x, int peer, int tag,
                              const CollectiveOptions& options) {
  const TensorView view{const_cast<void*>(x.data), x.dtype, x.shape, x.device};
  return transfer(true, view, peer, tag, options);
}

Event DomainCollectives::recv(const TensorView& x, int peer, int tag,
                              const CollectiveOptions& options) {
  return transfer(false, x, peer, tag, options);
}

TensorView CrossingTransfer::data() const {
  return {memory.get() + sizeof(Words), Dtype::u8, {static_cast<std::int64_t>(bytes)}};
}

/// Streams store 32 bits.
std::uint64_t CrossingTransfer::told() const {
  return std::atomic_ref(words().told).load(std::memory_order_acquire) & 0xffffffff;
}

void CrossingTransfer::release() const {
  std::atomic_ref(words().released).store(1, std::memory_order_release);
}

void CrossingTransfer::end() {
  memory.reset();
  const std::scoped_lock lock(mutex_);
  done.store(true, std::memory_order_release);
  ended_.notify_all();
}

void CrossingTransfer::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  constexpr std::chrono::nanoseconds kAsk = 40ms;
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!ready()) {
    const auto left = deadline - (std::chrono::steady_clock::now() - start);
    if (left <= 0ns) {
      throw Error(ErrorKind::deadline, std::string("event: a ") + call() + " did not end within " +
                                           std::to_string(deadline / 1ms) + " ms");
    }
    ended_.wait_for(lock, std::min<std::chrono::nanoseconds>(left, kAsk));
    if (!on_wait || ready()) continue;
    lock.unlock();
    on_wait();
    lock.lock();
  }
  if (error) error.raise();
}

DomainTransfers::~DomainTransfers() {
  constexpr auto kMost = 2s;
  stop();
  settle(kMost);
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void DomainTransfers::stop() {
  stopped_.store(true, std::memory_order_release);
}

void DomainTransfers::settle(std::chrono::nanoseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [this] { return open_.empty(); });
}

Event DomainTransfers::transfer(bool sends, const TensorView& x, int peer, int tag,
                                Stream* stream) {
  const Held one = make(sends, x, peer, tag);
  DomainGpus& gpus = owner_.gpus;
  if (stream == nullptr) {
    const auto copy = [&](void* to, const void* from) {
      gpus.copy(gpus.apart(), to, from, one->bytes);
      gpus.apart().synchronize();
    };
    if (sends) copy(one->data().data, x.data);
    move(*one, nullptr);
    if (!sends) copy(x.data, one->data().data);
    return {};
  }
  {
    const std::scoped_lock lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    open_.push_back(one);
    changed_.notify_all();
  }
  try {
    start_on(*stream, *one, x);
    return gpus.ends(*stream, Event(one), {x.data});
  } catch (...) {
    one->abandoned.store(true, std::memory_order_release);
    throw;
  }
}

DomainTransfers::Held DomainTransfers::make(bool sends, const TensorView& x, int peer, int tag) {
  auto one = std::make_shared<CrossingTransfer>();
  one->sends = sends;
  one->peer = peer;
  one->tag = tag;
  one->bytes = x.bytes();
  one->memory = owner_.gpus.pinned(sizeof(CrossingTransfer::Words) + one->bytes);
  new (one->memory.get()) CrossingTransfer::Words();
  return one;
}

void DomainTransfers::start_on(Stream& stream, const CrossingTransfer& one, const TensorView& x) {
  DomainGpus& gpus = owner_.gpus;
  CrossingTransfer::Words& words = one.words();
  std::byte* data = static_cast<std::byte*>(one.data().data);
  if (one.sends) gpus.copy(stream, data, x.data, one.bytes);
  gpus.tell(stream, &words.told, kHere);
  if (one.sends) return;
  gpus.hold(stream, &words.released);
  gpus.copy(stream, x.data, data, one.bytes);
  gpus.tell(stream, &words.told, kTaken);
}

Event DomainTransfers::move(const CrossingTransfer& one, Stream* stream) {
  const CollectiveOptions options{.stream = stream};
  return one.sends ? owner_.all.send(one.data(), one.peer, one.tag, options)
                   : owner_.all.recv(one.data(), one.peer, one.tag, options);
}

void DomainTransfers::run() {
  constexpr auto kSpin = 100us, kLongest = 200us;
  auto pause = 2us;
  auto last = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !open_.empty(); });
    if (ends_) break;
    const std::vector<Held> all = open_;
    lock.unlock();
    bool moved = false;
    Order waiting;
    for (const Held& one : all) moved = step(*one, waiting) || moved;
    const auto now = std::chrono::steady_clock::now();
    if (moved) last = now, pause = 2us;
    if (now - last > kSpin) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongest);
    }
    lock.lock();
    if (std::erase_if(open_, [](const Held& one) { return one->ready(); }) > 0) {
      changed_.notify_all();
    }
  }
  give_up();
}

/// Whether something has changed. `waiting`: what those before it in the order of calls wait for.
bool DomainTransfers::step(CrossingTransfer& one, Order& waiting) {
  if (one.ready()) return false;
  bool changed = false;
  const std::uint64_t told = one.told();
  const bool abandoned = one.abandoned.load(std::memory_order_acquire);
  if (!one.begun && !one.error) {
    if (const auto error = owner_.dead()) {
      one.error = KeptError::of(*error);
    } else if (abandoned || (stopped_.load(std::memory_order_acquire) && told < kHere)) {
      one.error = destroyed(one, " before its stream came to it");
    } else if (const Order::value_type like{one.sends, one.peer, one.tag};
               told >= kHere && !waiting.contains(like)) {
      begin(one);
      changed = true;
    } else {
      waiting.insert(like);
    }
  }
  if (one.begun && !one.moved && one.moving.ready()) {
    one.moved = changed = true;
    try {
      one.moving.wait(0ns);
    } catch (const Error& error) {
      lose(one, error);
    }
  }
  if (!one.moved && !one.error) return changed;
  one.release();
  if (told < (one.sends ? kHere : kTaken) && !abandoned) return changed;
  if (one.begun && !one.moved) return changed;  // the host engine uses its memory
  if (abandoned) keep_for_ever(one);
  one.end();
  return true;
}

void DomainTransfers::begin(CrossingTransfer& one) {
  Stream at_once(std::make_shared<AtOnce>());
  try {
    one.moving = move(one, &at_once);
    one.begun = true;
  } catch (const Error& error) {
    lose(one, error);
  }
}

/// Sizes that differ concern this one alone. Else all fail, and nothing is held any more: whoever
/// fails asks the driver, out of which a copy behind a stream that is held keeps other threads.
void DomainTransfers::lose(CrossingTransfer& one, const Error& error) {
  if (error.kind() == ErrorKind::mismatch) {
    one.error = KeptError::of(error);
    return;
  }
  std::vector<Held> all;
  {
    const std::scoped_lock lock(mutex_);
    all = open_;
  }
  for (const Held& other : all) {
    if (!other->ready()) other->release();
  }
  const auto dead = owner_.dead();  // what failed before knows whom to blame
  const bool same = dead && same_reason(*dead, error);
  one.error = KeptError::of(!dead ? owner_.fail(one.call(), error) : same ? error : *dead);
}

/// What no stream has come to: its memory is never given back.
void DomainTransfers::give_up() {
  for (const Held& one : open_) {
    if (one->ready()) continue;
    one->release();
    keep_for_ever(*one);
    one->error = destroyed(*one, "");
    one->end();
  }
}

}  // namespace ferry::cuda
