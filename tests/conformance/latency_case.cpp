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
  cpu.topk_idx = to_cpu(got.topk_idx);
  cpu.topk_weights = to_cpu(got.topk_weights);
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
        expected_by_rank_(expect_rank_major(world_, rank_.rank())),
        group_(session.group(c)),
        exchange_(session.latency(c)) {}

  void dispatch() {
    LatencyDispatchOptions options;
    options.format = c_.wire == WireKind::as_is ? WireFormat::as_is : WireFormat::e4m3;
    if (c_.wire == WireKind::scale_pow2) options.scale_format = ScaleFormat::f32_pow2;
    if (c_.wire == WireKind::scale_packed) options.scale_format = ScaleFormat::ue8m0_packed;
    options.order = c_.results;
    if (c_.weights_ahead) options.topk_weights = weights();
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
    const LatencyReceived got = on_cpu(received_);
    by_rank() ? check_rank_major(got) : check_expert_major(got);
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
    options.path = c_.path;
    options.format = c_.combine_format;
    const ConstTensorView rows(combine_rows(), c_.dtype, {blocks(), block_rows(), c_.hidden},
                               where());
    const bool gives_none = by_rank() || c_.weights_ahead;
    LatencyCombined got = gives_none ? exchange_.combine(rows, received_, options)
                                     : exchange_.combine(rows, received_, weights(), options);
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
        [&](int d, std::int64_t b, std::int64_t place, std::byte* to) { fill(d, b, place, to); },
        {c_.results, c_.path, c_.combine_format});
    if (!same_shape(rank_, "combined x", sum, c_.dtype, {tokens, c_.hidden})) return;
    same_values(rank_, "latency combine: x", c_.dtype, sum.data(), expected.data(), tokens,
                c_.hidden);
  }

  void drop() {
    poison(received_.x);
    if (!by_rank()) session_.poisoned()[received_.x.data()] = received_.x.view().bytes();
    received_ = LatencyReceived{};
  }

 private:
  void check_expert_major(const LatencyReceived& got_all) {
    const std::int64_t local = world_.local_experts(rank_.rank()), rows = output_rows();
    const Dtype dtype = quantized() ? Dtype::e4m3 : c_.dtype;
    if (!same_shape(rank_, "x", got_all.x, dtype, {local, rows, c_.hidden})) return;
    rank_.check(group_.is_registered(received_.x.data()) || local == 0,
                "x does not lie in registered memory");
    for (std::int64_t e = 0; e < local; ++e) {
      const auto& theirs = expected_.rows[static_cast<std::size_t>(e)];
      if (!rank_.equal(got_all.counts.as<std::int32_t>()[e],
                       static_cast<std::int32_t>(theirs.size()), "counts")) {
        return;
      }
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        const std::int64_t place = e * rows + static_cast<std::int64_t>(i);
        check_row(got_all, e, static_cast<std::int64_t>(i), theirs[i]);
        rank_.equal(got_all.source_token.as<std::int32_t>()[place], theirs[i].token,
                    "source_token");
      }
    }
    same_vector(rank_, "ranges", got_all.ranges.as<std::int64_t>(), expected_.ranges);
  }

  void check_rank_major(const LatencyReceived& got) {
    const Extents shape{c_.ranks, c_.capacity, c_.topk};
    const Dtype dtype = quantized() ? Dtype::e4m3 : c_.dtype;
    if (!same_shape(rank_, "x", got.x, dtype, {c_.ranks, c_.capacity, c_.hidden}) ||
        !same_shape(rank_, "topk_idx", got.topk_idx, Dtype::i32, shape) ||
        (c_.weights_ahead &&
         !same_shape(rank_, "topk_weights", got.topk_weights, Dtype::f32, shape))) {
      return;
    }
    rank_.check(group_.is_registered(received_.x.data()), "x does not lie in registered memory");
    rank_.check(!got.ranges, "rank-major rows have no ranges");
    rank_.check(c_.weights_ahead || !got.topk_weights, "weights from nowhere");
    for (int source = 0; source < c_.ranks; ++source) {
      const auto& theirs = expected_by_rank_.rows[static_cast<std::size_t>(source)];
      const auto count = static_cast<std::int64_t>(theirs.size());
      if (!rank_.equal(got.counts.as<std::int32_t>()[source], static_cast<std::int32_t>(count),
                       "counts")) {
        return;
      }
      for (std::int64_t i = 0; i < c_.capacity; ++i) {
        const std::int64_t at = source * c_.capacity + i;
        ExpectedRankMajor::Row row{0, std::vector<std::int32_t>(index(c_.topk), -1),
                                   std::vector<float>(index(c_.topk), 0.0f)};
        if (i < count) {
          row = theirs[index(i)];
          check_row(got, source, i, {source, row.token, 0});
          rank_.equal(got.source_token.as<std::int32_t>()[at], row.token, "source_token");
        }
        same_vector(rank_, "topk_idx", got.topk_idx.as<std::int32_t>() + at * c_.topk,
                    row.topk_idx);
        if (!c_.weights_ahead) continue;
        same_vector(rank_, "topk_weights", got.topk_weights.as<float>() + at * c_.topk,
                    row.topk_weights);
      }
    }
  }

  /// Row `place` of block `block`: of an expert, or of a source.
  void check_row(const LatencyReceived& got, std::int64_t block, std::int64_t place,
                 const ExpectedLatency::Row& from) {
    const WireRow row = expect_wire_row(world_, from, options_.format, options_.scale_format);
    const TensorView& x = got.x.view();
    const auto element = static_cast<std::size_t>(block * x.strides[0] + place * x.strides[1]);
    const std::byte* data = got.x.as<std::byte>() + element * size_of(x.dtype);
    if (quantized()) {
      same_values(rank_, "latency dispatch: x", x.dtype, data, row.x.data(), 1, c_.hidden);
      check_scales(got.scales, block, place, row);
    } else {
      same_bytes(rank_, "latency dispatch: x", data, row.x.data(), 1, row.x.size());
    }
  }

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
  bool by_rank() const { return c_.results == RowOrder::rank_major; }
  static std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }
  std::int64_t output_rows() const { return c_.capacity * c_.ranks; }
  /// x is [blocks, block rows, hidden].
  std::int64_t blocks() const { return by_rank() ? c_.ranks : world_.local_experts(rank_.rank()); }
  std::int64_t block_rows() const { return by_rank() ? c_.capacity : output_rows(); }
  std::size_t rows_in(std::size_t block) const {
    return by_rank() ? expected_by_rank_.rows[block].size() : expected_.rows[block].size();
  }
  ConstTensorView weights() {
    return put({own().weights.data(), Dtype::f32, {own().tokens, c_.topk}});
  }

  /// Everything was sent, and nothing of the output may have changed.
  void check_untouched() {
    received_.event.wait(kWait);
    const auto before = session_.poisoned().find(received_.x.data());
    if (before != session_.poisoned().end()) {
      rank_.check(
          is_poisoned(before->first, std::min(before->second, received_.x.view().bytes()), where()),
          "x was written by the sending half");
    }
    std::vector<Tensor> all{received_.counts, received_.source_token};
    // Rank-major rows lie where their sources write them.
    if (!by_rank()) all.insert(all.end(), {received_.x, received_.ranges});
    if (by_rank()) all.push_back(received_.topk_idx);
    if (by_rank() && c_.weights_ahead) all.push_back(received_.topk_weights);
    if (quantized()) all.push_back(received_.scales);
    for (const Tensor& tensor : all) poison(tensor);
    group_.barrier();  // now all ranks have sent
    if (c_.fabric == FabricKind::sim) std::this_thread::sleep_for(std::chrono::microseconds(300));
    for (const Tensor& tensor : all) {
      rank_.check(is_poisoned(tensor.data(), tensor.view().bytes(), where()),
                  "an output was written before receive()");
    }
  }

  void check_scales(const Tensor& all, std::int64_t block, std::int64_t place, const WireRow& row) {
    const TensorView& scales = all.view();
    const auto columns = static_cast<std::int64_t>(row.scales.size());
    const Dtype dtype = c_.wire == WireKind::scale_packed ? Dtype::i32 : Dtype::f32;
    if (!same_shape(rank_, "scales", all, dtype, {blocks(), block_rows(), columns})) {
      return;
    }
    rank_.equal(scales.strides[1], 1, "stride of scales along the rows");
    const auto* bits = static_cast<const std::uint32_t*>(scales.data);
    for (std::int64_t c = 0; c < columns; ++c) {
      rank_.equal(
          bits[block * scales.strides[0] + place * scales.strides[1] + c * scales.strides[2]],
          row.scales[static_cast<std::size_t>(c)], "bits of a scale");
    }
  }

  void fill(int rank, std::int64_t block, std::int64_t place, std::byte* to) const {
    fill_row(mix(c_.seed + round_, 41, static_cast<std::uint64_t>(rank),
                 static_cast<std::uint64_t>(block << 32 | place)),
             c_.dtype, c_.special_values, c_.hidden, to);
  }

  /// In ordinary memory, or over the received rows; unused places are poison.
  const void* combine_rows() {
    const bool in_place = !quantized() && c_.seed % 2 == 0;
    const std::size_t row_bytes = world_.row_bytes();
    const std::size_t bytes = index(blocks() * block_rows()) * row_bytes;
    Bytes made(bytes, static_cast<std::byte>(kPoison));
    for (std::size_t b = 0; b < index(blocks()); ++b) {
      for (std::size_t i = 0; i < rows_in(b); ++i) {
        fill(rank_.rank(), static_cast<std::int64_t>(b), static_cast<std::int64_t>(i),
             made.data() + (b * index(block_rows()) + i) * row_bytes);
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
  ExpectedRankMajor expected_by_rank_;
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
