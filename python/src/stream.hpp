// A stream, and the caller's arrays that its work still reads or writes.
#pragma once
#include <deque>
#include <vector>

#include "ferry/stream.hpp"
#include "gil.hpp"
#include "tensor.hpp"

namespace ferry::python {

/// An Event in Python.
using HeldEvent = Held<Event>;

/// A Stream in Python. Arrays that its work uses are dropped by Python threads only, so that the
/// worker never needs the GIL. A CUDA stream is the caller's: nothing waits for its end but for
/// the arrays that it still uses.
class PythonStream {
 public:
  PythonStream();
  /// The caller's CUDA stream, by its cudaStream_t.
  PythonStream(std::uintptr_t cuda_stream, int device);
  ~PythonStream();
  PythonStream(const PythonStream&) = delete;
  PythonStream& operator=(const PythonStream&) = delete;

  Stream& stream();
  /// Keeps `views` until everything submitted so far has ended.
  void keep(std::vector<View> views);
  /// Until `end`.
  void keep(std::vector<View> views, const Event& end);
  Event record();
  void wait(const Event& event);
  /// Waits, interruptibly, until the queue is empty; throws the first exception since last time.
  void synchronize();
  /// Calls whose work has not ended.
  std::size_t under_way();
  Device device() const { return stream_->device(); }
  bool is_cuda() const { return stream_->device().kind == DeviceKind::cuda; }
  void* native() const { return stream_->native(); }

 private:
  struct Kept {
    Event end;
    std::vector<View> views;
  };
  void drop_finished();
  /// Whether work has ended; also when nobody can tell: a point of a stream that was captured.
  static bool ended(const Event& end);
  /// Waits for the end of all work; a signal, or an earlier Ctrl-C, makes the work stop waiting.
  void drain() noexcept;

  Held<Stream> stream_;
  StopFlag stop_ = std::make_shared<std::atomic<bool>>(false);
  std::deque<Kept> kept_;
  std::uint64_t interrupts_seen_ = interrupts();
};

/// Null for none.
inline Stream* stream_or_null(PythonStream* stream) {
  return stream ? &stream->stream() : nullptr;
}

/// Around a call on a stream: keeps the arrays that are there until the stream has done what the
/// call submitted, whether the call threw or not. Nothing without a stream, and no arrays whose
/// memory goes back in the stream's order.
class KeepUntilDone {
 public:
  KeepUntilDone(PythonStream* stream, std::initializer_list<const View*> views);
  ~KeepUntilDone();
  KeepUntilDone(const KeepUntilDone&) = delete;
  KeepUntilDone& operator=(const KeepUntilDone&) = delete;

 private:
  PythonStream* stream_;
  std::vector<View> views_;
};

}  // namespace ferry::python
