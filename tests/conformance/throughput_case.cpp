// One case of throughput mode: plan, dispatch, cached dispatch, combine.
#include <algorithm>

#include "compare.hpp"
#include "device.hpp"
#include "inputs.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr std::size_t kGuard = 256;
constexpr auto kThroughputWait = std::chrono::seconds(60);

/// Poisoned memory for an output, with a guard behind it.
struct OwnOutput {
  OwnOutput(std::int64_t rows, std::int64_t columns, Dtype dtype, Device where)
      : bytes(static_cast<std::size_t>(rows * columns) * size_of(dtype)),
        memory(allocate(bytes + kGuard, where)),
        view(memory.get(), dtype, {rows, columns}, where) {
    fill_bytes(memory.get(), kPoison, bytes + kGuard, where);
  }
  void check_guard(Rank& rank, const char* what) const {
    Bytes guard(kGuard);
    copy_bytes(guard.data(), static_cast<std::byte*>(memory.get()) + bytes, kGuard, view.device);
    rank.check(is_poison(guard.data(), kGuard), std::string(what) + ": wrote past its end");
  }
  std::size_t bytes;
  std::shared_ptr<void> memory;
  TensorView view;
};

/// Everything that a dispatch brought, in ordinary memory.
Received on_cpu(const Received& got) {
  Received cpu;
  cpu.x = to_cpu(got.x);
  cpu.scales = to_cpu(got.scales);
  cpu.topk_idx = to_cpu(got.topk_idx);
  cpu.topk_weights = to_cpu(got.topk_weights);
  cpu.source_token = to_cpu(got.source_token);
  cpu.slot_rows = to_cpu(got.slot_rows);
  cpu.expert_offsets = to_cpu(got.expert_offsets);
  cpu.row_weights = to_cpu(got.row_weights);
  return cpu;
}

class ThroughputCase {
 public:
  ThroughputCase(Session& session, const Case& c)
      : session_(session),
        rank_(session.rank()),
        c_(c),
        group_(session.group(c)),
        stream_(session.stream(c)),
        num_sms_(std::min(c.num_sms, sms_of(rank_.where()))) {}

  void run() {
    World world = make_world(c_);
    make_plan(world);
    World arrives = arriving(world);
    expected_ = expect_dispatch(arrives, me(), c_.order, c_.alignment);
    const bool cached = (c_.seed >> 8) % 2 == 0;
    // Rows that exist before the dispatch: everything is enqueued at once.
    const bool pipelined = stream_ != nullptr && c_.rows == RowsKind::ordinary && !cached;
    {
      Received received = dispatch(world);
      if (!pipelined) check(received, arrives);
      if (cached) {
        poison_all(received);
        received = Received{};
        world = make_world(c_, 1);
        arrives = arriving(world);
        expected_ = expect_dispatch(arrives, me(), c_.order, c_.alignment);
        received = dispatch(world);
        check(received, arrives);
      }
      combine(arrives, received, pipelined);
      poison_all(received);
    }
    check_plan();
  }

 private:
  int me() const { return rank_.rank(); }
  Device where() const { return rank_.where(); }
  /// Where calls of this rank read; kept until the case ends.
  ConstTensorView put(const ConstTensorView& tensor) {
    inputs_.push_back(to_device(tensor, where()));
    return inputs_.back();
  }
  /// Weights of expert-major rows come with the dispatch and go with the combine.
  bool weighs_rows() const {
    return c_.order == RowOrder::expert_major && c_.weights != WeightKind::none &&
           (c_.seed >> 10) % 2 == 0;
  }
  /// `padding` where no slot is.
  std::vector<float> of_rows(const std::vector<float>& of_slots, std::int64_t rows,
                             float padding) const {
    std::vector<float> weights(static_cast<std::size_t>(rows), padding);
    for (std::size_t i = 0; i < expected_.slot_rows.size(); ++i) {
      const std::int64_t row = expected_.slot_rows[i];
      if (row >= 0) weights[static_cast<std::size_t>(row)] = of_slots[i];
    }
    return weights;
  }
  bool quantizes() const { return c_.wire != WireKind::as_is; }
  ScaleFormat scale_format() const {
    return c_.wire == WireKind::scale_pow2 ? ScaleFormat::f32_pow2 : ScaleFormat::f32;
  }
  /// What arrives of a world.
  World arriving(const World& world) const {
    return quantizes() ? quantized(world, scale_format()) : world;
  }
  const RankInput& own(const World& world) const {
    return world.inputs[static_cast<std::size_t>(me())];
  }

