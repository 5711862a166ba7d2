// Ranks of several domains with the host in the place of their GPUs.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "api/domain_bootstrap.hpp"
#include "api/rails.hpp"
#include "core/stream_state.hpp"
#include "core/test_errors.hpp"
#include "cuda/collectives/domains.hpp"
#include "fabric/local/local.hpp"
#include "host/collectives/engine.hpp"
#include "host/collectives/test_collectives.hpp"

namespace ferry::test {

using namespace host::test;

/// When a GPU breaks; -1: never.
struct Breaks {
  int sums = -1;   ///< after so many of its own
  int steps = -1;  ///< when so many have left: another one of the domain, no work of this one fails
};

/// The GPUs of a domain, by collectives of the host, on a stream of the host.
class HostGpus final : public cuda::DomainGpus {
 public:
  HostGpus(std::shared_ptr<CollectivesEngine> ranks, std::size_t room, int rails, Breaks breaks)
      : ranks_(std::move(ranks)), room_(room), breaks_(breaks) {
    for (auto& slot : memory_) slot.resize(room * (2 + index(std::max(rails, 2))));
  }
  Device device() const override { return {}; }
  Engine& engine() override { return ranks_->engine(); }
  std::size_t room_bytes() const override { return room_; }
  cuda::DomainRoom room(int slot) override {
    std::byte* memory = memory_[index(slot)].data();
    return {memory, memory + room_, memory + 2 * room_};
  }
  void begin(const Event& after, int) override {
    expect_caller();
    stream_.wait(after);
  }
  void reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share,
                     void* own) override {
    if (breaks_.sums-- == 0) throw Error(ErrorKind::system, "the GPU has fallen off the bus");
    run([=, this] {
      Bytes all(x.bytes());
      copy(all.data(), x.data, all.size());
      ReduceOptions options;
      options.op = op == ReduceOp::mean ? ReduceOp::sum : op;
      ranks_->all_reduce({all.data(), x.dtype, x.shape}, options);
      const auto [first, count] = part(x.shape.product(), share);
      copy(own, all.data() + first * size_of(x.dtype), count * size_of(x.dtype));
    });
  }
  void gather_shares(const void* own, std::int64_t bytes, std::int64_t share, void* out) override {
    run([=, this] {
      const std::int64_t ranks = engine().size();
      Bytes mine(index(share)), all(index(share * ranks));
      copy(mine.data(), own, part(bytes, share).second);
      ranks_->all_gather(view(mine), view(all), {});
      copy(out, all.data(), index(bytes));
    });
  }
  void broadcast(void* x, std::int64_t bytes, int root) override {
    run([=, this] { ranks_->broadcast({x, Dtype::u8, {bytes}}, root, {}); });
  }
  void all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts) override {
    run([=, this] { ranks_->all_to_all(x, out, counts, {}); });
  }
  void convert(const ConstTensorView& from, const TensorView& to) override {
    run([=] {
      if (from.dtype == to.dtype) return copy(to.data, from.data, from.bytes());
      for (std::int64_t i = 0; i < from.shape.product(); ++i) {
        store(to, i, load(from, i));
      }
    });
  }
  void tell(std::uint64_t number) override {
    expect_caller();
    EXPECT_GT(number, std::exchange(last_tell_, number));
    (void)stream_.submit([=, this] {
      if (std::cmp_equal(number, breaks_.steps)) failed_ = true;
      told_ = number;
    });
  }
  bool told(std::uint64_t number) const override { return told_ >= number; }
  void hold(std::uint64_t number) override {
    expect_caller();
    EXPECT_LE(number, last_tell_);
    (void)stream_.submit([=, this] {
      while (released_ < number && !failed()) std::this_thread::yield();
    });
  }
  void release(std::uint64_t number) override {
    std::uint64_t before = released_;
    while (before < number && !released_.compare_exchange_weak(before, number)) {
    }
  }
  bool failed() const override { return failed_; }
  Error failure() override { return Error(ErrorKind::peer_failed, "another GPU is gone"); }
  Event mark() override {
    expect_caller();
    return stream_.submit([this] {
      if (error_) throw Error(*error_);
    });
  }
  void check_call(const char*, const Stream*, int) const override {}
  Event transfer(bool sends, const TensorView& x, int peer, int tag,
                 const CollectiveOptions& options) override {
    return sends ? ranks_->send(x, peer, tag, options) : ranks_->recv(x, peer, tag, options);
  }
  std::shared_ptr<std::byte> pinned(std::size_t bytes) override {
    const auto memory = std::make_shared<std::vector<std::max_align_t>>(bytes / 16 + 5);
    void* at = memory->data();
    std::size_t room = bytes + 64;
    return {memory, static_cast<std::byte*>(std::align(64, bytes, at, room))};
  }
  Stream& apart() override { return apart_; }
  void copy(Stream& stream, void* to, const void* from, std::size_t bytes) override {
    expect_caller();
    (void)stream.submit([=] { copy(to, from, bytes); });
  }
  void tell(Stream& stream, std::uint64_t* word, std::uint64_t value) override {
    expect_caller();
    (void)stream.submit([=] { std::atomic_ref(*word).store(value); });
  }
  void hold(Stream& stream, std::uint64_t* word) override {
    expect_caller();
    (void)stream.submit([=] {
      while (std::atomic_ref(*word).load() == 0) std::this_thread::yield();
    });
  }
  Event ends(Stream&, Event done, const Touched&) override { return done; }
  Event join(Stream& stream, Event done, const Touched& touched) override {
    expect_caller();
    EXPECT_FALSE(touched.empty());  // every call has memory of its caller
    stream.wait(stream_.record());
    return done;
  }
  void fail(const char* call, const Error& error) override {
    (void)ranks_->fail(call, error);
    failed_ = true;
    stream_.submit([] {}).wait(20s);  // nothing reads the caller's memory any more
  }

 private:
  /// Who has a GPU's stream wait for what another thread starts on the GPU, and then copies from
  /// that stream into ordinary memory, keeps the other thread out of the driver, and both wait for
  /// ever.
  void expect_caller() const { EXPECT_EQ(std::this_thread::get_id(), caller_); }
  /// After a failure nothing is done, as by kernels that give up.
  void run(std::function<void()> work) {
    expect_caller();
    (void)stream_.submit([this, work = std::move(work)] {
      if (failed_) return;
      try {
        work();
      } catch (const Error& error) {
        error_ = error;
        failed_ = true;
      }
    });
  }
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }
  static TensorView view(Bytes& bytes) { return {bytes.data(), Dtype::u8, {std::ssize(bytes)}}; }
  /// First and number of what this rank has of so many.
  std::pair<std::size_t, std::size_t> part(std::int64_t all, std::int64_t share) {
    const std::int64_t first = std::min(all, engine().rank() * share);
    return {index(first), index(std::min(share, all - first))};
  }
  template <class T>
  static T at(const void* data, std::int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const std::byte*>(data) + index(i) * sizeof(T), sizeof(T));
    return value;
  }
  static float load(const ConstTensorView& x, std::int64_t i) {
    if (x.dtype == Dtype::bf16) return to_float(at<Bf16>(x.data, i));
    if (x.dtype == Dtype::f16) return to_float(at<Fp16>(x.data, i));
    return at<float>(x.data, i);
  }
  static void store(const TensorView& x, std::int64_t i, float value) {
    std::byte* to = static_cast<std::byte*>(x.data) + index(i) * size_of(x.dtype);
    const auto put = [to](auto element) { std::memcpy(to, &element, sizeof element); };
    if (x.dtype == Dtype::bf16) return put(from_float<Bf16>(value));
    if (x.dtype == Dtype::f16) return put(from_float<Fp16>(value));
    put(value);
  }

  std::shared_ptr<CollectivesEngine> ranks_;
  std::size_t room_;
  Breaks breaks_;
  std::vector<std::byte> memory_[2];
  const std::thread::id caller_ = std::this_thread::get_id();
  std::uint64_t last_tell_ = 0;
  std::atomic<std::uint64_t> told_{0}, released_{0};
  std::atomic<bool> failed_{false};
  std::optional<Error> error_{};  // of the stream's thread
  Stream apart_{};
  Stream stream_{};  // ends before the rest
};

