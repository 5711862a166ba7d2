// One case of latency mode: dispatch and combine, with and without hooks, one or two results alive.
#include <cstring>
#include <thread>

#include "compare.hpp"
#include "device.hpp"
#include "inputs.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr auto kWait = std::chrono::seconds(60);

/// Scales lie column by column; in ordinary memory, too.
Tensor scales_to_cpu(const Tensor& scales) {
  if (!scales || scales.view().device.kind == DeviceKind::cpu) return scales;
  const TensorView& view = scales.view();
  const Extents stored{view.shape[0], view.shape[2], view.shape[1]};
  const Tensor dense =
      to_cpu({TensorView(view.data, view.dtype, stored, view.device), scales.owner()});
  return {TensorView(dense.data(), view.dtype, view.shape, view.strides, Device{}), dense.owner()};
}

/// Everything that a dispatch brought, in ordinary memory.
LatencyReceived on_cpu(const LatencyReceived& got) {
  LatencyReceived cpu;
  cpu.x = to_cpu(got.x);
  cpu.scales = scales_to_cpu(got.scales);
  cpu.counts = to_cpu(got.counts);
  cpu.source_token = to_cpu(got.source_token);
  cpu.ranges = to_cpu(got.ranges);
  return cpu;
}

bool is_poisoned(const void* data, std::size_t bytes, Device where) {
  Bytes copy(bytes + 1);
  copy_bytes(copy.data(), data, bytes, where);
  return is_poison(copy.data(), bytes);
}

/// One generation on one rank.
class Generation {
 public:
  Generation(Session& session, const Case& c, std::uint64_t round)
      : session_(session),
        rank_(session.rank()),
        c_(c),
        round_(round),
        world_(make_world(c, round)),
        expected_(expect_latency(world_, rank_.rank())),
        group_(session.group(c)),
        exchange_(session.latency(c)) {}

  void dispatch() {
    LatencyDispatchOptions options;
    options.format = c_.wire == WireKind::as_is ? WireFormat::as_is : WireFormat::e4m3;
    if (c_.wire == WireKind::scale_pow2) options.scale_format = ScaleFormat::f32_pow2;
    if (c_.wire == WireKind::scale_packed) options.scale_format = ScaleFormat::ue8m0_packed;
    options_ = options;
    options.hook = hooked(HookKind::dispatch);
    options.stream = session_.stream(c_);
    ConstTensorView index(own().topk_idx.data(), Dtype::i64, {own().tokens, c_.topk});
    if (c_.index == IndexKind::i32) {
      index32_.assign(own().topk_idx.begin(), own().topk_idx.end());
      index = {index32_.data(), Dtype::i32, index.shape};
    }
    received_ = exchange_.dispatch(put({own().x.data(), c_.dtype, {own().tokens, c_.hidden}}),
                                   put(index), options);
    if (options.hook) {
      check_untouched();
      received_.receive();
    }
    finish(received_.event);
  }

