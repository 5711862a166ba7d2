// The matrix on GPUs, and many exchanges on one group.
#include <algorithm>
#include <cstdio>
#include <map>

#include "case.hpp"
#include "cuda_parts.hpp"
#include "device.hpp"
#include "exchange.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr int kMatrixSample = 300;
constexpr std::size_t kChunk = 64;  // cases that are ordered so that they share groups

struct Numbered {
  std::string label{};
  Case c{};
};

/// All cases that were asked for, in the order in which they are to run.
std::vector<Numbered> choose_cases(const CudaOptions& options) {
  std::vector<Numbered> all;
  if (options.cases == Cases::full || options.only_case >= 0) {
    std::vector<std::int64_t> numbers;
    for (std::int64_t n = 0; n < product(Mode::device); ++n) {
      if (options.only_case < 0 || n == options.only_case) numbers.push_back(n);
    }
    Random random(mix(options.seed, 201));
    for (std::size_t n = numbers.size(); n > 1; --n) {
      std::swap(numbers[n - 1],
                numbers[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(n)))]);
    }
    for (const std::int64_t n : numbers) {
      all.push_back(
          {"case " + std::to_string(n) + ": ", numbered_case(Mode::device, n, options.seed)});
    }
    return all;
  }
  const auto choices = options.cases == Cases::cover
                           ? pairwise_cover(Mode::device, options.seed)
                           : random_choices(Mode::device, kMatrixSample, mix(options.seed, 202));
  std::uint64_t number = 0;
  for (const auto& choice : choices) {
    Case c = make_case(Mode::device, choice);
    size_case(c, mix(options.seed, 203, ++number));
    all.push_back({"", c});
  }
  return all;
}

/// Runs cases until the time is over, which rank 0 decides for all.
void run_batch(Rank& rank, const std::vector<Numbered>& batch, double seconds, SharedNumber& done) {
  Session session(rank);
  const std::int64_t end = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  for (const Numbered& each : batch) {
    const bool enough = now_ns() > end || rank.failures() > 0;
    const std::byte over{enough ? std::uint8_t{1} : std::uint8_t{0}};
    const auto told = rank.bootstrap()->all_gather({&over, 1}, std::chrono::seconds(100));
    if (told[0][0] != std::byte{0}) return;
    run_case(session, each.c, each.label);
    if (rank.rank() == 0) ++*done;
  }
}

std::map<std::pair<int, bool>, std::vector<Numbered>> matrix_batches(const CudaOptions& options) {
  std::map<std::pair<int, bool>, std::vector<Numbered>> batches;
  for (const Numbered& each : choose_cases(options)) {
    const int ranks = each.c.ranks;
    const bool threads = each.c.fabric == FabricKind::local && may_be_threads(options, ranks);
    const auto& asked = options.ranks;
    if (options.only_case < 0 && std::find(asked.begin(), asked.end(), ranks) == asked.end()) {
      continue;
    }
    Numbered mine = each;
    mine.c.fabric = threads ? FabricKind::local : FabricKind::shm;
    batches[{ranks, threads}].push_back(mine);
  }
  return batches;
}

}  // namespace

bool run_matrix(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const auto batches = matrix_batches(options);
  const double each =
      options.seconds / static_cast<double>(std::max<std::size_t>(batches.size(), 1));
  std::int64_t done = 0;
  std::size_t total = 0;
  bool ok = true;
  for (const auto& [key, cases] : batches) {
    std::vector<Numbered> batch = cases;
    for (std::size_t i = 0; i < batch.size(); i += kChunk) {
      std::stable_sort(
          batch.begin() + static_cast<std::ptrdiff_t>(i),
          batch.begin() + static_cast<std::ptrdiff_t>(std::min(batch.size(), i + kChunk)),
          [](const auto& a, const auto& b) { return shares_before(a.c, b.c); });
    }
    const Layout layout{key.first, key.second};
    SharedNumber ran;
    const std::int64_t from = now_ns();
    ok &= passes(options, layout, "matrix", [&](Rank& rank) { run_batch(rank, batch, each, ran); });
    std::printf("  matrix, %s: %lld of %zu cases, %.1f s\n", to_string(layout).c_str(),
                static_cast<long long>(*ran), batch.size(),
                static_cast<double>(now_ns() - from) * 1e-9);
    std::fflush(stdout);
    done += *ran;
    total += batch.size();
  }
  return conclude("matrix", ok && done > 0,
                  std::to_string(done) + " of " + std::to_string(total) + " cases", start);
}

