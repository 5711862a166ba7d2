// The GPUs of a domain, for collectives of several: each operation is a call of the collectives of
// this domain, or a copy, on a stream beside the caller's.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "cuda/collectives/domain_gpus.hpp"
#include "cuda/collectives/engine.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/runtime.hpp"

namespace ferry::cuda {

class DeviceGpus final : public DomainGpus {
 public:
  /// Bytes of a room.
  static constexpr std::size_t kRoom = std::size_t{8} << 20;
  static constexpr int kRooms = 2;
  /// Registered memory of the collectives that it takes for itself.
  static std::size_t scratch_bytes(int rails);

  /// `collectives`: on `engine`, of nobody else.
  DeviceGpus(std::shared_ptr<CudaEngine> engine, std::shared_ptr<CudaCollectives> collectives,
             int rails);
  ~DeviceGpus() override;

  Device device() const override { return engine_->device(); }
  Engine& engine() override { return *engine_; }
  std::size_t room_bytes() const override { return kRoom; }
  DomainRoom room(int slot) override;
  void begin(const Event& after, int num_sms) override;
  void reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share, void* own) override;
  void gather_shares(const void* own, std::int64_t bytes, std::int64_t share, void* out) override;
  void broadcast(void* x, std::int64_t bytes, int root) override;
  void all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts) override;
  void convert(const ConstTensorView& from, const TensorView& to) override;
  void tell(std::uint64_t number) override;
  bool told(std::uint64_t number) const override;
  void hold(std::uint64_t number) override;
  void release(std::uint64_t number) override;
  bool failed() const override;
  Error failure() override;
  Event mark() override;
  void check_call(const char* call, const Stream* stream, int num_sms) const override;
  Event join(Stream& stream, Event done, const Touched& touched) override;
  Event transfer(bool sends, const TensorView& x, int peer, int tag,
                 const CollectiveOptions& options) override;
  std::shared_ptr<std::byte> pinned(std::size_t bytes) override;
  Stream& apart() override { return apart_; }
  void copy(Stream& stream, void* to, const void* from, std::size_t bytes) override;
  void tell(Stream& stream, std::uint64_t* word, std::uint64_t value) override;
  void hold(Stream& stream, std::uint64_t* word) override;
  Event ends(Stream& stream, Event done, const Touched& touched) override;
  void fail(const char* call, const Error& error) override;

 private:
  /// In pinned memory; each is written by one side alone.
  struct Words {
    alignas(64) std::uint64_t told = 0;
    alignas(64) std::uint64_t released = 0;
  };

  Words& words() const { return *reinterpret_cast<Words*>(words_.get()); }
  bool settle(std::chrono::nanoseconds most) noexcept;

  std::shared_ptr<CudaEngine> engine_;
  std::shared_ptr<CudaCollectives> collectives_;
  std::size_t scratch_each_;
  Tensor scratch_{};
  std::shared_ptr<std::byte> pinned_{};
  std::shared_ptr<std::byte> words_{};
  cudaStream_t beside_ = nullptr, copies_ = nullptr;
  Stream stream_{std::shared_ptr<Stream::Queue>()}, apart_ = stream_;  ///< those, as Streams
  std::atomic<std::uint64_t> held_{0};  ///< the last number of a hold
  std::atomic<bool> failing_{false};
  int num_sms_ = 0;             ///< of the call
  std::vector<Event> calls_{};  ///< since the last mark
};

}  // namespace ferry::cuda