  void check_rows() {
    const LatencyReceived got_all = on_cpu(received_);
    const std::int64_t local = world_.local_experts(rank_.rank()), rows = output_rows();
    const Dtype dtype = quantized() ? Dtype::e4m3 : c_.dtype;
    if (!same_shape(rank_, "x", got_all.x, dtype, {local, rows, c_.hidden})) return;
    rank_.check(group_.is_registered(received_.x.data()) || local == 0,
                "x does not lie in registered memory");
    const std::size_t row_bytes = got_all.x.view().row_bytes();
    for (std::int64_t e = 0; e < local; ++e) {
      const auto& theirs = expected_.rows[static_cast<std::size_t>(e)];
      if (!rank_.equal(got_all.counts.as<std::int32_t>()[e],
                       static_cast<std::int32_t>(theirs.size()), "counts")) {
        return;
      }
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        const std::int64_t place = e * rows + static_cast<std::int64_t>(i);
        const WireRow row =
            expect_wire_row(world_, theirs[i], options_.format, options_.scale_format);
        const std::byte* got =
            got_all.x.as<std::byte>() + static_cast<std::size_t>(place) * row_bytes;
        if (quantized()) {
          same_values(rank_, "latency dispatch: x", dtype, got, row.x.data(), 1, c_.hidden);
          check_scales(got_all.scales, e, static_cast<std::int64_t>(i), row);
        } else {
          same_bytes(rank_, "latency dispatch: x", got, row.x.data(), 1, row_bytes);
        }
        rank_.equal(got_all.source_token.as<std::int32_t>()[place], theirs[i].token,
                    "source_token");
      }
    }
    same_vector(rank_, "ranges", got_all.ranges.as<std::int64_t>(), expected_.ranges);
  }

  void combine() {
    LatencyCombineOptions options;
    options.hook = hooked(HookKind::combine);
    options.stream = session_.stream(c_);
    const std::int64_t tokens = own().tokens;
    const std::size_t out_bytes = own().x.size();
    const std::shared_ptr<void> out = allocate(out_bytes + 16, where());
    fill_bytes(out.get(), kPoison, out_bytes, where());
    const TensorView out_view(out.get(), c_.dtype, {tokens, c_.hidden}, where());
    if (c_.own_output) options.out = out_view;
    const std::int64_t local = world_.local_experts(rank_.rank());
    ConstTensorView rows(combine_rows(), c_.dtype, {local, output_rows(), c_.hidden}, where());
    const ConstTensorView weights = put({own().weights.data(), Dtype::f32, {tokens, c_.topk}});
    LatencyCombined got = exchange_.combine(rows, received_, weights, options);
    if (options.hook) {
      got.event.wait(kWait);
      if (c_.own_output) {
        group_.barrier();
        rank_.check(is_poisoned(out.get(), out_bytes, where()), "out was written before receive()");
      } else {
        poison(got.x);
        group_.barrier();
        rank_.check(is_poisoned(got.x.data(), got.x.view().bytes(), where()),
                    "combined x was written before receive()");
      }
      got.receive();
    }
    finish(got.event);
    const Tensor sum = to_cpu(got.x);
    const Bytes expected = expect_latency_combine(
        world_, rank_.rank(),
        [&](int d, std::int64_t e, std::int64_t place, std::byte* to) { fill(d, e, place, to); });
    if (!same_shape(rank_, "combined x", sum, c_.dtype, {tokens, c_.hidden})) return;
    same_values(rank_, "latency combine: x", c_.dtype, sum.data(), expected.data(), tokens,
                c_.hidden);
  }

  void drop() {
    poison(received_.x);
    session_.poisoned()[received_.x.data()] = received_.x.view().bytes();
    received_ = LatencyReceived{};
  }

 private:
  Device where() const { return rank_.where(); }
  /// Where calls of this rank read; kept until the generation ends.
  ConstTensorView put(const ConstTensorView& tensor) {
    inputs_.push_back(to_device(tensor, where()));
    return inputs_.back();
  }
  /// A call and its hook: on a stream, both.
  void finish(const Event& event) {
    event.wait(kWait);
    if (session_.stream(c_) != nullptr) session_.stream(c_)->record().wait(kWait);
  }
  const RankInput& own() const { return world_.inputs[static_cast<std::size_t>(rank_.rank())]; }
  bool quantized() const { return c_.wire != WireKind::as_is; }
  bool hooked(HookKind half) const { return c_.hook == half || c_.hook == HookKind::both; }
  std::int64_t output_rows() const { return c_.capacity * c_.ranks; }

  /// Everything was sent, and nothing of the output may have changed.
  void check_untouched() {
    received_.event.wait(kWait);
    const auto before = session_.poisoned().find(received_.x.data());
    if (before != session_.poisoned().end()) {
      rank_.check(
          is_poisoned(before->first, std::min(before->second, received_.x.view().bytes()), where()),
          "x was written by the sending half");
    }
    std::vector<Tensor> all{received_.x, received_.counts, received_.source_token,
                            received_.ranges};
    if (quantized()) all.push_back(received_.scales);
    for (const Tensor& tensor : all) poison(tensor);
    group_.barrier();  // now all ranks have sent
    if (c_.fabric == FabricKind::sim) std::this_thread::sleep_for(std::chrono::microseconds(300));
    for (const Tensor& tensor : all) {
      rank_.check(is_poisoned(tensor.data(), tensor.view().bytes(), where()),
                  "an output was written before receive()");
    }
  }

  void check_scales(const Tensor& all, std::int64_t expert, std::int64_t place,
                    const WireRow& row) {
    const TensorView& scales = all.view();
    const auto columns = static_cast<std::int64_t>(row.scales.size());
    const Dtype dtype = c_.wire == WireKind::scale_packed ? Dtype::i32 : Dtype::f32;
    if (!same_shape(rank_, "scales", all, dtype,
                    {world_.local_experts(rank_.rank()), output_rows(), columns})) {
      return;
    }
    rank_.equal(scales.strides[1], 1, "stride of scales along the rows");
    const auto* bits = static_cast<const std::uint32_t*>(scales.data);
    for (std::int64_t c = 0; c < columns; ++c) {
      rank_.equal(
          bits[expert * scales.strides[0] + place * scales.strides[1] + c * scales.strides[2]],
          row.scales[static_cast<std::size_t>(c)], "bits of a scale");
    }
  }

  void fill(int rank, std::int64_t expert, std::int64_t place, std::byte* to) const {
    fill_row(mix(c_.seed + round_, 41, static_cast<std::uint64_t>(rank),
                 static_cast<std::uint64_t>(expert << 32 | place)),
             c_.dtype, c_.special_values, c_.hidden, to);
  }

  /// In ordinary memory, or over the received rows; unused places are poison.
  const void* combine_rows() {
    const bool in_place = !quantized() && c_.seed % 2 == 0;
    const std::size_t row_bytes = world_.row_bytes();
    const std::size_t experts = expected_.rows.size();
    const std::size_t bytes = experts * static_cast<std::size_t>(output_rows()) * row_bytes;
    Bytes made(bytes, static_cast<std::byte>(kPoison));
    std::byte* to = made.data();
    for (std::size_t e = 0; e < experts; ++e) {
      for (std::size_t i = 0; i < expected_.rows[e].size(); ++i) {
        fill(rank_.rank(), static_cast<std::int64_t>(e), static_cast<std::int64_t>(i),
             to + (e * static_cast<std::size_t>(output_rows()) + i) * row_bytes);
      }
    }
    void* data = received_.x.data();
    if (!in_place) {
      rows_ = allocate(bytes + 16, where());
      data = rows_.get();
    }
    copy_bytes(data, made.data(), bytes, where());
    return data;
  }

  Session& session_;
  Rank& rank_;
  const Case& c_;
  std::uint64_t round_;
  World world_;
  ExpectedLatency expected_;
  Group& group_;
  LatencyExchange& exchange_;
  LatencyDispatchOptions options_{};
  LatencyReceived received_{};
  std::vector<std::int32_t> index32_{};
  std::shared_ptr<void> rows_{};
  std::vector<Tensor> inputs_{};
};

}  // namespace

void run_latency(Session& session, const Case& c) {
  Generation first(session, c, 0);
  first.dispatch();
  first.check_rows();
  if (!c.two_alive) {
    first.combine();
    first.drop();
    return;
  }
  Generation second(session, c, 1);
  second.dispatch();
  second.check_rows();
  first.check_rows();  // still there
  const bool reverse = (c.seed >> 3) % 2 == 0;
  (reverse ? second : first).combine();
  (reverse ? first : second).combine();
  ((c.seed >> 4) % 2 == 0 ? second : first).drop();
  ((c.seed >> 4) % 2 == 0 ? first : second).drop();
}

}  // namespace ferry::conformance
