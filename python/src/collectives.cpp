#include "ferry/collectives.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "bind.hpp"
#include "bootstrap.hpp"
#include "plain_array.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

using HeldCollectives = Held<Collectives>;
using Counts = std::vector<std::int64_t>;

void make(HeldCollectives* self, const HeldBootstrap& bootstrap, double deadline,
          std::size_t memory_bytes, FabricKind fabric, std::uint64_t sim_seed, int domain_size,
          FabricKind network, Backend backend, int device) {
  GroupConfig config;
  config.deadline = to_nanoseconds(deadline, "Collectives: deadline");
  config.memory_bytes = memory_bytes;
  config.fabric = fabric;
  config.sim_seed = sim_seed;
  config.domain_size = domain_size;
  config.network = network;
  config.backend = backend;
  config.device = device;
  config.on_wait = python_on_wait();
  std::shared_ptr<Bootstrap> meeting = bootstrap.get();
  new (self) HeldCollectives(
      without_gil([&] { return Collectives(std::move(meeting), std::move(config)); }));
}

HeldEvent all_reduce(const HeldCollectives& all, const View& x, ReduceOp op, PythonStream* stream,
                     Algorithm algorithm, const std::vector<int>& shares, bool any_order,
                     int num_sms, ReduceFormat format) {
  const KeepUntilDone keep(stream, {&x});
  const ReduceOptions options{op,    stream_or_null(stream), algorithm, shares, any_order, num_sms,
                              format};
  return HeldEvent(without_gil([&] { return all->all_reduce(x.write(), options); }));
}

// Whole calls, with all other arguments by default. False: nothing was done, as an array is no
// plain one.

template <class Call>
bool call_plain(nb::handle x, nb::handle out, Call call) {
  const std::optional<PlainArray> from = plain_array(x, false);
  const std::optional<PlainArray> to = from ? plain_array(out, true) : std::nullopt;
  if (to) without_gil([&] { call(from->view, to->view); });
  return to.has_value();
}

bool all_reduce_plain(const HeldCollectives& all, nb::handle x, ReduceOp op) {
  const std::optional<PlainArray> plain = plain_array(x, true);
  if (plain) without_gil([&] { all->all_reduce(plain->view, {.op = op}); });
  return plain.has_value();
}

bool reduce_scatter_plain(const HeldCollectives& all, nb::handle x, nb::handle out, ReduceOp op) {
  return call_plain(x, out, [&](const TensorView& from, const TensorView& to) {
    all->reduce_scatter(from, to, {.op = op});
  });
}

bool all_gather_plain(const HeldCollectives& all, nb::handle x, nb::handle out) {
  return call_plain(
      x, out, [&](const TensorView& from, const TensorView& to) { all->all_gather(from, to, {}); });
}

bool broadcast_plain(const HeldCollectives& all, nb::handle x, int root) {
  const std::optional<PlainArray> plain = plain_array(x, true);
  if (plain) without_gil([&] { all->broadcast(plain->view, root, {}); });
  return plain.has_value();
}

bool all_to_all_plain(const HeldCollectives& all, nb::handle x, nb::handle out) {
  return call_plain(
      x, out, [&](const TensorView& from, const TensorView& to) { all->all_to_all(from, to, {}); });
}

HeldEvent reduce_scatter(const HeldCollectives& all, const View& x, const View& out, ReduceOp op,
                         PythonStream* stream, int num_sms, ReduceFormat format) {
  const KeepUntilDone keep(stream, {&x, &out});
  const ReduceOptions options{
      .op = op, .stream = stream_or_null(stream), .num_sms = num_sms, .format = format};
  return HeldEvent(
      without_gil([&] { return all->reduce_scatter(x.read(), out.write(), options); }));
}

HeldEvent all_gather(const HeldCollectives& all, const View& x, const View& out,
                     PythonStream* stream, int num_sms) {
  const KeepUntilDone keep(stream, {&x, &out});
  const CollectiveOptions options{stream_or_null(stream), num_sms};
  return HeldEvent(without_gil([&] { return all->all_gather(x.read(), out.write(), options); }));
}

