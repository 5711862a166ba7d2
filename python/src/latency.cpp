#include "ferry/latency.hpp"

#include <nanobind/stl/optional.h>

#include <atomic>
#include <vector>

#include "bind.hpp"
#include "group.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

/// A result with a hook: until it was received, the call's arrays and its stream stay alive.
template <class Result>
class Hooked {
 public:
  Hooked(Result result, nb::object stream, std::vector<View> views)
      : result_(std::move(result)), stream_(std::move(stream)), views_(std::move(views)) {}

  Result& get() const { return result_.get(); }
  void receive() {
    without_gil([&] { result_->receive(); });
    if (!stream_.is_none()) nb::cast<PythonStream&>(stream_).keep(std::move(views_));
    views_.clear();
  }

 private:
  Held<Result> result_;
  nb::object stream_;
  std::vector<View> views_;
};

using Received = Hooked<LatencyReceived>;
using Combined = Hooked<LatencyCombined>;
using HeldExchange = Held<LatencyExchange>;

PythonStream* stream_pointer(const nb::object& stream) {
  return stream.is_none() ? nullptr : nb::cast<PythonStream*>(stream);
}

template <class Result>
Hooked<Result> hold(Result result, bool hook, const nb::object& stream,
                    std::initializer_list<const View*> views) {
  std::vector<View> kept;
  for (const View* view : views) {
    if (hook && view != nullptr) kept.push_back(*view);
  }
  return Hooked<Result>(std::move(result), hook ? stream : nb::none(), std::move(kept));
}

void make_exchange(HeldExchange* self, const HeldGroup& group, std::int64_t capacity,
                   std::int64_t hidden, int topk, Dtype dtype, RowOrder order, bool masks) {
  LatencyConfig config;
  config.capacity = capacity;
  config.hidden = hidden;
  config.topk = topk;
  config.dtype = dtype;
  config.order = order;
  config.masks = masks;
  new (self) HeldExchange(without_gil([&] { return LatencyExchange(group.get(), config); }));
}

Received dispatch(const HeldExchange& exchange, const View& x, const View& topk_idx,
                  const View* topk_weights, WireFormat format, ScaleFormat scale_format,
                  float global_scale, RowOrder order, const View* wait_ns, bool hook,
                  const nb::object& stream) {
  LatencyDispatchOptions options;
  options.format = format;
  options.scale_format = scale_format;
  options.global_scale = global_scale;
  options.order = order;
  options.topk_weights = optional_read(topk_weights);
  options.wait_ns = optional_write(wait_ns);
  options.hook = hook;
  options.stream = stream_or_null(stream_pointer(stream));
  const KeepUntilDone keep(stream_pointer(stream), {&x, &topk_idx, topk_weights, wait_ns});
  LatencyReceived result =
      without_gil([&] { return exchange->dispatch(x.read(), topk_idx.read(), options); });
  return hold(std::move(result), hook, stream, {&x, &topk_idx, topk_weights, wait_ns});
}

Combined combine(const HeldExchange& exchange, const View& rows, const Received& received,
                 const View* topk_weights, CombinePath path, CombineFormat format,
                 const View* wait_ns, bool hook, const View* out, const View* signals,
                 std::int64_t block_rows, std::int64_t threshold, bool is_unsigned,
                 const nb::object& stream) {
  LatencyCombineOptions options;
  if (signals != nullptr) options.signals = {signals->read(), block_rows, threshold, is_unsigned};
  options.path = path;
  options.format = format;
  options.wait_ns = optional_write(wait_ns);
  options.hook = hook;
  options.out = optional_write(out);
  options.stream = stream_or_null(stream_pointer(stream));
  const KeepUntilDone keep(stream_pointer(stream), {&rows, topk_weights, wait_ns, out, signals});
  LatencyCombined result = without_gil([&] {
    if (topk_weights == nullptr) return exchange->combine(rows.read(), received.get(), options);
    return exchange->combine(rows.read(), received.get(), topk_weights->read(), options);
  });
  return hold(std::move(result), hook, stream, {&rows, topk_weights, wait_ns, out, signals});
}

void bind_formats(nb::module_& m) {
  nb::enum_<CombinePath>(m, "CombinePath")
      .value("per_slot", CombinePath::per_slot)
      .value("per_rank", CombinePath::per_rank);
  nb::enum_<CombineFormat>(m, "CombineFormat")
      .value("as_is", CombineFormat::as_is)
      .value("e4m3", CombineFormat::e4m3)
      .value("logfmt10", CombineFormat::logfmt10);
}

}  // namespace