/// Which ranks are together, and how much crosses at once.
struct Shape {
  const char* name;
  std::vector<int> labels;
  FabricKind kind = FabricKind::local;
  FabricKind network = FabricKind::automatic;
  std::size_t room = 64 << 10;
};

inline std::shared_ptr<cuda::DomainCollectives> make(Bootstrap& bootstrap, const Shape& shape,
                                                     std::chrono::nanoseconds deadline = 20s,
                                                     Breaks breaks = {}) {
  GroupConfig config;
  config.deadline = deadline;
  config.network = shape.network;
  const Inside inside{shape.kind, Domains(shape.labels)};
  cuda::CollectiveWires rails = make_rails(bootstrap, config, inside);
  DomainBootstrap part(bootstrap, inside.domains);
  auto gpus =
      host::make_host_collectives(part, config, Domains::blocks(part.size(), 0),
                                  fabric::make_local_fabric(part, config.deadline, config.on_wait));
  part.finish({}, config.deadline, {});
  return std::make_shared<cuda::DomainCollectives>(cuda::DomainCollectivesParts{
      config, inside.domains, rails.calls, rails.all, rails.rail,
      std::make_unique<HostGpus>(gpus, shape.room, inside.domains.full_rails(), breaks),
      std::move(rails.thread)});
}

}  // namespace ferry::test
