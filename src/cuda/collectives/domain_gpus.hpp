// What collectives of several domains ask of the GPUs of one domain. Nothing here needs CUDA, so
// that tests without a GPU can stand in for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine.hpp"

namespace ferry::cuda {

/// Memory of one step of a call. What leaves for other domains, and what came from them, lies in
/// pinned host memory.
struct DomainRoom {
  std::byte* leaving = nullptr;
  std::byte* come = nullptr;
  std::byte* scratch = nullptr;  ///< of this GPU
};

/// One rank's part in what the GPUs of its domain do. Nothing here waits for the GPU; what is
/// started runs in the order of the calls, which all ranks of the domain make alike. Ranks are
/// those of the domain. One thread at a time starts work; `told`, `release`, `failed` and `fail`
/// are of any thread, and the first three make no CUDA call: a thread that copies from a GPU into
/// ordinary memory keeps others out of the driver until its stream has come so far.
class DomainGpus {
 public:
  using Touched = std::vector<const void*>;

  virtual ~DomainGpus() = default;
  virtual Device device() const = 0;
  /// The engine of the domain: memory that its GPUs reach, failures.
  virtual Engine& engine() = 0;
  /// Bytes of `leaving` and of `come`; `scratch` has as many for each rail, and for two at least.
  virtual std::size_t room_bytes() const = 0;
  virtual DomainRoom room(int slot) = 0;

  /// What follows begins after that; its kernels have so many SMs, 0: a default.
  virtual void begin(const Event& after, int num_sms) = 0;
  /// The domain's sum, or what `op` makes, of `elements` of each rank's `x`; rank r gets elements
  /// [r · share, (r + 1) · share) of it. A mean is a sum here.
  virtual void reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share,
                             void* own) = 0;
  /// All ranks' `own` bytes, [r · share, (r + 1) · share) of `bytes` from rank r, to every rank.
  virtual void gather_shares(const void* own, std::int64_t bytes, std::int64_t share,
                             void* out) = 0;
  virtual void broadcast(void* x, std::int64_t bytes, int root) = 0;
  virtual void all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts) = 0;
  /// Elements of `from` to the dtype of `to`: f32 and bf16 or f16, or both the same.
  virtual void convert(const ConstTensorView& from, const TensorView& to) = 0;
  /// When all that was started has ended, `told(number)`. Numbers ascend.
  virtual void tell(std::uint64_t number) = 0;
  virtual bool told(std::uint64_t number) const = 0;
  /// What is started from here on begins after `release` of this number, or of a later one.
  virtual void hold(std::uint64_t number) = 0;
  virtual void release(std::uint64_t number) = 0;
  /// A rank of the domain has failed, so that kernels end without having done their work.
  virtual bool failed() const = 0;
  /// Why, once it has failed.
  virtual Error failure() = 0;
  /// The end of what was started since the last mark; waiting for it throws what its kernels met.
  virtual Event mark() = 0;

  /// Throws unless a call may have so many SMs, and be ordered with this stream; null: none.
  virtual void check_call(const char* call, const Stream* stream, int num_sms) const = 0;
  /// What comes next in the caller's stream waits for all that was started. The result is complete
  /// with `done`, and other streams can wait for it. `touched`: memory of the caller, not used
  /// again before that, though its stream may be gone when its tensor is dropped.
  virtual Event join(Stream& stream, Event done, const Touched& touched) = 0;
  // Of transfers, beside all that: on streams of their callers, from any thread.

  /// send or recv with a rank of the domain; with no stream it has ended.
  virtual Event transfer(bool sends, const TensorView& x, int peer, int tag,
                         const CollectiveOptions& options) = 0;
  /// Pinned memory of so many bytes, with any values; no stream uses it when its last owner goes.
  virtual std::shared_ptr<std::byte> pinned(std::size_t bytes) = 0;
  /// A stream on which nothing ever waits.
  virtual Stream& apart() = 0;
  virtual void copy(Stream& stream, void* to, const void* from, std::size_t bytes) = 0;
  /// When the stream has come there, the low 32 bits of `*word`, which is pinned, are `value`.
  virtual void tell(Stream& stream, std::uint64_t* word, std::uint64_t value) = 0;
  /// What comes next in the stream begins when `*word`, which is pinned, is 1.
  virtual void hold(Stream& stream, std::uint64_t* word) = 0;
  /// An event that is complete with `done`; other streams wait for this point of `stream`.
  virtual Event ends(Stream& stream, Event done, const Touched& touched) = 0;

  /// Kernels that wait for peers end, nothing is held any more, and the domain's other ranks learn
  /// that this one failed. Returns when nothing runs any more, or soon.
  virtual void fail(const char* call, const Error& error) = 0;
};

}  // namespace ferry::cuda
