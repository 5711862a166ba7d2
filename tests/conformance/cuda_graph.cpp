// A plan, a dispatch and a combine captured into a CUDA graph, replayed with other routes.
#include <optional>

#include "compare.hpp"
#include "cuda/engine_graph.hpp"
#include "cuda_parts.hpp"
#include "device.hpp"
#include "exchange.hpp"
#include "inputs.hpp"
#include "random.hpp"
#include "reference.hpp"

namespace ferry::conformance {
namespace {

constexpr int kReplays = 40;

/// The exchange of one case in a graph: what arrives is combined as it is.
class Captured {
 public:
  Captured(Rank& rank, Group& group, const Case& c)
      : rank_(rank), group_(group), c_(c), stream_(make_stream(rank.where())) {
    const std::size_t rows = static_cast<std::size_t>(c.tokens);
    const auto k = static_cast<std::size_t>(c.topk);
    x_ = allocate(rows * row_bytes(), rank.where());
    ids_ = allocate(rows * k * sizeof(std::int64_t), rank.where());
    weights_ = allocate(rows * k * sizeof(float), rank.where());
    worst_ = c.ranks * c.tokens * c.topk + c.alignment * (c.experts() / c.ranks + 1);
    graph_.emplace(static_cast<cudaStream_t>(stream_->native()), [this] { exchange(); });
  }

  void replay(const Case& c) {
    const World world = make_world(c);
    const RankInput& mine = world.inputs[static_cast<std::size_t>(rank_.rank())];
    const Device where = rank_.where();
    copy_bytes(x_.get(), mine.x.data(), mine.x.size(), where);
    copy_bytes(ids_.get(), mine.topk_idx.data(), mine.topk_idx.size() * sizeof(std::int64_t),
               where);
    copy_bytes(weights_.get(), mine.weights.data(), mine.weights.size() * sizeof(float), where);
    poison(received_.x);
    poison(combined_.x);
    rank_.meet();  // nobody poisons what another already writes
    graph_->launch();
    stream_->synchronize();
    check(world);
    rank_.meet();
  }

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(c_.hidden) * size_of(c_.dtype); }

  void exchange() {
    const Device where = rank_.where();
    const Plan plan =
        group_.plan({ids_.get(), Dtype::i64, {c_.tokens, c_.topk}, where}, {stream_.get()});
    DispatchOptions options;
    options.topk_weights = ConstTensorView(weights_.get(), Dtype::f32, {c_.tokens, c_.topk}, where);
    options.order = c_.order;
    options.alignment = c_.alignment;
    options.max_recv_rows = worst_;
    options.stream = stream_.get();
    options.num_sms = c_.num_sms;
    received_ = group_.dispatch({x_.get(), c_.dtype, {c_.tokens, c_.hidden}, where}, plan, options);
    CombineOptions back;
    back.order = c_.order;
    back.alignment = c_.alignment;
    back.topk_weights = received_.topk_weights;
    back.apply_weights = c_.order == RowOrder::expert_major;
    back.stream = stream_.get();
    back.num_sms = c_.num_sms;
    combined_ = group_.combine(received_.x, plan, back);
  }

  void check(const World& world) {
    std::vector<ExpectedDispatch> all;
    for (int r = 0; r < c_.ranks; ++r) {
      all.push_back(expect_dispatch(world, r, c_.order, c_.alignment));
    }
    const ExpectedDispatch& mine = all[static_cast<std::size_t>(rank_.rank())];
    same_bytes(rank_, "replay: x", to_cpu(received_.x).data(), mine.x.data(),
               static_cast<std::size_t>(mine.rows), world.row_bytes());
    same_vector(rank_, "replay: topk_idx", to_cpu(received_.topk_idx).as<std::int64_t>(),
                mine.topk_idx);
    same_vector(rank_, "replay: topk_weights", to_cpu(received_.topk_weights).as<float>(),
                mine.topk_weights);
    same_vector(rank_, "replay: source_token", to_cpu(received_.source_token).as<std::int32_t>(),
                mine.source_token);
    CombineInput input{c_.order, c_.alignment, c_.dtype, c_.hidden};
    input.row = [&](int r, std::int64_t row, std::byte* out) {
      const Bytes& x = all[static_cast<std::size_t>(r)].x;
      const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * row_bytes());
      std::copy_n(x.begin() + at, row_bytes(), out);
    };
    input.weight = [&](int r, std::int64_t row, int k) {
      return all[static_cast<std::size_t>(r)]
          .topk_weights[static_cast<std::size_t>(row * c_.topk + k)];
    };
    input.apply_weights = c_.order == RowOrder::expert_major;
    const ExpectedCombine expected = expect_combine(world, rank_.rank(), input);
    same_values(rank_, "replay: combined x", c_.dtype, to_cpu(combined_.x).data(),
                expected.x.data(), c_.tokens, c_.hidden);
    same_vector(rank_, "replay: combined topk_weights", to_cpu(combined_.topk_weights).as<float>(),
                expected.topk_weights);
  }

  Rank& rank_;
  Group& group_;
  Case c_;
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<void> x_{}, ids_{}, weights_{};
  std::int64_t worst_ = 0;
  Received received_{};
  Combined combined_{};
  std::optional<test::Graph> graph_{};
};

void replay_all(Rank& rank, Group& group, const Case& c, std::uint64_t seed) {
  Captured captured(rank, group, c);
  constexpr RouteKind kRoutes[] = {RouteKind::uniform, RouteKind::zipf, RouteKind::one_rank,
                                   RouteKind::holes, RouteKind::duplicates};
  for (int i = 0; i < kReplays && rank.failures() == 0; ++i) {
    Case now = c;
    now.routes = kRoutes[i % 5];
    now.seed = mix(seed, 402, static_cast<std::uint64_t>(i)) >> 1;
    rank.begin("replay " + std::to_string(i) + ": " + to_string(now));
    captured.replay(now);
  }
}

}  // namespace

bool run_graph(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  bool ok = true;
  for (const Layout& layout : layouts(options)) {
    ok &= passes(options, layout, "graph", [&](Rank& rank) {
      Case c = small_case(rank, mix(options.seed, 401));
      c.num_sms = 2;
      Group group(rank.bootstrap(), group_config(rank, c.experts(), std::size_t{64} << 20));
      Exchange(rank, group, c).run();  // once without a graph
      rank.meet();
      replay_all(rank, group, c, options.seed);
      c.order = RowOrder::expert_major;
      c.alignment = 8;
      replay_all(rank, group, c, options.seed + 1);
      Exchange(rank, group, c).run();  // and after
      group.barrier();
    });
  }
  return conclude("graph", ok, std::to_string(2 * kReplays) + " replays with other routes", start);
}

}  // namespace ferry::conformance