void bind_latency(nb::module_& m) {
  bind_formats(m);
  nb::class_<Received>(m, "LatencyReceived")
      .def_prop_ro("x", [](const Received& r) { return to_python(r.get().x); })
      .def_prop_ro("scales", [](const Received& r) { return to_python(r.get().scales); })
      .def_prop_ro("counts", [](const Received& r) { return to_python(r.get().counts); })
      .def_prop_ro("source_token",
                   [](const Received& r) { return to_python(r.get().source_token); })
      .def_prop_ro("ranges", [](const Received& r) { return to_python(r.get().ranges); })
      .def_prop_ro("topk_idx", [](const Received& r) { return to_python(r.get().topk_idx); })
      .def_prop_ro("topk_weights",
                   [](const Received& r) { return to_python(r.get().topk_weights); })
      .def_prop_ro("event", [](const Received& r) { return HeldEvent(r.get().event); })
      .def("receive", &Received::receive);
  nb::class_<Combined>(m, "LatencyCombined")
      .def_prop_ro("x", [](const Combined& c) { return to_python(c.get().x); })
      .def_prop_ro("event", [](const Combined& c) { return HeldEvent(c.get().event); })
      .def("receive", &Combined::receive);
  nb::class_<HeldExchange>(m, "LatencyExchange")
      .def("__init__", &make_exchange, nb::arg("group"), nb::arg("capacity"), nb::arg("hidden"),
           nb::arg("topk"), nb::arg("dtype"), nb::arg("order"), nb::arg("masks"))
      .def("dispatch", &dispatch, nb::arg("x"), nb::arg("topk_idx"), nb::arg("topk_weights").none(),
           nb::arg("format"), nb::arg("scale_format"), nb::arg("global_scale"), nb::arg("order"),
           nb::arg("wait_ns").none(), nb::arg("hook"), nb::arg("stream").none(),
           nb::sig("def dispatch(self, x: View, topk_idx: View, topk_weights: View | None, format: "
                   "WireFormat, scale_format: ScaleFormat, global_scale: float, order: RowOrder, "
                   "wait_ns: View | None, hook: bool, stream: Stream | None) -> LatencyReceived"))
      .def("combine", &combine, nb::arg("rows"), nb::arg("received"),
           nb::arg("topk_weights").none(), nb::arg("path"), nb::arg("format"),
           nb::arg("wait_ns").none(), nb::arg("hook"), nb::arg("out").none(),
           nb::arg("signals").none(), nb::arg("block_rows"), nb::arg("threshold"),
           nb::arg("is_unsigned"), nb::arg("stream").none(),
           nb::sig("def combine(self, rows: View, received: LatencyReceived, topk_weights: View | "
                   "None, path: CombinePath, format: CombineFormat, wait_ns: View | None, hook: "
                   "bool, out: View | None, signals: View | None, block_rows: int, threshold: int, "
                   "is_unsigned: bool, stream: Stream | None) -> LatencyCombined"))
      .def(
          "masked",
          [](const HeldExchange& e) {
            nb::list masks;
            for (const bool masked : e->masked()) masks.append(masked);
            return masks;
          },
          nb::sig("def masked(self) -> list[bool]"))
      .def(
          "set_mask",
          [](const HeldExchange& e, int rank, bool masked) {
            without_gil([&] { e->set_mask(rank, masked); });
          },
          nb::arg("rank"), nb::arg("masked"))
      .def("clear_masks", [](const HeldExchange& e) { without_gil([&] { e->clear_masks(); }); })
      .def("mask_count",
           [](const HeldExchange& e) {
             // Acquire: who sees the count sees the masks.
             return std::atomic_ref(const_cast<std::uint64_t&>(*e->mask_count()))
                 .load(std::memory_order_acquire);
           })
      .def("rejoin", [](const HeldExchange& e) { without_gil([&] { e->rejoin(); }); })
      .def_static(
          "memory_hint",
          [](std::int64_t capacity, std::int64_t hidden, int topk, Dtype dtype,
             std::int64_t experts, int ranks, RowOrder order, bool masks, int domains, bool cuda) {
            LatencyConfig config{capacity, hidden, topk, dtype};
            config.order = order;
            config.masks = masks;
            return LatencyExchange::memory_hint(config, experts, ranks,
                                                cuda ? DeviceKind::cuda : DeviceKind::cpu, domains);
          },
          nb::arg("capacity"), nb::arg("hidden"), nb::arg("topk"), nb::arg("dtype"),
          nb::arg("experts"), nb::arg("ranks"), nb::arg("order"), nb::arg("masks"),
          nb::arg("domains"), nb::arg("cuda"));
}

}  // namespace ferry::python
