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

PythonStream::~PythonStream() {
  try {
    stream_.get();
  } catch (const Error&) {  // in a forked child there is no worker
    for (Kept& kept : kept_) {
      for (View& view : kept.views) (void)new View(view);
    }
    return;
  }
  drain();
}

Stream& PythonStream::stream() {
  interrupts_seen_ = interrupts();
  return stream_.get();
}

void PythonStream::keep(std::vector<View> views) {
  drop_finished();
  kept_.push_back({stream_->record(), std::move(views)});
}

Event PythonStream::record() {
  drop_finished();
  return stream_->record();
}

void PythonStream::wait(const Event& event) {
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

void PythonStream::drop_finished() {
  while (!kept_.empty() && kept_.front().end.ready()) kept_.pop_front();
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
    if (view != nullptr) views_.push_back(*view);
  }
}

KeepUntilDone::~KeepUntilDone() {
  if (stream_ != nullptr) stream_->keep(std::move(views_));
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

  nb::class_<PythonStream>(m, "Stream", "A queue of work with one worker thread.")
      .def(nb::init<>())
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