HeldEvent broadcast(const HeldCollectives& all, const View& x, int root, PythonStream* stream,
                    int num_sms) {
  const KeepUntilDone keep(stream, {&x});
  const CollectiveOptions options{stream_or_null(stream), num_sms};
  return HeldEvent(without_gil([&] { return all->broadcast(x.write(), root, options); }));
}

HeldEvent all_to_all(const HeldCollectives& all, const View& x, const View& out, const Counts& to,
                     const Counts& from, PythonStream* stream, int num_sms) {
  const KeepUntilDone keep(stream, {&x, &out});
  const CollectiveOptions options{stream_or_null(stream), num_sms};
  return HeldEvent(without_gil([&] {
    return to.empty() ? all->all_to_all(x.read(), out.write(), options)
                      : all->all_to_all(x.read(), to, out.write(), from, options);
  }));
}

HeldEvent copy_rows(const HeldCollectives& all, const View& x, const View& out,
                    const std::vector<std::int32_t>& table, PythonStream* stream) {
  const KeepUntilDone keep(stream, {&x, &out});
  const CollectiveOptions options{stream_or_null(stream)};
  return HeldEvent(
      without_gil([&] { return all->copy_rows(x.read(), out.write(), table, options); }));
}

HeldEvent add_rows(const HeldCollectives& all, const View& x, const View& out,
                   const std::vector<std::int32_t>& table, PythonStream* stream) {
  const KeepUntilDone keep(stream, {&x, &out});
  const CollectiveOptions options{stream_or_null(stream)};
  return HeldEvent(
      without_gil([&] { return all->add_rows(x.read(), out.write(), table, options); }));
}

/// The same by a table in GPU memory.
HeldEvent move_rows_on_gpu(const HeldCollectives& all, const View& x, const View& out,
                           const View& table, bool adds, PythonStream* stream, int num_sms) {
  const KeepUntilDone keep(stream, {&x, &out, &table});
  const CollectiveOptions options{stream_or_null(stream), num_sms};
  return HeldEvent(without_gil([&] {
    return adds ? all->add_rows(x.read(), out.write(), table.read(), options)
                : all->copy_rows(x.read(), out.write(), table.read(), options);
  }));
}

/// Of a transfer: not `KeepUntilDone`, whose point of the stream would come between transfers.
HeldEvent kept(PythonStream* stream, const View& x, Event end) {
  if (stream != nullptr) stream->keep({x}, end);
  return HeldEvent(std::move(end));
}

HeldEvent send(const HeldCollectives& all, const View& x, int peer, int tag, PythonStream* stream) {
  const CollectiveOptions options{stream_or_null(stream)};
  return kept(stream, x, without_gil([&] { return all->send(x.read(), peer, tag, options); }));
}

HeldEvent recv(const HeldCollectives& all, const View& x, int peer, int tag, PythonStream* stream) {
  const CollectiveOptions options{stream_or_null(stream)};
  return kept(stream, x, without_gil([&] { return all->recv(x.write(), peer, tag, options); }));
}

HeldTensor empty(const HeldCollectives& all, const std::vector<std::int64_t>& shape, Dtype dtype) {
  return HeldTensor(without_gil([&] { return all->empty(Extents(std::span(shape)), dtype); }));
}

using HeldWindow = Held<Window>;

HeldWindow window(const HeldCollectives& all, std::int64_t rows, std::int64_t columns,
                  Dtype dtype) {
  return HeldWindow(without_gil([&] { return all->window(rows, columns, dtype); }));
}

void bind_window(nb::module_& m) {
  nb::class_<HeldWindow>(m, "Window")
      .def_prop_ro("rows", [](const HeldWindow& w) { return HeldTensor(w->rows()); })
      .def(
          "first", [](const HeldWindow& w, int rank) { return w->first(rank); }, nb::arg("rank"))
      .def(
          "get",
          [](const HeldWindow& w, const View& numbers, const View& out) {
            without_gil([&] { w->get(numbers.read(), out.write()); });
          },
          nb::arg("numbers"), nb::arg("out"));
}

