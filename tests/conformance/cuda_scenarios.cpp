// Two live plans, two groups in a process, memory past 4 GiB.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "compare.hpp"
#include "cuda_parts.hpp"
#include "device.hpp"
#include "exchange.hpp"
#include "inputs.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

/// Another shape, other routes and values.
Case other_case(const Rank& rank, std::uint64_t seed) {
  Case c = small_case(rank, seed);
  c.hidden = 2880;
  c.topk = 8;
  c.routes = RouteKind::zipf;
  c.order = RowOrder::expert_major;
  c.alignment = 8;
  c.tokens = 21;
  return c;
}

/// Dispatches and combines of two plans in turn, results of both alive at the same time.
void in_turn(Exchange& a, Exchange& b, int rounds) {
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds); ++i) {
    const Received first = a.dispatch(i);
    const Received second = b.dispatch(i);
    const Received third = a.dispatch(i + 1);
    const Combined back = b.combine(i);
    a.check(first, i);
    b.check(second, i);
    const Combined other = a.combine(i);
    a.check(third, i + 1);
    b.check(back, i);
    a.check(other, i);
  }
}

}  // namespace

bool run_interleaved(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  bool ok = true;
  for (const Layout& layout : layouts(options)) {
    ok &= passes(options, layout, "interleaved", [&](Rank& rank) {
      const Case a = small_case(rank, mix(options.seed, 301));
      const auto one = make_stream(rank.where()), two = make_stream(rank.where());
      Group group(rank.bootstrap(), group_config(rank, a.experts()));
      for (const auto& [first, second] : {std::pair<Stream*, Stream*>{nullptr, nullptr},
                                          {one.get(), one.get()},
                                          {one.get(), two.get()}}) {
        rank.begin(first == nullptr ? "no stream" : first == second ? "one stream" : "two streams");
        Exchange x(rank, group, a, first);
        Exchange y(rank, group, other_case(rank, mix(options.seed, 302)), second);
        in_turn(x, y, 6);
      }
      group.barrier();
    });
  }
  return conclude("interleaved", ok, "two live plans of one group", start);
}

bool run_groups(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  bool ok = true;
  for (const Layout& layout : layouts(options)) {
    ok &= passes(options, layout, "groups", [&](Rank& rank) {
      const Case a = small_case(rank, mix(options.seed, 303));
      Case b = other_case(rank, mix(options.seed, 304));
      b.expert_kind = ExpertKind::huge;
      // Kernels of one group wait while those of the other run: both must fit on the GPU.
      const auto one = make_stream(rank.where()), two = make_stream(rank.where());
      Group first(rank.bootstrap(), group_config(rank, a.experts()));
      auto second = std::make_unique<Group>(rank.bootstrap(), group_config(rank, b.experts()));
      {
        Exchange x(rank, first, a, one.get());
        Exchange y(rank, *second, b, two.get());
        in_turn(x, y, 8);
      }
      second->barrier();
      second.reset();  // the other one goes on
      Exchange(rank, first, a).run();
      first.barrier();
    });
  }
  return conclude("groups", ok, "two groups in a process", start);
}

