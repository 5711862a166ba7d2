// A combine that reads its ranks' sums of slots while they are made, against the definition.
#include <algorithm>
#include <cstdio>
#include <string>

#include "expert_major_case.hpp"

namespace ferry::cuda::test {
namespace {

/// Slow sums: a combine that did not wait would read what was there before.
ExpertCase random_combine(Random& random, int ranks) {
  ExpertCase c;
  c.shape.ranks = ranks;
  c.shape.topk = pick(random, {1, 2, 4, 8});
  c.shape.experts = pick<std::int64_t>(random, {1, 3, 64, 256});
  c.shape.unused_percent = pick(random, {0, 20, 90});
  c.dtype = pick(random, {Dtype::f32, Dtype::bf16, Dtype::f16});
  c.row_bytes = pick<std::int64_t>(random, {16, 528, 2048, 4112});
  c.alignment = pick<std::int64_t>(random, {1, 16});
  c.spare = pick<std::int64_t>(random, {0, 77});
  const std::int64_t most = std::clamp<std::int64_t>((1 << 20) / c.row_bytes, 1, 3000) / ranks + 1;
  for (int r = 0; r < ranks; ++r) {
    c.shape.tokens.push_back(random.below(6) == 0 ? 0 : random.below(most) + 1);
  }
  c.weighted = random.below(2) == 0;
  const int fair = fair_sms(ranks);
  c.num_sms = std::min(pick(random, {1, 2, 5, 16}), std::max(1, fair / 2));
  c.sum_sms = std::min(pick(random, {1, 2, 60}), std::max(1, fair - c.num_sms));
  c.copies = static_cast<std::uint32_t>(pick(random, {0, 0, 0x55, 0xff}));
  c.ready = static_cast<std::uint32_t>(pick(random, {0, 0, 0x1, 0xaa, 0xff}));
  c.sum.vectors = pick(random, {0, 1, 2, 4, 7, 8});
  c.sum.warps = pick(random, {0, 1, 3, 16});
  c.sum.stages = pick(random, {0, 1, 2, 5});
  c.sum.pulls = pick(random, {0, 8, 64});
  return c;
}

struct RankCase {
  ExpertRows local;
  Bytes sums;                        ///< as they must be
  const std::byte* ready = nullptr;  ///< not null: where they are before the combine
  SumSlotsParameters sum;
  CombineParameters combine;
};

bool among(std::uint32_t ranks, int rank) {
  return (ranks >> rank & 1u) != 0;
}

RankCase make_rank(KernelGroup& group, const ExpertCase& c, const Exchange& x, int rank,
                   Random& random) {
  RankCase made;
  made.local = make_expert_rows(group, c, x, rank);
  const ExpertRows& local = made.local;
  const bool copies = among(c.copies, rank);
  const std::int64_t columns = c.row_bytes / static_cast<std::int64_t>(size_of(c.dtype));
  const std::int64_t count = copies ? local.received : local.out_capacity;
  const Bytes rows = random_elements(random, c.dtype, count * columns);
  const auto weights = random_floats(random, local.capacity * c.shape.topk);
  std::vector<std::int64_t> slots = local.expected.slot_rows;
  slots.resize(at(local.capacity * c.shape.topk), -1);
  made.sums = copies ? rows : expect_sums(c, local, rows, weights);
  if (among(c.ready, rank)) made.ready = group.upload(rank, made.sums).data;
  const Piece out = group.take(rank, at(local.capacity * c.row_bytes) + kGuard);
  SumSlotsParameters& s = made.sum;
  s.group = group.view(rank);
  s.plan = local.plan;
  if (!copies) {
    s.slot_rows = reinterpret_cast<const std::int64_t*>(group.upload(rank, slots).data);
  }
  s.rows = group.upload(rank, rows).data;
  s.input_rows = count;
  if (c.weighted && !copies)
    s.weights = reinterpret_cast<const float*>(group.upload(rank, weights).data);
  s.dtype = c.dtype;
  s.columns = columns;
  s.capacity = local.capacity;
  s.out = out.data;
  s.num_sms = c.sum_sms;
  CombineParameters& p = made.combine;
  p.group = s.group;
  p.plan = s.plan;
  p.call.kind = CallKind::combine;
  p.segment = out.segment;
  p.offset = out.offset;
  p.rows = local.capacity;
  p.dtype = c.dtype;
  p.columns = columns;
  p.out = take<std::byte>(group, rank, x.tokens(rank) * c.row_bytes);
  p.failure = group.failure(rank);
  p.num_sms = c.num_sms;
  p.after_sums = made.ready == nullptr;
  return made;
}

std::vector<RankCase> make_ranks(KernelGroup& group, const ExpertCase& c, const Exchange& x,
                                 Random& random) {
  group.reset_arena();
  group.clear_failures();
  std::vector<RankCase> all;
  for (int r = 0; r < c.shape.ranks; ++r) all.push_back(make_rank(group, c, x, r, random));
  group.settle();
  return all;
}

void check_rank(KernelGroup& group, const ExpertCase& c, const Exchange& x,
                const std::vector<RankCase>& all, int rank) {
  const std::int64_t tokens = x.tokens(rank), columns = all[at(rank)].combine.columns;
  const std::size_t bytes = at(tokens * c.row_bytes);
  conformance::CombineInput input;
  input.dtype = c.dtype;
  input.hidden = columns;
  input.row = [&](int d, std::int64_t row, std::byte* out) {
    std::copy_n(all[at(d)].sums.data() + row * c.row_bytes, c.row_bytes, out);
  };
  const Bytes expected = conformance::expect_combine(x.world(), rank, input).x;
  const Bytes got = group.download<std::byte>(rank, all[at(rank)].combine.out, bytes + kGuard);
  const std::int64_t differs =
      first_difference(got.data(), expected.data(), c.dtype, tokens * columns);
  if (differs >= 0) {
    stop("combine beside sums, " + c.text() + ": rank " + std::to_string(rank) + ", token " +
         std::to_string(differs / columns) + " of " + std::to_string(tokens) + ", column " +
         std::to_string(differs % columns));
  }
  for (std::size_t i = bytes; i < got.size(); ++i) {
    if (got[i] != std::byte{0xCB}) stop("combine beside sums wrote too much: " + c.text());
  }
}

/// Twice with the same memory: what one call says of its sums must not serve the next.
void run_combine(KernelGroup& group, const ExpertCase& c, Random& random) {
  const Exchange x = make_exchange(c.shape, random);
  const std::vector<RankCase> all = make_ranks(group, c, x, random);
  for (int call = 0; call < 2; ++call) {
    group.launch([&](int r) {
      const RankCase& mine = all[at(r)];
      const std::size_t sums = at(mine.local.capacity * c.row_bytes);
      if (sums > 0) {
        FERRY_CUDA_CHECK(cudaMemsetAsync(mine.sum.out, 0xCB, sums, group.stream(r)));
      }
      if (mine.ready == nullptr) {
        FERRY_CUDA_CHECK(launch_sum_slots(mine.sum, group.stream(r), c.sum));
      } else {
        FERRY_CUDA_CHECK(cudaMemcpyAsync(mine.sum.out, mine.ready, mine.sums.size(),
                                         cudaMemcpyDeviceToDevice, group.stream(r)));
      }
      FERRY_CUDA_CHECK(launch_combine(mine.combine, group.stream(r)));
    });
    group.wait_well();
    for (int r = 0; r < c.shape.ranks; ++r) check_rank(group, c, x, all, r);
  }
}

ExpertCase small_case() {
  ExpertCase c;
  c.shape = {2, 16, 4, {900, 700}, 0};
  c.row_bytes = 2064;
  c.num_sms = c.sum_sms = 2;
  return c;
}

/// A rank that dies in its sums, or lies about them, is named; all kernels end.
void sums_never_come(Random& random, bool violates) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{64} << 20, .deadline_ns = 200'000'000});
  const ExpertCase c = small_case();
  const Exchange x = make_exchange(c.shape, random);
  const std::vector<RankCase> all = make_ranks(group, c, x, random);
  if (violates) {
    const std::uint64_t word =
        std::uint64_t{1} << 8 | 255;  // of call 1: more slices than there are
    const GroupView view = group.view(1);
    group.copy_in(1, view.control + view.layout.summed, &word, sizeof(word));
    group.settle();
  }
  for (int call = 0; call < 2; ++call) {
    group.launch([&](int r) {
      if (r == 0) FERRY_CUDA_CHECK(launch_sum_slots(all[0].sum, group.stream(0), c.sum));
      FERRY_CUDA_CHECK(launch_combine(all[at(r)].combine, group.stream(r)));
    });
    group.wait(5);
  }
  for (int r = 0; r < 2; ++r) {
    const Failure& fatal = group.fatal(r);
    const Reason reason = violates ? Reason::violation : Reason::deadline;
    if (fatal.reason != reason || fatal.stage != Stage::sums || fatal.peer != 1) {
      stop("sums that never come: " + describe(fatal));
    }
  }
}

