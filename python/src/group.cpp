#include "group.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "bind.hpp"
#include "bootstrap.hpp"
#include "plan.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace ferry::python {
namespace {

using HeldReceived = Held<Received>;
using HeldCombined = Held<Combined>;

GroupConfig make_config(std::int64_t experts, double deadline, std::size_t memory_bytes,
                        FabricKind fabric, Backend backend, int device, std::uint64_t sim_seed,
                        int domain_size, FabricKind network, Crossing crossing,
                        std::string elastic = {}, std::string arbiter = {}) {
  GroupConfig config;
  config.experts = experts;
  config.deadline = to_nanoseconds(deadline, "Group: deadline");
  config.memory_bytes = memory_bytes;
  config.fabric = fabric;
  config.backend = backend;
  config.device = device;
  config.sim_seed = sim_seed;
  config.domain_size = domain_size;
  config.network = network;
  config.crossing = crossing;
  config.elastic = std::move(elastic);
  config.arbiter = std::move(arbiter);
  config.on_wait = python_on_wait();
  return config;
}

void make_group(HeldGroup* self, const HeldBootstrap& bootstrap, std::int64_t experts,
                double deadline, std::size_t memory_bytes, FabricKind fabric, Backend backend,
                int device, std::uint64_t sim_seed, int domain_size, FabricKind network,
                Crossing crossing, const std::string& elastic, const std::string& arbiter,
                std::optional<bool> tune, const std::optional<std::string>& tuning, int fewest_sms,
                int most_sms) {
  GroupConfig config = make_config(experts, deadline, memory_bytes, fabric, backend, device,
                                   sim_seed, domain_size, network, crossing, elastic, arbiter);
  config.tune = tune;
  if (tuning) config.tuning = load_tuning(*tuning);
  config.fewest_sms = fewest_sms;
  config.most_sms = most_sms;
  std::shared_ptr<Bootstrap> meeting = bootstrap.get();
  new (self) HeldGroup(without_gil([&] { return Group(std::move(meeting), std::move(config)); }));
}

HeldPlan plan(const HeldGroup& group, const View& topk_idx, PythonStream* stream,
              std::uint64_t placement_digest) {
  const PlanOptions options{stream_or_null(stream), placement_digest};
  const KeepUntilDone keep(stream, {&topk_idx});
  return HeldPlan(without_gil([&] { return group->plan(topk_idx.read(), options); }));
}

HeldReceived dispatch(const HeldGroup& group, const View& x, const HeldPlan* plan,
                      const View* topk_idx, const View* topk_weights, const View* scales,
                      WireFormat format, ScaleFormat scale_format, RowOrder order,
                      std::int64_t alignment, bool row_weights, std::int64_t max_recv_rows,
                      const View* out, PythonStream* stream, int num_sms, Crossing crossing) {
  DispatchOptions options;
  options.crossing = crossing;
  options.format = format;
  options.scale_format = scale_format;
  options.num_sms = num_sms;
  options.topk_weights = optional_read(topk_weights);
  options.scales = optional_read(scales);
  options.order = order;
  options.alignment = alignment;
  options.row_weights = row_weights;
  options.max_recv_rows = max_recv_rows;
  options.out = optional_write(out);
  options.stream = stream_or_null(stream);
  const KeepUntilDone keep(stream, {&x, topk_idx, topk_weights, scales, out});
  return HeldReceived(without_gil([&] {
    return plan != nullptr ? group->dispatch(x.read(), plan->get(), options)
                           : group->dispatch(x.read(), topk_idx->read(), options);
  }));
}

HeldCombined combine(const HeldGroup& group, const View& rows, const HeldPlan& plan, RowOrder order,
                     std::int64_t alignment, const View* topk_weights, bool apply_weights,
                     const View* bias0, const View* bias1, const View* out, PythonStream* stream,
                     int num_sms, Crossing crossing) {
  CombineOptions options;
  options.crossing = crossing;
  options.num_sms = num_sms;
  options.order = order;
  options.alignment = alignment;
  options.topk_weights = optional_read(topk_weights);
  options.apply_weights = apply_weights;
  options.bias0 = optional_read(bias0);
  options.bias1 = optional_read(bias1);
  options.out = optional_write(out);
  options.stream = stream_or_null(stream);
  const KeepUntilDone keep(stream, {&rows, topk_weights, bias0, bias1, out});
  return HeldCombined(
      without_gil([&] { return group->combine(rows.read(), plan.get(), options); }));
}

HeldTensor empty(const HeldGroup& group, const std::vector<std::int64_t>& shape, Dtype dtype) {
  return HeldTensor(without_gil([&] { return group->empty(Extents(std::span(shape)), dtype); }));
}

void bind_enums(nb::module_& m) {
  nb::enum_<FabricKind>(m, "FabricKind")
      .value("automatic", FabricKind::automatic)
      .value("local", FabricKind::local)
      .value("shm", FabricKind::shm)
      .value("sim", FabricKind::sim)
      .value("ofi", FabricKind::ofi);
  nb::enum_<Backend>(m, "Backend")
      .value("automatic", Backend::automatic)
      .value("host", Backend::host)
      .value("cuda", Backend::cuda);
  nb::enum_<RowOrder>(m, "RowOrder")
      .value("rank_major", RowOrder::rank_major)
      .value("expert_major", RowOrder::expert_major);
  nb::enum_<WireFormat>(m, "WireFormat")
      .value("as_is", WireFormat::as_is)
      .value("e4m3", WireFormat::e4m3)
      .value("nvfp4", WireFormat::nvfp4);
  nb::enum_<ScaleFormat>(m, "ScaleFormat")
      .value("f32", ScaleFormat::f32)
      .value("f32_pow2", ScaleFormat::f32_pow2)
      .value("ue8m0_packed", ScaleFormat::ue8m0_packed);
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

void bind_view(nb::module_& m) {
  nb::class_<GroupView>(m, "GroupView", "Who is in a group; ranks keep their numbers for ever.")
      .def_ro("epoch", &GroupView::epoch, "Counts the memberships of the group, from 1.")
      .def_ro("ranks", &GroupView::ranks, "In this epoch, ascending.")
      .def_ro("lost", &GroupView::lost, "The group's other ranks, ascending.")
      .def_ro("step", &GroupView::step, "The newest that any rank has committed; 0: none.")
      .def_ro("joined", &GroupView::joined,
              "Processes that joined since that step, ascending: they have no state.")
      .def(
          "__eq__",
          [](const GroupView& a, nb::handle b) {
            return nb::isinstance<GroupView>(b) && a == nb::cast<const GroupView&>(b);
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const GroupView& v) {
        return "GroupView(epoch=" + std::to_string(v.epoch) + ", ranks=" + list_of(v.ranks) +
               ", lost=" + list_of(v.lost) + ", step=" + std::to_string(v.step) +
               ", joined=" + list_of(v.joined) + ")";
      });
}

void bind_results(nb::module_& m) {
  nb::class_<HeldReceived>(m, "Received")
      .def_prop_ro("x", [](const HeldReceived& r) { return to_python(r->x); })
      .def_prop_ro("scales", [](const HeldReceived& r) { return to_python(r->scales); })
      .def_prop_ro("topk_idx", [](const HeldReceived& r) { return to_python(r->topk_idx); })
      .def_prop_ro("topk_weights", [](const HeldReceived& r) { return to_python(r->topk_weights); })
      .def_prop_ro("source_token", [](const HeldReceived& r) { return to_python(r->source_token); })
      .def_prop_ro("slot_rows", [](const HeldReceived& r) { return to_python(r->slot_rows); })
      .def_prop_ro("expert_offsets",
                   [](const HeldReceived& r) { return to_python(r->expert_offsets); })
      .def_prop_ro("row_weights", [](const HeldReceived& r) { return to_python(r->row_weights); })
      .def_prop_ro("plan",
                   [](const HeldReceived& r) -> std::optional<HeldPlan> {
                     if (!r->plan) return std::nullopt;
                     return HeldPlan(r->plan);
                   })
      .def_prop_ro("event", [](const HeldReceived& r) { return HeldEvent(r->event); })
      .def(
          "origins",
          [](const HeldReceived& r, bool ids) {
            Received kept;
            if (ids) kept.topk_idx = r->topk_idx;
            kept.source_token = r->source_token;
            kept.slot_rows = r->slot_rows;
            return HeldReceived(std::move(kept));
          },
          "Only source_token, slot_rows and, if asked for, topk_idx: it keeps no other memory.");
  nb::class_<HeldCombined>(m, "Combined")
      .def_prop_ro("x", [](const HeldCombined& r) { return to_python(r->x); })
      .def_prop_ro("topk_weights", [](const HeldCombined& r) { return to_python(r->topk_weights); })
      .def_prop_ro("event", [](const HeldCombined& r) { return HeldEvent(r->event); });
  nb::class_<MemoryStats>(m, "MemoryStats", "Bytes that a group holds, exact.")
      .def_ro("control_bytes", &MemoryStats::control_bytes, "Flags and mailboxes.")
      .def_ro("arena_bytes", &MemoryStats::arena_bytes, "Receive tensors, in use or free.")
      .def_ro("arena_used_bytes", &MemoryStats::arena_used_bytes, "Of which handed out now.")
      .def_ro("latency_bytes", &MemoryStats::latency_bytes, "Buffers of latency exchanges.")
      .def(
          "__eq__",
          [](const MemoryStats& a, nb::handle b) {
            return nb::isinstance<MemoryStats>(b) && a == nb::cast<const MemoryStats&>(b);
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const MemoryStats& u) {
        return "MemoryStats(control_bytes=" + std::to_string(u.control_bytes) +
               ", arena_bytes=" + std::to_string(u.arena_bytes) +
               ", arena_used_bytes=" + std::to_string(u.arena_used_bytes) +
               ", latency_bytes=" + std::to_string(u.latency_bytes) + ")";
      });
  nb::class_<TimeStats>(m, "TimeStats", "Nanoseconds that this rank has spent inside exchanges.")
      .def_ro("exchange_ns", &TimeStats::exchange_ns,
              "In plan, dispatch and combine, waits included.")
      .def_ro("wait_ns", &TimeStats::wait_ns, "Of which waiting for peers.")
      .def("__repr__", [](const TimeStats& u) {
        return "TimeStats(exchange_ns=" + std::to_string(u.exchange_ns) +
               ", wait_ns=" + std::to_string(u.wait_ns) + ")";
      });
}

void bind_tuning(nb::module_& m) {
  nb::class_<TunedCall>(m, "TunedCall", "Settings of one kind of calls, and why.")
      .def_ro("call", &TunedCall::call, "\"dispatch\" or \"combine\".")
      .def_prop_ro("dtype", [](const TunedCall& t) { return std::string(name_of(t.dtype)); })
      .def_prop_ro(
          "order",
          [](const TunedCall& t) {
            return std::string(t.order == RowOrder::expert_major ? "expert_major" : "rank_major");
          })
      .def_ro("hidden", &TunedCall::hidden)
      .def_ro("ranks", &TunedCall::ranks)
      .def_ro("tokens", &TunedCall::tokens,
              "Of the rank that has most: from so many to less than twice as many.")
      .def_ro("first", &TunedCall::first, "The plan's first dispatch, which brings routes.")
      .def_prop_ro("crossing", [](const TunedCall& t) { return std::string(name_of(t.crossing)); })
      .def_ro("chunk_bytes", &TunedCall::chunk_bytes, "That cross as one write; 0: no matter.")
      .def_ro("num_sms", &TunedCall::num_sms, "On GPUs.")
      .def_ro("settled", &TunedCall::settled, "Whether the search has ended.")
      .def_ro("probes", &TunedCall::probes, "Calls that were timed since it began.")
      .def_ro("seconds", &TunedCall::seconds, "A call takes, on its slowest rank, for `tokens`.")
      .def_ro("why", &TunedCall::why)
      .def("__repr__", [](const TunedCall& t) {
        return "TunedCall(" + t.call + " " + std::string(name_of(t.dtype)) +
               ", tokens=" + std::to_string(t.tokens) +
               ", crossing=" + std::string(name_of(t.crossing)) +
               ", chunk_bytes=" + std::to_string(t.chunk_bytes) +
               ", num_sms=" + std::to_string(t.num_sms) + ": " + t.why + ")";
      });
}

void bind_exchanges(nb::class_<HeldGroup>& group) {
  group
      .def("plan", &plan, nb::arg("topk_idx"), nb::arg("stream").none(),
           nb::arg("placement_digest"))
      .def("dispatch", &dispatch, nb::arg("x"), nb::arg("plan").none(), nb::arg("topk_idx").none(),
           nb::arg("topk_weights").none(), nb::arg("scales").none(), nb::arg("format"),
           nb::arg("scale_format"), nb::arg("order"), nb::arg("alignment"), nb::arg("row_weights"),
           nb::arg("max_recv_rows"), nb::arg("out").none(), nb::arg("stream").none(),
           nb::arg("num_sms"), nb::arg("crossing"))
      .def("combine", &combine, nb::arg("rows"), nb::arg("plan"), nb::arg("order"),
           nb::arg("alignment"), nb::arg("topk_weights").none(), nb::arg("apply_weights"),
           nb::arg("bias0").none(), nb::arg("bias1").none(), nb::arg("out").none(),
           nb::arg("stream").none(), nb::arg("num_sms"), nb::arg("crossing"))
      .def("empty", &empty, nb::arg("shape"), nb::arg("dtype"))
      .def("barrier", [](const HeldGroup& g) { without_gil([&] { g->barrier(); }); })
      .def("regroup", [](const HeldGroup& g) { return without_gil([&] { return g->regroup(); }); })
      .def(
          "commit",
          [](const HeldGroup& g, std::uint64_t step) {
            return without_gil([&] { return g->commit(step); });
          },
          nb::arg("step"))
      .def("view", [](const HeldGroup& g) { return g->view(); });
}

}  // namespace

void bind_group(nb::module_& m) {
  bind_enums(m);
  bind_results(m);
  bind_tuning(m);
  bind_view(m);
  nb::class_<HeldGroup> group(m, "Group");
  group
      .def("__init__", &make_group, nb::arg("bootstrap"), nb::arg("experts"), nb::arg("deadline"),
           nb::arg("memory_bytes"), nb::arg("fabric"), nb::arg("backend"), nb::arg("device"),
           nb::arg("sim_seed"), nb::arg("domain_size"), nb::arg("network"), nb::arg("crossing"),
           nb::arg("elastic"), nb::arg("arbiter"), nb::arg("tune").none(), nb::arg("tuning").none(),
           nb::arg("fewest_sms"), nb::arg("most_sms"))
      .def_prop_ro("rank", [](const HeldGroup& g) { return g->rank(); })
      .def_prop_ro("size", [](const HeldGroup& g) { return g->size(); })
      .def_prop_ro("experts", [](const HeldGroup& g) { return g->experts(); })
      .def_prop_ro("local_experts", [](const HeldGroup& g) { return g->local_experts(); })
      .def_prop_ro("domains", [](const HeldGroup& g) { return g->domains(); })
      .def(
          "domain_of", [](const HeldGroup& g, int rank) { return g->domain_of(rank); },
          nb::arg("rank"))
      .def("network", [](const HeldGroup& g) { return g->network(); })
      .def("nics", [](const HeldGroup& g) { return g->nics(); })
      .def("tuning", [](const HeldGroup& g) { return g->tuning(); })
      .def_prop_ro("fabric_name", [](const HeldGroup& g) { return g->fabric_name(); })
      .def_prop_ro("destroyed", [](const HeldGroup& g) { return g->destroyed(); })
      .def(
          "is_registered",
          [](const HeldGroup& g, std::uintptr_t address) {
            return g->is_registered(reinterpret_cast<const void*>(address));
          },
          nb::arg("address"))
      .def(
          "record_stream",
          [](const HeldGroup& g, std::uintptr_t address, PythonStream& stream) {
            g->record_stream(reinterpret_cast<const void*>(address), stream.stream());
          },
          nb::arg("address"), nb::arg("stream"))
      .def("memory", [](const HeldGroup& g) { return g->memory(); })
      .def("time", [](const HeldGroup& g) { return g->time(); })
      .def("metrics", [](const HeldGroup& g) { return g->metrics(); })
      .def(
          "start_trace", [](const HeldGroup& g, std::size_t most) { g->start_trace(most); },
          nb::arg("most"))
      .def("take_trace", [](const HeldGroup& g) { return g->take_trace(); })
      .def("destroy", [](const HeldGroup& g) { without_gil([&] { g->destroy(); }); })
      .def_static(
          "memory_hint",
          [](std::int64_t experts, std::size_t memory_bytes, FabricKind fabric, Backend backend,
             int ranks) {
            return Group::memory_hint(
                make_config(experts, 60.0, memory_bytes, fabric, backend, -1, 1, 0,
                            FabricKind::automatic, Crossing::automatic, {}),
                ranks);
          },
          nb::arg("experts"), nb::arg("memory_bytes"), nb::arg("fabric"), nb::arg("backend"),
          nb::arg("ranks"));
  bind_exchanges(group);
}

}  // namespace ferry::python