void bind_compression(nb::module_& m) {
  nb::class_<CompressionStats>(m, "CompressionStats", "What a rank has encoded since creation.")
      .def_ro("calls", &CompressionStats::calls, "Calls whose sums crossed in codes.")
      .def_ro("fallen_back", &CompressionStats::fallen_back,
              "Of them, with a chunk of this rank in a wider format than theirs.")
      .def_ro("chunks", &CompressionStats::chunks, "Chunks that were encoded.")
      .def_ro("nonfinite", &CompressionStats::nonfinite,
              "Chunks with NaN or infinity: sent as f32.")
      .def_ro("overflows", &CompressionStats::overflows,
              "Chunks with a value beyond the format: sent as bf16 or f32.")
      .def_ro("spikes", &CompressionStats::spikes,
              "Chunks with an error over three times the mean: sent as bf16.")
      .def_ro("exact_bytes", &CompressionStats::exact_bytes, "Of the chunks as f32.")
      .def_ro("wire_bytes", &CompressionStats::wire_bytes, "Of the chunks as they crossed.")
      .def_ro("relative_error", &CompressionStats::relative_error,
              "Root of (sum of squared errors / sum of squares), in the format that was measured.")
      .def("__repr__", [](const CompressionStats& s) {
        return "CompressionStats(calls=" + std::to_string(s.calls) +
               ", fallen_back=" + std::to_string(s.fallen_back) +
               ", exact_bytes=" + std::to_string(s.exact_bytes) +
               ", wire_bytes=" + std::to_string(s.wire_bytes) +
               ", relative_error=" + std::to_string(s.relative_error) + ")";
      });
}

void bind_options(nb::module_& m) {
  nb::enum_<ReduceOp>(m, "ReduceOp")
      .value("sum", ReduceOp::sum)
      .value("mean", ReduceOp::mean)
      .value("product", ReduceOp::product)
      .value("min", ReduceOp::min)
      .value("max", ReduceOp::max);
  nb::class_<Choice>(m, "Choice")
      .def_ro("algorithm", &Choice::algorithm)
      .def_ro("shares", &Choice::shares)
      .def_ro("predicted_seconds", &Choice::predicted_seconds)
      .def_ro("observed_seconds", &Choice::observed_seconds)
      .def_ro("latency_seconds", &Choice::latency_seconds)
      .def_ro("bytes_per_second", &Choice::bytes_per_second)
      .def_ro("past_caches", &Choice::past_caches)
      .def_prop_ro("slow_pairs", [](const Choice& choice) {
        nb::list pairs;
        for (const SlowPair& p : choice.slow_pairs) {
          pairs.append(nb::make_tuple(p.a, p.b, p.bytes_per_second));
        }
        return pairs;
      });
  nb::enum_<Algorithm>(m, "Algorithm")
      .value("automatic", Algorithm::automatic)
      .value("one_shot", Algorithm::one_shot)
      .value("direct", Algorithm::direct)
      .value("hierarchical", Algorithm::hierarchical)
      .value("ring", Algorithm::ring)
      .value("tree", Algorithm::tree);
  nb::enum_<ReduceFormat>(m, "ReduceFormat")
      .value("exact", ReduceFormat::exact)
      .value("bf16", ReduceFormat::bf16)
      .value("f16", ReduceFormat::f16)
      .value("e4m3", ReduceFormat::e4m3)
      .value("e5m2", ReduceFormat::e5m2)
      .value("automatic", ReduceFormat::automatic);
}

}  // namespace

