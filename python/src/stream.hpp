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
/// worker never needs the GIL.
class PythonStream {
 public:
  PythonStream();
  ~PythonStream();
  PythonStream(const PythonStream&) = delete;
  PythonStream& operator=(const PythonStream&) = delete;

  Stream& stream();
  /// Keeps `views` until everything submitted so far has ended.
  void keep(std::vector<View> views);
  Event record();
  void wait(const Event& event);
  /// Waits, interruptibly, until the queue is empty; throws the first exception since last time.
  void synchronize();
  /// Calls whose work has not ended.
  std::size_t under_way();

 private:
  struct Kept {
    Event end;
    std::vector<View> views;
  };
  void drop_finished();
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
/// call submitted, whether the call threw or not. Nothing without a stream.
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