namespace {

struct Large {
  const char* name;
  std::int64_t hidden;
  std::int64_t tokens;
  std::int64_t pattern;  ///< distinct rows; a prime, so that offsets cannot be mistaken
  Dtype dtype;
  RowOrder order;
};

/// The tokens of one rank: `pattern` rows again and again.
struct PatternRows {
  PatternRows(int rank, const Large& large)
      : row_bytes(static_cast<std::size_t>(large.hidden) * size_of(large.dtype)),
        pattern(large.pattern),
        rows(make_rows(static_cast<std::uint64_t>(rank) + 1, large.dtype, false, large.pattern,
                       large.hidden)) {}
  /// Calls each(first token, rows, bytes, offset) for pieces of at most one pattern.
  template <class Each>
  void pieces(std::int64_t tokens, const Each& each) const {
    for (std::int64_t t = 0; t < tokens; t += pattern) {
      const auto count = static_cast<std::size_t>(std::min(pattern, tokens - t));
      each(static_cast<std::size_t>(t) * row_bytes, count * row_bytes);
    }
  }
  std::size_t row_bytes;
  std::int64_t pattern;
  Bytes rows;
};

void check_pieces(Rank& rank, const char* what, const PatternRows& expected, std::int64_t tokens,
                  const void* got) {
  Bytes piece(expected.rows.size());
  expected.pieces(tokens, [&](std::size_t at, std::size_t bytes) {
    copy_bytes(piece.data(), static_cast<const std::byte*>(got) + at, bytes, rank.where());
    rank.check(std::memcmp(piece.data(), expected.rows.data(), bytes) == 0,
               std::string(what) + ": the rows at byte " + std::to_string(at) + " differ");
  });
}

/// Both ranks send everything to rank 0.
void run_large_on(Rank& rank, const Large& large) {
  rank.begin(large.name);
  Group group(rank.bootstrap(), group_config(rank, 2));
  const PatternRows mine(rank.rank(), large), theirs(1 - rank.rank(), large);
  const std::size_t bytes = static_cast<std::size_t>(large.tokens) * mine.row_bytes;
  const auto x = allocate(bytes, rank.where());
  mine.pieces(large.tokens, [&](std::size_t at, std::size_t count) {
    copy_bytes(static_cast<std::byte*>(x.get()) + at, mine.rows.data(), count, rank.where());
  });
  const std::vector<std::int64_t> routes(static_cast<std::size_t>(large.tokens), 0);
  const Tensor ids = to_device({routes.data(), Dtype::i64, {large.tokens, 1}}, rank.where());
  const Plan plan = group.plan(ids);
  DispatchOptions options{.order = large.order};
  const Received received = group.dispatch(
      {x.get(), large.dtype, {large.tokens, large.hidden}, rank.where()}, plan, options);
  rank.equal(received.x.rows(), rank.rank() == 0 ? 2 * large.tokens : 0, "rows");
  rank.begin(std::string(large.name) + ", dispatched");
  if (received.x.rows() > 0) {
    check_pieces(rank, "from rank 0", mine, large.tokens, received.x.data());
    check_pieces(rank, "from rank 1", theirs, large.tokens, received.x.as<std::byte>() + bytes);
  }
  rank.begin(std::string(large.name) + ", to be combined");
  CombineOptions back{.order = large.order};
  const Combined combined = group.combine(received.x, plan, back);
  check_pieces(rank, "combined", mine, large.tokens, combined.x.data());
  rank.begin(std::string(large.name) + ", to be combined from ordinary memory");
  const auto copy = allocate(received.x.view().bytes() + 16, rank.where());
  copy_bytes(copy.get(), received.x.data(), received.x.view().bytes(), rank.where());
  ConstTensorView ordinary = received.x;
  ordinary.data = copy.get();
  const Combined again = group.combine(ordinary, plan, back);
  check_pieces(rank, "combined again", mine, large.tokens, again.x.data());
  group.barrier();
}

}  // namespace

bool run_large(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  constexpr std::size_t kNeed = std::size_t{48} << 30;
  for (const std::size_t free : free_gpu_bytes()) {
    if (free < kNeed) return conclude("large", true, "SKIPPED, NEEDS 48 GiB A GPU", start);
  }
  constexpr Large kAll[] = {
      {"rows of 4 MiB", 1 << 20, 560, 13, Dtype::f32, RowOrder::rank_major},
      {"rows of 16 KiB", 8192, 150000, 1009, Dtype::bf16, RowOrder::rank_major},
      {"expert-major rows of 16 KiB", 8192, 150000, 1009, Dtype::bf16, RowOrder::expert_major},
  };
  bool ok = true;
  for (const Large& large : kAll) {
    ok &= passes(options, {2, false}, "large", [&](Rank& rank) { run_large_on(rank, large); });
  }
  return conclude("large", ok, "receive memory past 4 GiB", start);
}

}  // namespace ferry::conformance
