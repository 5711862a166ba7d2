#include "cuda/collectives/device_gpus.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <utility>

#include "cuda/runtime/event.hpp"
#include "cuda/runtime/stream_wait.hpp"

namespace ferry::cuda {
namespace {

using namespace std::chrono_literals;

/// A point of the stream beside the callers', and the calls before it.
class MarkEvent final : public Event::State {
 public:
  MarkEvent(Event point, std::vector<Event> calls)
      : point_(std::move(point)), calls_(std::move(calls)) {}
  bool ready() override { return point_.ready(); }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    point_.wait(deadline, on_wait);
    for (const Event& call : calls_) call.wait(deadline, on_wait);
  }

 private:
  Event point_;
  std::vector<Event> calls_;
};

/// The end of a call, which other streams can wait for.
class JoinedEvent final : public Event::State, public GpuPoint {
 public:
  JoinedEvent(Event done, GpuEvent point) : done_(std::move(done)), point_(std::move(point)) {}
  bool ready() override { return done_.ready(); }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    done_.wait(deadline, on_wait);
  }
  GpuEvent gpu_event() const override { return point_; }

 private:
  Event done_;
  GpuEvent point_;
};

/// Memory that is touched before a point of a stream.
class UseBefore final : public Use {
 public:
  explicit UseBefore(GpuEvent point) : point_(std::move(point)) {}
  GpuEvent end(EventPool& /*events*/) override { return point_; }
  bool has_ended() const override { return is_done(point_); }

 private:
  GpuEvent point_;
};

cudaStream_t cuda_stream(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.native());
}

/// Words hold the low 32 bits of numbers, which wrap.
bool reached(std::uint64_t seen, std::uint64_t number) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(seen - number)) >= 0;
}

constexpr int kPinnedKept = 16;
constexpr std::size_t kLeastPinned = 128 << 10;

std::size_t scratch_of(int rails) {
  return static_cast<std::size_t>(std::max(rails, 2)) * DeviceGpus::kRoom;
}

}  // namespace

std::size_t DeviceGpus::scratch_bytes(int rails) {
  return kRooms * scratch_of(rails);
}

DeviceGpus::DeviceGpus(std::shared_ptr<CudaEngine> engine,
                       std::shared_ptr<CudaCollectives> collectives, int rails)
    : engine_(std::move(engine)),
      collectives_(std::move(collectives)),
      scratch_each_(scratch_of(rails)),
      scratch_(engine_->empty({static_cast<std::int64_t>(scratch_bytes(rails))}, Dtype::u8)) {
  const OnDevice here(device().index);
  pinned_ = PinnedPool::make(2 * kRooms * kRoom, 1)->take();
  words_ = PinnedPool::make(sizeof(Words), 1)->take();
  new (words_.get()) Words();
  // A caller's stream waits for what a call launches on them.
  for (cudaStream_t* each : {&beside_, &copies_}) *each = make_urgent_stream();
  stream_ = Stream::of_cuda(beside_, device().index);
  apart_ = Stream::of_cuda(copies_, device().index);
  // The process keeps it: so transfers of so many bytes find some while a GPU waits.
  std::vector<std::shared_ptr<std::byte>> kept(kPinnedKept);
  for (auto& each : kept) each = pinned(0);
}

DeviceGpus::~DeviceGpus() {
  constexpr auto kMost = 2s;
  if (!settle(kMost)) {  // the GPU may still write: its memory is never given back
    new std::vector<std::shared_ptr<void>>{pinned_, scratch_.owner(), words_};
  }
  try {
    const OnDevice here(device().index);
    for (cudaStream_t each : {beside_, copies_}) cudaStreamDestroy(each);
  } catch (...) {  // the GPU is going away
  }
}

DomainRoom DeviceGpus::room(int slot) {
  std::byte* pinned = pinned_.get() + static_cast<std::size_t>(2 * slot) * kRoom;
  return {pinned, pinned + kRoom,
          scratch_.as<std::byte>() + static_cast<std::size_t>(slot) * scratch_each_};
}

void DeviceGpus::begin(const Event& after, int num_sms) {
  const OnDevice here(device().index);
  num_sms_ = num_sms;
  stream_.wait(after);
}

void DeviceGpus::reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share,
                               void* own) {
  calls_.push_back(collectives_->reduce_shares(x, op, share, own, {&stream_, num_sms_}));
}

/// By a copy first: kernels would read pinned memory once for every rank.
void DeviceGpus::gather_shares(const void* own, std::int64_t bytes, std::int64_t share, void* out) {
  const std::int64_t first = std::min(bytes, engine_->rank() * share);
  std::byte* place = static_cast<std::byte*>(out) + first;
  copy(stream_, place, own, static_cast<std::size_t>(std::min(share, bytes - first)));
  calls_.push_back(collectives_->gather_shares(place, bytes, share, out, {&stream_, num_sms_}));
}