namespace {

/// A case that differs from the last in routes, sizes, order and values, on the same group.
Case vary(const Rank& rank, std::uint64_t seed, int i) {
  Case c = small_case(rank, mix(seed, 71, static_cast<std::uint64_t>(i)) >> 1);
  Random random(c.seed);
  constexpr std::int64_t kHidden[] = {16, 64, 128, 208};
  constexpr int kTopk[] = {1, 3, 8};
  constexpr int kSms[] = {0, 1, 2, 5, 16};
  c.hidden = kHidden[random.below(4)];
  c.topk = kTopk[random.below(3)];
  c.num_sms = kSms[random.below(5)];
  c.routes = static_cast<RouteKind>(random.below(8));
  c.index = static_cast<IndexKind>(random.below(3));
  c.tokens = 1 + random.below(12);
  c.order = random.one_in(2) ? RowOrder::expert_major : RowOrder::rank_major;
  c.alignment = c.order == RowOrder::expert_major ? 1 + random.below(8) : 1;
  c.rows = static_cast<RowsKind>(random.below(3));
  c.weights = random.one_in(2) ? WeightKind::carried : WeightKind::none;
  if (c.order == RowOrder::expert_major && random.one_in(3)) c.weights = WeightKind::applied;
  c.combine_dtype = random.one_in(2) ? Dtype::bf16 : Dtype::f32;
  c.dtype = random.one_in(3) ? Dtype::e4m3 : Dtype::bf16;
  if (c.dtype == Dtype::bf16 && random.one_in(3)) c.wire = static_cast<WireKind>(random.below(3));
  c.special_values = random.one_in(4);
  c.biases = static_cast<int>(random.below(3));
  c.stream = random.one_in(2);
  c.own_output = random.one_in(4);
  c.size = static_cast<SizeKind>(random.below(3));
  return c;
}

bool repeat_on(const CudaOptions& options, const Layout& layout, int count) {
  const std::int64_t start = now_ns();
  SharedNumber done, least, most;
  const bool ok = passes(options, layout, "repeat", [&](Rank& rank) {
    Session session(rank);
    for (int i = 0; i < count && rank.failures() == 0; ++i) {
      const Case c = vary(rank, options.seed, i);
      run_case(session, c, "exchange " + std::to_string(i) + ": ");
      const auto arena = static_cast<std::int64_t>(session.group(c).memory().arena_bytes);
      if (rank.rank() > 0) continue;
      if (i == std::min(99, count - 1)) *least = arena;
      *most = arena;
      ++*done;
    }
    session.group(vary(rank, options.seed, 0)).barrier();
    // Every exchange is as small as any: after the first hundred the memory does not grow.
    rank.check(*most <= *least + (std::int64_t{16} << 20), "memory grows with the exchanges");
  });
  std::printf("  repeat, %s: %lld of %d exchanges, %.1f s, %.1f MiB, after 100 %.1f MiB\n",
              to_string(layout).c_str(), static_cast<long long>(*done), count,
              static_cast<double>(now_ns() - start) * 1e-9, static_cast<double>(*most) / 0x1p20,
              static_cast<double>(*least) / 0x1p20);
  std::fflush(stdout);
  return ok && *done == count;
}

}  // namespace

bool run_repeated(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const int ranks = options.gpus > 0 ? options.gpus : 3;
  bool ok = repeat_on(options, {ranks, false}, options.repeat);
  if (may_be_threads(options, ranks)) ok &= repeat_on(options, {ranks, true}, options.repeat / 5);
  // They take turns on their GPUs, which takes long.
  ok &= repeat_on(options, {2 * ranks, false}, options.repeat / 50);
  return conclude("repeat", ok, std::to_string(options.repeat) + " exchanges on one group", start);
}

}  // namespace ferry::conformance
