// One case of latency mode: dispatch and combine, with and without hooks, one or two results alive.
#include <thread>

#include "compare.hpp"
#include "device.hpp"
#include "inputs.hpp"
#include "latency_results.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr auto kLatencyWait = std::chrono::seconds(60);

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
        expected_(c, world_, rank_.rank()),
        group_(session.group(c)),
        exchange_(session.latency(c)) {}

  void dispatch() {
    LatencyDispatchOptions options{.format = expected_.format(),
                                   .scale_format = expected_.scale_format(),
                                   .order = c_.results};
    if (c_.weights_ahead) options.topk_weights = weights();
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
    rank_.check(group_.is_registered(received_.x.data()) || expected_.blocks() == 0,
                "x does not lie in registered memory");
    expected_.check(rank_, received_);
  }

  void combine() {
    LatencyCombineOptions options{.hook = hooked(HookKind::combine), .stream = session_.stream(c_)};
    const std::int64_t tokens = own().tokens;
    const std::size_t out_bytes = own().x.size();
    const std::shared_ptr<void> out = allocate(out_bytes + 16, where());
    fill_bytes(out.get(), kPoison, out_bytes, where());
    const TensorView out_view(out.get(), c_.dtype, {tokens, c_.hidden}, where());
    if (c_.own_output) options.out = out_view;
    options.path = c_.path;
    options.format = c_.combine_format;
    const ConstTensorView rows(combine_rows(), c_.dtype,
                               {expected_.blocks(), expected_.block_rows(), c_.hidden}, where());
    const bool gives_none = by_rank() || c_.weights_ahead;
    LatencyCombined got = gives_none ? exchange_.combine(rows, received_, options)
                                     : exchange_.combine(rows, received_, weights(), options);
    if (options.hook) {
      got.event.wait(kLatencyWait);
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
  Device where() const { return rank_.where(); }
  /// Where calls of this rank read; kept until the generation ends.
  ConstTensorView put(const ConstTensorView& tensor) {
    inputs_.push_back(to_device(tensor, where()));
    return inputs_.back();
  }
  /// A call and its hook: on a stream, both.
  void finish(const Event& event) {
    event.wait(kLatencyWait);
    if (session_.stream(c_) != nullptr) session_.stream(c_)->record().wait(kLatencyWait);
  }
  const RankInput& own() const { return world_.inputs[static_cast<std::size_t>(rank_.rank())]; }
  bool quantized() const { return c_.wire != WireKind::as_is; }
  bool hooked(HookKind half) const { return c_.hook == half || c_.hook == HookKind::both; }
  bool by_rank() const { return c_.results == RowOrder::rank_major; }
  static std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }
  ConstTensorView weights() {
    return put({own().weights.data(), Dtype::f32, {own().tokens, c_.topk}});
  }

  /// Everything was sent, and nothing of the output may have changed.
  void check_untouched() {
    received_.event.wait(kLatencyWait);
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

  void fill(int rank, std::int64_t block, std::int64_t place, std::byte* to) const {
    fill_row(mix(c_.seed + round_, 41, static_cast<std::uint64_t>(rank),
                 static_cast<std::uint64_t>(block << 32 | place)),
             c_.dtype, c_.special_values, c_.hidden, to);
  }

  /// In ordinary memory, or over the received rows; unused places are poison.
  const void* combine_rows() {
    const bool in_place = !quantized() && c_.seed % 2 == 0;
    const std::size_t row_bytes = world_.row_bytes();
    const std::int64_t rows = expected_.block_rows();
    const std::size_t bytes = index(expected_.blocks() * rows) * row_bytes;
    Bytes made(bytes, static_cast<std::byte>(kPoison));
    for (std::int64_t b = 0; b < expected_.blocks(); ++b) {
      for (std::int64_t i = 0; i < expected_.rows_in(b); ++i) {
        fill(rank_.rank(), b, i, made.data() + index(b * rows + i) * row_bytes);
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
  LatencyResults expected_;
  Group& group_;
  LatencyExchange& exchange_;
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