  void make_plan(const World& world) {
    const RankInput& mine = own(world);
    const std::int64_t t = mine.tokens, k = c_.topk;
    ConstTensorView view(mine.topk_idx.data(), Dtype::i64, {t, k});
    index64_ = mine.topk_idx;
    index32_.assign(mine.topk_idx.begin(), mine.topk_idx.end());
    if (c_.index == IndexKind::i32) view = {index32_.data(), Dtype::i32, {t, k}};
    if (c_.index == IndexKind::strided) {
      for (std::int64_t i = 0; i < t * k; ++i) {
        index64_[static_cast<std::size_t>(i % k * t + i / k)] =
            mine.topk_idx[static_cast<std::size_t>(i)];
      }
      view = ConstTensorView(index64_.data(), Dtype::i64, Extents{t, k}, Extents{1, t}, Device{});
    }
    plan_ = group_.plan(put(view), {stream_});
  }

  void check_plan() {
    rank_.equal(plan_.topk(), c_.topk, "Plan::topk");
    rank_.equal(plan_.recv_rows(), static_cast<std::int64_t>(expected_.arrivals.size()),
                "Plan::recv_rows");
    const auto same = [&](const auto& got, const auto& expected, const char* what) {
      rank_.check(got == expected, std::string(what) + " differs from the reference");
    };
    same(plan_.recv_rows_per_rank(), expected_.recv_rows_per_rank, "Plan::recv_rows_per_rank");
    same(plan_.send_rows_per_rank(), expected_.send_rows_per_rank, "Plan::send_rows_per_rank");
    const Tensor rank_rows = to_cpu(plan_.rank_rows());
    rank_.check(rank_rows.shape() == Extents{group_.size(), group_.size()},
                "Plan::rank_rows: shape");
    const auto* numbers = rank_rows.as<std::int32_t>();
    same(std::vector<std::int32_t>(numbers, numbers + rank_rows.shape().product()),
         expected_.rank_rows, "Plan::rank_rows");
    same(plan_.slots_per_expert(), expected_.slots_per_expert, "Plan::slots_per_expert");
    rank_.equal(plan_.expert_major_rows(c_.alignment), expected_.expert_offsets.back(),
                "Plan::expert_major_rows");
  }

  std::int64_t output_rows() const {
    if (c_.size == SizeKind::exact) return expected_.rows;
    const std::int64_t extra = c_.size == SizeKind::worst_case_loose ? 5 : 0;
    return std::max<std::int64_t>(1, expected_.rows + extra);
  }

  Received dispatch(const World& world) {
    const RankInput& mine = own(world);
    x_ = mine.x;
    weights_ = mine.weights;
    scales_ = mine.scales;
    const std::int64_t t = mine.tokens, columns = world.scale_columns;
    DispatchOptions options;
    if (c_.weights != WeightKind::none) {
      options.topk_weights = put({weights_.data(), Dtype::f32, {t, c_.topk}});
    }
    if (columns > 0) {
      ConstTensorView scales(scales_.data(), Dtype::f32, {t, columns});
      if ((c_.seed >> 9) % 2 == 0) {  // column-major
        for (std::int64_t i = 0; i < t * columns; ++i) {
          scales_[static_cast<std::size_t>(i % columns * t + i / columns)] =
              mine.scales[static_cast<std::size_t>(i)];
        }
        scales = {scales_.data(), Dtype::f32, Extents{t, columns}, Extents{1, t}, Device{}};
      }
      options.scales = put(scales);
    }
    if (quantizes()) options.format = WireFormat::e4m3;
    options.scale_format = scale_format();
    options.order = c_.order;
    options.alignment = c_.alignment;
    options.row_weights = weighs_rows();
    if (c_.size != SizeKind::exact) options.max_recv_rows = output_rows();
    if (c_.own_output) {
      out_.emplace(output_rows() + static_cast<std::int64_t>(c_.seed % 3), c_.hidden,
                   quantizes() ? Dtype::e4m3 : c_.dtype, where());
      options.out = out_->view;
    }
    options.stream = stream_;
    options.num_sms = num_sms_;
    return group_.dispatch(put({x_.data(), c_.dtype, {t, c_.hidden}}), plan_, options);
  }