/// Refused by heads: the sums beside it do no harm, and the next call works.
void refused_in_peace(Random& random) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{64} << 20});
  const ExpertCase c = small_case();
  const Exchange x = make_exchange(c.shape, random);
  std::vector<RankCase> all = make_ranks(group, c, x, random);
  all[1].combine.rows -= 1;
  group.launch([&](int r) {
    FERRY_CUDA_CHECK(launch_sum_slots(all[at(r)].sum, group.stream(r), c.sum));
    FERRY_CUDA_CHECK(launch_combine(all[at(r)].combine, group.stream(r)));
  });
  group.wait();
  for (int r = 0; r < 2; ++r) {
    if (group.failure(r)->reason != Reason::too_many || group.fatal(r).written != 0) {
      stop("wrong refusal beside sums: " + describe(*group.failure(r)));
    }
  }
  run_combine(group, c, random);
}

}  // namespace

void test_combine_beside_sums(std::uint64_t seed, std::int64_t repeat) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    Random random(seed * 1000003 + static_cast<std::uint64_t>(ranks));
    KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{256} << 20});
    for (std::int64_t i = 0; i < repeat; ++i)
      run_combine(group, random_combine(random, ranks), random);
    std::printf("%d ranks: combine beside sums: all bytes as expected\n", ranks);
    std::fflush(stdout);
  }
  Random random(seed);
  for (const bool violates : {false, true}) sums_never_come(random, violates);
  refused_in_peace(random);
}

}  // namespace ferry::cuda::test