void DeviceGpus::broadcast(void* x, std::int64_t bytes, int root) {
  calls_.push_back(
      collectives_->broadcast({x, Dtype::u8, {bytes}, device()}, root, {&stream_, num_sms_}));
}

void DeviceGpus::all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts) {
  calls_.push_back(collectives_->all_to_all(x, out, std::move(counts), {&stream_, num_sms_}));
}

void DeviceGpus::convert(const ConstTensorView& from, const TensorView& to) {
  if (from.dtype == to.dtype) return copy(stream_, to.data, from.data, from.bytes());
  const OnDevice here(device().index);
  const Conversion conversion{static_cast<const std::byte*>(from.data),
                              static_cast<std::byte*>(to.data), from.shape.product(), from.dtype,
                              to.dtype};
  check(launch_convert(conversion, engine_->local_sms(), beside_), "launch_convert");
}

void DeviceGpus::copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0 || to == from) return;
  const OnDevice here(device().index);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)),
        "cudaMemcpyAsync");
}

void DeviceGpus::tell(std::uint64_t number) {
  tell(stream_, &words().told, number);
}

void DeviceGpus::tell(Stream& stream, std::uint64_t* word, std::uint64_t value) {
  const OnDevice here(device().index);
  store_word(cuda_stream(stream), word, value);
}

void DeviceGpus::hold(Stream& stream, std::uint64_t* word) {
  const OnDevice here(device().index);
  wait_for_word(cuda_stream(stream), word, 1);
}

Event DeviceGpus::transfer(bool sends, const TensorView& x, int peer, int tag,
                           const CollectiveOptions& options) {
  return sends ? collectives_->send(x, peer, tag, options)
               : collectives_->recv(x, peer, tag, options);
}

std::shared_ptr<std::byte> DeviceGpus::pinned(std::size_t bytes) {
  const OnDevice here(device().index);
  PinnedBuffer buffer;
  buffer.take(std::max(bytes, kLeastPinned));
  return std::static_pointer_cast<std::byte>(buffer.memory());
}

bool DeviceGpus::told(std::uint64_t number) const {
  const std::uint64_t seen = std::atomic_ref(words().told).load(std::memory_order_acquire);
  return reached(seen, number);
}

void DeviceGpus::hold(std::uint64_t number) {
  const OnDevice here(device().index);
  wait_for_word(beside_, &words().released, number);
  held_ = number;
  if (failing_) release(number);  // `fail` may not have seen it
}

void DeviceGpus::release(std::uint64_t number) {
  const std::atomic_ref word(words().released);
  std::uint64_t before = word.load(std::memory_order_relaxed);
  // Release: what the call stored comes before whatever the stream does next.
  while (!reached(before, number) &&
         !word.compare_exchange_weak(before, number, std::memory_order_release)) {
  }
}

bool DeviceGpus::failed() const {
  return engine_->words().failed();
}

Error DeviceGpus::failure() {
  return engine_->fatal_error();
}

Event DeviceGpus::mark() {
  return Event(
      std::make_shared<MarkEvent>(stream_.record(), std::exchange(calls_, std::vector<Event>())));
}

void DeviceGpus::check_call(const char* call, const Stream* stream, int num_sms) const {
  (void)engine_->sms_for(call, num_sms);
  const OnDevice here(device().index);
  if (stream == nullptr || !capture_of(cuda_stream(*stream)).active) return;
  throw Error(
      ErrorKind::unsupported,
      std::string(call) +
          ": the stream is being captured into a CUDA graph; expected one that is not: between "
          "domains the CPU carries a call, once, so a replay would not cross. Make the call "
          "between two graphs, or with collectives of one domain, which are captured",
      {-1, -1, call, 0, 0, 0});
}

Event DeviceGpus::join(Stream& stream, Event done, const Touched& touched) {
  const OnDevice here(device().index);
  Event joined = ends(stream_, std::move(done), touched);
  check(cudaStreamWaitEvent(cuda_stream(stream), gpu_event_of(joined).get(), 0),
        "cudaStreamWaitEvent");
  return joined;
}

Event DeviceGpus::ends(Stream& stream, Event done, const Touched& touched) {
  const OnDevice here(device().index);
  GpuEvent point = engine_->gpu().events()->take();
  check(cudaEventRecord(point.get(), cuda_stream(stream)), "cudaEventRecord");
  const unsigned long long id = id_of(cuda_stream(stream));
  const auto use = std::make_shared<UseBefore>(point);
  for (const void* memory : touched) engine_->gpu().record_use(memory, id, use);
  return Event(std::make_shared<JoinedEvent>(std::move(done), std::move(point)));
}

void DeviceGpus::fail(const char* call, const Error& error) {
  engine_->give_up(call, error);
  failing_ = true;
  release(held_);
  (void)settle(10s);
}

/// False: the stream has not ended by then.
bool DeviceGpus::settle(std::chrono::nanoseconds most) noexcept {
  try {
    const OnDevice here(device().index);
    poll([this] { return cudaStreamQuery(beside_) != cudaErrorNotReady; }, most, {});
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace ferry::cuda