  void check(const Received& received, const World& world) {
    received.event.wait(kThroughputWait);
    const Received got = on_cpu(received);
    const auto n = static_cast<std::int64_t>(expected_.arrivals.size());
    const std::int64_t rows = output_rows();
    const bool by_expert = c_.order == RowOrder::expert_major;
    const std::int64_t side_rows = c_.size == SizeKind::exact ? n : rows;
    if (!same_shape(rank_, "x", got.x, world.dtype, {rows, c_.hidden})) return;
    if (!same_shape(rank_, "topk_idx", got.topk_idx, Dtype::i64, {side_rows, c_.topk})) return;
    if (c_.own_output) {
      rank_.check(received.x.data() == out_->view.data, "x is not the caller's output");
      out_->check_guard(rank_, "dispatch: out");
    } else {
      rank_.check(group_.is_registered(received.x.data()), "x does not lie in registered memory");
    }
    same_bytes(rank_, "dispatch: x", got.x.data(), expected_.x.data(),
               static_cast<std::size_t>(expected_.rows), world.row_bytes());
    if (world.scale_columns > 0 &&
        same_shape(rank_, "scales", got.scales, Dtype::f32, {rows, world.scale_columns})) {
      same_vector(rank_, "dispatch: scales", got.scales.as<float>(), expected_.scales);
    }
    same_vector(rank_, "dispatch: topk_idx", got.topk_idx.as<std::int64_t>(), expected_.topk_idx);
    for (std::int64_t i = n * c_.topk; i < side_rows * c_.topk; ++i) {
      rank_.equal(got.topk_idx.as<std::int64_t>()[i], -1, "topk_idx past the last row");
      if (by_expert) {
        rank_.equal(got.slot_rows.as<std::int64_t>()[i], -1, "slot_rows past the last row");
      }
    }
    same_vector(rank_, "dispatch: source_token", got.source_token.as<std::int32_t>(),
                expected_.source_token);
    for (std::int64_t i = n; i < side_rows; ++i) {
      rank_.equal(got.source_token.as<std::int32_t>()[i], -1, "source_token past the last row");
    }
    if (c_.weights != WeightKind::none &&
        same_shape(rank_, "topk_weights", got.topk_weights, Dtype::f32, {side_rows, c_.topk})) {
      same_vector(rank_, "dispatch: topk_weights", got.topk_weights.as<float>(),
                  expected_.topk_weights);
    }
    if (!by_expert) return;
    if (weighs_rows() && same_shape(rank_, "row_weights", got.row_weights, Dtype::f32, {rows})) {
      same_vector(rank_, "dispatch: row_weights", got.row_weights.as<float>(),
                  of_rows(expected_.topk_weights, rows, 0.0f));
    }
    same_vector(rank_, "dispatch: slot_rows", got.slot_rows.as<std::int64_t>(),
                expected_.slot_rows);
    same_vector(rank_, "dispatch: expert_offsets", got.expert_offsets.as<std::int64_t>(),
                expected_.expert_offsets);
    const Bytes zeros(static_cast<std::size_t>(rows - expected_.rows) * world.row_bytes());
    same_bytes(rank_, "dispatch: rows past the last block",
               got.x.as<std::byte>() + static_cast<std::size_t>(expected_.rows) * world.row_bytes(),
               zeros.data(), static_cast<std::size_t>(rows - expected_.rows), world.row_bytes());
  }

  void fill_combine_row(int rank, std::int64_t row, std::byte* out) const {
    fill_row(mix(c_.seed, 31, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(row)),
             c_.combine_dtype, c_.special_values, c_.hidden, out);
  }
  float combine_weight(int rank, std::int64_t row, int slot) const {
    return make_weight(mix(c_.seed, 32, static_cast<std::uint64_t>(rank),
                           static_cast<std::uint64_t>(row * 64 + slot)));
  }

  /// Memory for this rank's rows, as the case wants it. `holder` keeps it.
  void* place_rows(const Received& received, std::int64_t rows, Tensor& holder) {
    const std::size_t bytes =
        static_cast<std::size_t>(rows * c_.hidden) * size_of(c_.combine_dtype);
    if (c_.rows == RowsKind::received && received.x.view().bytes() >= bytes) {
      holder = received.x;
      return received.x.data();
    }
    if (c_.rows == RowsKind::empty) {
      try {
        holder = group_.empty({rows, c_.hidden}, c_.combine_dtype);
        rank_.check(group_.is_registered(holder.data()), "empty() is not registered");
        return holder.data();
      } catch (const Error& error) {
        rank_.check(error.kind() == ErrorKind::exhausted, error.what());
      }
    }
    rows_memory_ = allocate(bytes + kGuard, where());
    return rows_memory_.get();
  }