void bind_collectives(nb::module_& m) {
  bind_options(m);
  bind_compression(m);
  bind_window(m);
  nb::class_<HeldCollectives>(m, "Collectives")
      .def("__init__", &make, nb::arg("bootstrap"), nb::arg("deadline"), nb::arg("memory_bytes"),
           nb::arg("fabric"), nb::arg("sim_seed"), nb::arg("domain_size"), nb::arg("network"),
           nb::arg("backend"), nb::arg("device"))
      .def_prop_ro("rank", [](const HeldCollectives& c) { return c->rank(); })
      .def_prop_ro("size", [](const HeldCollectives& c) { return c->size(); })
      .def_prop_ro("domains", [](const HeldCollectives& c) { return c->domains(); })
      .def_prop_ro("fabric_name", [](const HeldCollectives& c) { return c->fabric_name(); })
      .def_prop_ro("destroyed", [](const HeldCollectives& c) { return c->destroyed(); })
      .def("all_reduce", &all_reduce, nb::arg("x"), nb::arg("op"), nb::arg("stream").none(),
           nb::arg("algorithm"), nb::arg("shares"), nb::arg("any_order"), nb::arg("num_sms"),
           nb::arg("format"))
      .def("all_reduce_plain", &all_reduce_plain, nb::arg("x").none(), nb::arg("op"),
           "all_reduce with defaults, of a plain array; False: not done, as it is another one.")
      .def("reduce_scatter_plain", &reduce_scatter_plain, nb::arg("x").none(),
           nb::arg("out").none(), nb::arg("op"), "The same, as the next.")
      .def("all_gather_plain", &all_gather_plain, nb::arg("x").none(), nb::arg("out").none())
      .def("broadcast_plain", &broadcast_plain, nb::arg("x").none(), nb::arg("root"))
      .def("all_to_all_plain", &all_to_all_plain, nb::arg("x").none(), nb::arg("out").none())
      .def("reduce_scatter", &reduce_scatter, nb::arg("x"), nb::arg("out"), nb::arg("op"),
           nb::arg("stream").none(), nb::arg("num_sms"), nb::arg("format"))
      .def("all_gather", &all_gather, nb::arg("x"), nb::arg("out"), nb::arg("stream").none(),
           nb::arg("num_sms"))
      .def("broadcast", &broadcast, nb::arg("x"), nb::arg("root"), nb::arg("stream").none(),
           nb::arg("num_sms"))
      .def("all_to_all", &all_to_all, nb::arg("x"), nb::arg("out"), nb::arg("to"), nb::arg("from_"),
           nb::arg("stream").none(), nb::arg("num_sms"))
      .def("copy_rows", &copy_rows, nb::arg("x"), nb::arg("out"), nb::arg("table"),
           nb::arg("stream").none())
      .def("add_rows", &add_rows, nb::arg("x"), nb::arg("out"), nb::arg("table"),
           nb::arg("stream").none())
      .def("move_rows_on_gpu", &move_rows_on_gpu, nb::arg("x"), nb::arg("out"), nb::arg("table"),
           nb::arg("adds"), nb::arg("stream").none(), nb::arg("num_sms"))
      .def("send", &send, nb::arg("x"), nb::arg("peer"), nb::arg("tag"), nb::arg("stream").none())
      .def("recv", &recv, nb::arg("x"), nb::arg("peer"), nb::arg("tag"), nb::arg("stream").none())
      .def(
          "choice",
          [](const HeldCollectives& c, std::size_t bytes, bool any_order) {
            return c->choice(bytes, any_order);
          },
          nb::arg("bytes"), nb::arg("any_order"))
      .def("barrier", [](const HeldCollectives& c) { without_gil([&] { c->barrier(); }); })
      .def("empty", &empty, nb::arg("shape"), nb::arg("dtype"))
      .def("window", &window, nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"))
      .def(
          "is_registered",
          [](const HeldCollectives& c, std::uintptr_t address) {
            return c->is_registered(reinterpret_cast<const void*>(address));
          },
          nb::arg("address"))
      .def("memory", [](const HeldCollectives& c) { return c->memory(); })
      .def("time", [](const HeldCollectives& c) { return c->time(); })
      .def("network", [](const HeldCollectives& c) { return c->network(); })
      .def("compression", [](const HeldCollectives& c) { return c->compression(); })
      .def("destroy", [](const HeldCollectives& c) { without_gil([&] { c->destroy(); }); });
}

}  // namespace ferry::python
