#include "stream.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "arguments.hpp"
#include "bind.hpp"
#include "repr.hpp"

namespace ferry::python {

PythonStream::PythonStream() : stream_(Stream()) {
  stream_->submit([stop = stop_] { obey(stop); });
}

PythonStream::PythonStream(std::uintptr_t cuda_stream, int device)
    : stream_(Stream::of_cuda(reinterpret_cast<void*>(cuda_stream), device)) {}

PythonStream::~PythonStream() {
  try {
    stream_.get();
  } catch (const Error&) {  // in a forked child there is no worker
    for (Kept& kept : kept_) {
      for (View& view : kept.views) (void)new View(view);
    }
    return;
  }
  drop_finished();
  if (!is_cuda() || !kept_.empty()) drain();
}

Stream& PythonStream::stream() {
  interrupts_seen_ = interrupts();
  return stream_.get();
}

void PythonStream::keep(std::vector<View> views) {
  drop_finished();
  kept_.push_back({stream_->record(), std::move(views)});
}

void PythonStream::keep(std::vector<View> views, const Event& end) {
  drop_finished();
  kept_.push_back({end, std::move(views)});
}

Event PythonStream::record() {
  drop_finished();
  return stream_->record();
}

void PythonStream::wait(const Event& event) {
  if (is_cuda()) {
    without_gil([&] { stream_->wait(event); });  // the GPU waits, for an event of a GPU
    return;
  }
  // Not Stream::wait: this wait ends when the stream is told to stop. What the event's work threw
  // is for those who wait for the event itself.
  stream().submit([event, on_wait = python_on_wait()] {
    try {
      event.wait(std::chrono::hours(24), on_wait);
    } catch (const std::exception&) {
    }
  });
}

void PythonStream::synchronize() {
  const Event end = stream_->record();
  without_gil([&] {
    end.wait(std::chrono::hours(24), python_on_wait());
    stream_->synchronize();
  });
  drop_finished();
}

std::size_t PythonStream::under_way() {
  (void)stream_.get();
  drop_finished();
  return kept_.size();
}

bool PythonStream::ended(const Event& end) {
  try {
    return end.ready();
  } catch (const Error&) {
    return true;
  }
}

void PythonStream::drop_finished() {
  while (!kept_.empty() && ended(kept_.front().end)) kept_.pop_front();
}

void PythonStream::drain() noexcept {
  if (interrupts() != interrupts_seen_) stop_->store(true);
  try {
    const Event end = stream_->record();
    try {
      without_gil([&] { end.wait(std::chrono::hours(24), python_on_wait()); });
    } catch (nb::python_error&) {  // a destructor cannot raise: raise again once it is done
      stop_->store(true);
      PyErr_SetInterrupt();
      without_gil([&] { end.wait(); });
    }
  } catch (...) {  // the work's own exceptions belong to its events
  }
}

KeepUntilDone::KeepUntilDone(PythonStream* stream, std::initializer_list<const View*> views)
    : stream_(stream) {
  if (stream == nullptr) return;
  for (const View* view : views) {
    if (view != nullptr && !view->ordered()) views_.push_back(*view);
  }
}

KeepUntilDone::~KeepUntilDone() {
  if (stream_ == nullptr || (stream_->is_cuda() && views_.empty())) return;
  try {
    stream_->keep(std::move(views_));
  } catch (const std::exception&) {  // a GPU that has failed uses nothing any more
  }
}

void bind_stream(nb::module_& m) {
  nb::class_<HeldEvent>(m, "Event", "Marks a point of a stream.")
      .def("__init__", [](HeldEvent* self) { new (self) HeldEvent(Event()); })
      .def(
          "ready", [](const HeldEvent& e) { return e->ready(); },
          "True when all work before the event has ended. Never blocks.")
      .def(
          "wait",
          [](const HeldEvent& e, std::optional<double> deadline) {
            const auto limit = deadline ? to_nanoseconds(*deadline, "deadline")
                                        : std::chrono::nanoseconds(std::chrono::hours(24));
            without_gil([&] { e->wait(limit, python_on_wait()); });
          },
          nb::arg("deadline") = nb::none(),
          "Blocks until the event is complete; raises what the work raised. `deadline`: seconds, "
          "None = 24 hours.")
      .def("__repr__", [](const HeldEvent& e) {
        return repr_of("Event", [&] { return e->ready() ? "complete" : "under way"; });
      });

  nb::class_<PythonStream>(m, "Stream",
                           "A queue of work: one worker thread, or (`of_cuda`) the caller's CUDA "
                           "stream.")
      .def(nb::init<>())
      .def_static(
          "of_cuda",
          [](std::uintptr_t handle, int device) { return new PythonStream(handle, device); },
          nb::arg("handle"), nb::arg("device"), nb::rv_policy::take_ownership,
          "The CUDA stream with this handle (a cudaStream_t as an integer, 0: the default stream) "
          "on that\ndevice. It must outlive everything made or used on it. Raises "
          "`UnsupportedError` in "
          "a build without the\nCUDA engine.")
      .def_prop_ro(
          "device",
          [](const PythonStream& s) -> std::optional<int> {
            return s.is_cuda() ? std::optional(s.device().index) : std::nullopt;
          },
          "Ordinal of its GPU; None: a worker thread.")
      .def_prop_ro(
          "cuda_stream",
          [](const PythonStream& s) -> std::optional<std::uintptr_t> {
            return s.is_cuda() ? std::optional(reinterpret_cast<std::uintptr_t>(s.native()))
                               : std::nullopt;
          },
          "The handle; None: a worker thread.")
      .def(
          "record", [](PythonStream& s) { return HeldEvent(s.record()); },
          "An event that is complete when everything submitted so far has ended.")
      .def(
          "wait", [](PythonStream& s, const HeldEvent& event) { s.wait(event.get()); },
          nb::arg("event"), "Later work of this stream starts after `event`.")
      .def("synchronize", &PythonStream::synchronize,
           "Blocks until the queue is empty; raises the first exception since the last call.")
      .def("__repr__", [](PythonStream& s) {
        return repr_of("Stream",
                       [&] { return std::to_string(s.under_way()) + " calls under way"; });
      });
}

}  // namespace ferry::python