  void combine(const World& world, const Received& received, bool pipelined) {
    const std::int64_t rows = output_rows();
    const std::size_t row_bytes = static_cast<std::size_t>(c_.hidden) * size_of(c_.combine_dtype);
    Tensor holder;
    void* data = place_rows(received, rows, holder);
    // Padding, and rows past the last one, must not be read.
    Bytes made(static_cast<std::size_t>(rows) * row_bytes, static_cast<std::byte>(kPoison));
    for_each_row([&](std::int64_t row) {
      fill_combine_row(me(), row, made.data() + static_cast<std::size_t>(row) * row_bytes);
    });
    copy_bytes(data, made.data(), made.size(), where());
    CombineInput input{c_.order, c_.alignment, c_.combine_dtype, c_.hidden};
    input.row = [&](int d, std::int64_t row, std::byte* out) { fill_combine_row(d, row, out); };
    input.apply_weights = c_.weights == WeightKind::applied;
    input.domain_size = hierarchical_size(rank_, plan_);
    CombineOptions options;
    options.order = c_.order;
    options.alignment = c_.alignment;
    options.apply_weights = input.apply_weights;
    options.stream = stream_;
    options.num_sms = num_sms_;
    std::vector<float> weights;
    const auto n = static_cast<std::int64_t>(expected_.arrivals.size());
    std::vector<std::vector<std::int64_t>> ids;  // of each rank: slots of no row have no weight
    for (int d = 0; weighs_rows() && d < group_.size(); ++d) {
      ids.push_back(expect_dispatch(world, d, c_.order, c_.alignment).topk_idx);
    }
    if (c_.weights != WeightKind::none) {
      input.weight = [&](int d, std::int64_t row, int k) {
        const bool none =
            weighs_rows() &&
            ids[static_cast<std::size_t>(d)][static_cast<std::size_t>(row * c_.topk + k)] < 0;
        return none ? 0.0f : combine_weight(d, row, k);
      };
      for (std::int64_t i = 0; i < n * c_.topk; ++i) {
        weights.push_back(combine_weight(me(), i / c_.topk, static_cast<int>(i % c_.topk)));
      }
      options.topk_weights = put({weights.data(), Dtype::f32, {n, c_.topk}});
    }
    if (weighs_rows()) {
      weights = of_rows(weights, rows, -1e30f);  // of padding it must not be read
      options.topk_weights = put({weights.data(), Dtype::f32, {rows}});
    }
    const std::int64_t tokens = own(world).tokens;
    const auto seed_of = [&](std::uint64_t which) {
      return mix(c_.seed, which, static_cast<std::uint64_t>(me()));
    };
    const Bytes bias0 =
        make_rows(seed_of(33), c_.combine_dtype, c_.special_values, tokens, c_.hidden);
    const Bytes bias1 =
        make_rows(seed_of(34), c_.combine_dtype, c_.special_values, tokens, c_.hidden);
    const Extents shape{tokens, c_.hidden};
    if (c_.biases > 0) {
      input.bias0 = &bias0;
      options.bias0 = put({bias0.data(), c_.combine_dtype, shape});
    }
    if (c_.biases > 1) {
      input.bias1 = &bias1;
      options.bias1 = put({bias1.data(), c_.combine_dtype, shape});
    }
    OwnOutput out(tokens, c_.hidden, c_.combine_dtype, where());
    if (c_.own_output) options.out = out.view;
    const Combined combined =
        group_.combine({data, c_.combine_dtype, {rows, c_.hidden}, where()}, plan_, options);
    if (pipelined) check(received, world);
    combined.event.wait(kThroughputWait);
    const Combined got{to_cpu(combined.x), to_cpu(combined.topk_weights), {}};
    if (c_.own_output) rank_.check(combined.x.data() == out.view.data, "combine: x is not `out`");
    out.check_guard(rank_, "combine: out");
    const ExpectedCombine expected = expect_combine(world, me(), input);
    if (!same_shape(rank_, "combine: x", got.x, c_.combine_dtype, shape)) return;
    same_values(rank_, "combine: x", c_.combine_dtype, got.x.data(), expected.x.data(), tokens,
                c_.hidden);
    if (c_.weights != WeightKind::none) {
      same_vector(rank_, "combine: topk_weights", got.topk_weights.as<float>(),
                  expected.topk_weights);
    }
  }

  template <class Each>
  void for_each_row(Each&& each) const {
    if (c_.order == RowOrder::rank_major) {
      for (std::size_t i = 0; i < expected_.arrivals.size(); ++i) {
        each(static_cast<std::int64_t>(i));
      }
      return;
    }
    for (std::int64_t row : expected_.slot_rows) {
      if (row >= 0) each(row);
    }
  }

  /// The next user of this memory must not profit from what it held.
  static void poison_all(const Received& received) {
    poison(received.x);
    if (received.scales) poison(received.scales);
  }

  Session& session_;
  Rank& rank_;
  const Case& c_;
  Group& group_;
  Stream* stream_;
  int num_sms_;
  Plan plan_{};
  ExpectedDispatch expected_{};
  std::vector<std::int64_t> index64_{};
  std::vector<std::int32_t> index32_{};
  Bytes x_{};
  std::vector<float> weights_{};
  std::vector<float> scales_{};
  std::optional<OwnOutput> out_{};
  std::shared_ptr<void> rows_memory_{};
  std::vector<Tensor> inputs_{};
};

}  // namespace

void run_throughput(Session& session, const Case& c) {
  ThroughputCase(session, c).run();
}

}  // namespace ferry::conformance
