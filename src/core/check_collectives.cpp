#include "core/check_collectives.hpp"

#include <algorithm>
#include <string>

#include "base/hash.hpp"
#include "core/check.hpp"

namespace ferry {
namespace {

std::string elements(std::int64_t count) {
  return std::to_string(count) + (count == 1 ? " element" : " elements");
}

void check_pair(std::string_view call, const ConstTensorView& x, const ConstTensorView& out,
                const Device& where, bool in_place = false) {
  check_dense(call, "x", x, where);
  check_dense(call, "out", out, where);
  if (out.dtype != x.dtype) {
    refuse(call, "out", "dtype " + dtype_text(out.dtype), "that of x, " + dtype_text(x.dtype));
  }
  if (!in_place && overlap(x, out))
    refuse(call, "out", "memory that overlaps x", "memory of its own");
}

void check_sum(std::string_view name, const ConstTensorView& tensor,
               std::span<const std::int64_t> counts, std::string_view counts_name, int ranks) {
  constexpr std::string_view kCall = "all_to_all";
  if (counts.size() != static_cast<std::size_t>(ranks)) {
    refuse(kCall, counts_name, std::to_string(counts.size()) + " counts",
           "one for each of " + std::to_string(ranks) + " ranks");
  }
  const std::int64_t all = tensor.shape.product();
  std::int64_t rest = all;
  for (const std::int64_t count : counts) {
    if (count < 0) refuse(kCall, counts_name, std::to_string(count), "0 or more");
    if (count > rest) {
      refuse(kCall, counts_name, "more than the " + elements(all) + " of " + std::string(name),
             "counts that add up to them");
    }
    rest -= count;
  }
  if (rest != 0) {
    refuse(kCall, counts_name,
           elements(all - rest) + " together for the " + elements(all) + " of " + std::string(name),
           "counts that add up to them");
  }
}

void check_format(std::string_view call, const ConstTensorView& x, const ReduceOptions& options) {
  if (options.format > ReduceFormat::automatic) {
    refuse(call, "format", std::to_string(static_cast<int>(options.format)),
           "exact, bf16, f16, e4m3, e5m2 or automatic");
  }
  const bool adds = options.op == ReduceOp::sum || options.op == ReduceOp::mean;
  const bool codes =
      options.format != ReduceFormat::exact && options.format != ReduceFormat::automatic;
  if (codes && (options.algorithm == Algorithm::ring || options.algorithm == Algorithm::tree)) {
    refuse(call, "format",
           std::string(name_of(options.format)) + " by " + std::string(name_of(options.algorithm)),
           "exact, or another algorithm: these would round at every hop");
  }
  if (codes && (x.dtype != Dtype::f32 || !adds)) {
    refuse(call, "format",
           std::string(name_of(options.format)) + " for the " + std::string(name_of(options.op)) +
               " of " + dtype_text(x.dtype),
           "exact or automatic, or a sum or mean of f32");
  }
}

}  // namespace

void check_dense(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 const Device& where) {
  check_view(call, name, tensor, where);
  checked_bytes(call, name, tensor.shape, tensor.dtype);
  check_data(call, name, tensor);
  if (!tensor.is_dense()) {
    refuse(call, name, "strides " + to_string(tensor.strides), "a dense tensor");
  }
}

void check_peer(std::string_view call, int peer, int rank, int ranks) {
  if (peer >= 0 && peer < ranks && peer != rank) return;
  refuse(call, "peer", std::to_string(peer),
         "another rank than this one, " + std::to_string(rank) + ", of 0 … " +
             std::to_string(ranks - 1));
}

void check_reduction(std::string_view call, const ConstTensorView& x,
                     const ReduceOptions& options) {
  const bool integer = x.dtype == Dtype::i32 || x.dtype == Dtype::i64 || x.dtype == Dtype::u8;
  if (!integer && !is_float(x.dtype)) {
    refuse(call, "x", "dtype " + dtype_text(x.dtype), "f32, bf16, f16, i32, i64 or u8");
  }
  if (options.op > ReduceOp::max) {
    refuse(call, "op", std::to_string(static_cast<int>(options.op)),
           "sum, mean, product, min or max");
  }
  check_format(call, x, options);
  if (integer && options.op == ReduceOp::mean) {
    refuse(call, "op", "mean of " + dtype_text(x.dtype), "f32, bf16 or f16, or another op");
  }
  if (options.algorithm > Algorithm::tree) {
    refuse(call, "algorithm", std::to_string(static_cast<int>(options.algorithm)),
           "automatic, one_shot, direct, hierarchical, ring or tree");
  }
  const auto wrong = [](int share) { return share < 0 || share > UINT16_MAX; };
  const auto& shares = options.shares;
  if (std::any_of(shares.begin(), shares.end(), wrong) ||
      (!shares.empty() && std::count(shares.begin(), shares.end(), 0) == std::ssize(shares))) {
    refuse(call, "shares", "one that cannot be", "0 … 65535 for each domain, and not all 0");
  }
  if (options.algorithm != Algorithm::automatic && call != "all_reduce") {
    refuse(call, "algorithm", std::string(name_of(options.algorithm)),
           "automatic: it is of all_reduce alone");
  }
  if (shares.empty()) return;
  if (call != "all_reduce") refuse(call, "shares", "some", "none: they are of all_reduce alone");
  switch (options.algorithm) {
    case Algorithm::one_shot:
    case Algorithm::ring:
    case Algorithm::tree: {
      const std::string name(name_of(options.algorithm));
      refuse(call, "shares", "some with algorithm " + name,
             "none, as " + name +
                 " does not divide the elements by domains; or direct, hierarchical or automatic");
    }
    default: return;
  }
}

Algorithm gpu_algorithm(const ReduceOptions& options, std::int64_t bytes,
                        std::int64_t one_shot_bytes) {
  constexpr std::string_view kCall = "all_reduce";
  if (!options.shares.empty()) {
    refuse(kCall, "shares", std::to_string(options.shares.size()) + " numbers",
           "none: GPUs of one domain have equal shares; backend host takes them");
  }
  const std::string most = std::to_string(one_shot_bytes) + " bytes";
  switch (options.algorithm) {
    case Algorithm::automatic:
      return bytes <= one_shot_bytes ? Algorithm::one_shot : Algorithm::direct;
    case Algorithm::direct: return Algorithm::direct;
    case Algorithm::one_shot:
      if (bytes <= one_shot_bytes) return Algorithm::one_shot;
      refuse(kCall, "algorithm", "one_shot for " + std::to_string(bytes) + " bytes",
             "at most " + most + ", or another algorithm");
    default:
      refuse(kCall, "algorithm", std::string(name_of(options.algorithm)) + " with backend cuda",
             "automatic, direct, or one_shot up to " + most + "; backend host has all algorithms");
  }
}

void check_blocks(std::string_view call, std::string_view whole_name, const ConstTensorView& whole,
                  std::string_view block_name, const ConstTensorView& block, int rank, int ranks,
                  const Device& where) {
  const bool gathers = whole_name == "out";
  const auto own =
      static_cast<std::size_t>(rank) * (whole.bytes() / static_cast<std::size_t>(ranks));
  check_pair(call, gathers ? block : whole, gathers ? whole : block, where,
             block.data == static_cast<const std::byte*>(whole.data) + own);
  const std::int64_t each = block.shape.product();
  if (whole.shape.product() / ranks != each || whole.shape.product() % ranks != 0) {
    refuse(
        call, whole_name, elements(whole.shape.product()),
        std::to_string(ranks) + " times the " + elements(each) + " of " + std::string(block_name));
  }
}

BlockCounts checked_counts(const ConstTensorView& x, std::span<const std::int64_t> to,
                           const ConstTensorView& out, std::span<const std::int64_t> from,
                           int ranks, const Device& where) {
  check_pair("all_to_all", x, out, where);
  check_sum("x", x, to, "send_counts", ranks);
  check_sum("out", out, from, "recv_counts", ranks);
  return {{to.begin(), to.end()}, {from.begin(), from.end()}, false};
}

BlockCounts equal_counts(const ConstTensorView& x, const ConstTensorView& out, int ranks,
                         const Device& where) {
  check_pair("all_to_all", x, out, where);
  const std::int64_t all = x.shape.product();
  if (all % ranks != 0 || out.shape.product() != all) {
    refuse("all_to_all", all % ranks != 0 ? "x" : "out",
           elements(all % ranks != 0 ? all : out.shape.product()),
           all % ranks != 0 ? "a multiple of " + std::to_string(ranks) : elements(all) + ", as x");
  }
  const std::vector<std::int64_t> each(static_cast<std::size_t>(ranks), all / ranks);
  return {each, each, true};
}

namespace {

/// Of a table of any kind: rows of a rank, which others copy, and slots.
std::pair<std::int64_t, std::int64_t> checked_rows(bool adds, const ConstTensorView& x,
                                                   const ConstTensorView& out,
                                                   const Device& where) {
  const std::string_view call = adds ? "add_rows" : "copy_rows";
  check_pair(call, x, out, where);
  for (const auto& [name, tensor] : {std::pair{"x", &x}, {"out", &out}}) {
    if (tensor->shape.size() != 2 || tensor->shape[0] > kMostTableRows) {
      refuse(call, name, "shape " + to_string(tensor->shape),
             "[rows, columns], at most " + std::to_string(kMostTableRows) + " rows");
    }
  }
  if (x.columns() != out.columns()) {
    refuse(call, "out", std::to_string(out.columns()) + " columns",
           std::to_string(x.columns()) + ", as of x");
  }
  if (adds && x.dtype != Dtype::f32) refuse(call, "x", "dtype " + dtype_text(x.dtype), "f32");
  return adds ? std::pair{out.shape[0], x.shape[0]} : std::pair{x.shape[0], out.shape[0]};
}

}  // namespace

GpuRowTable checked_gpu_table(bool adds, const ConstTensorView& x, const ConstTensorView& out,
                              const ConstTensorView& table, int ranks, const Device& where) {
  const std::string_view call = adds ? "add_rows" : "copy_rows";
  const auto [rows, slots] = checked_rows(adds, x, out, where);
  check_exact(call, "table", table, Dtype::i32, {ranks, slots}, where);
  check_dense(call, "table", table, where);
  if (ranks * slots > kMostTableRows) {
    refuse(call, "table", std::to_string(ranks * slots) + " entries",
           std::to_string(kMostTableRows) + " at most");
  }
  if (x.shape.product() == 0 || out.shape.product() == 0) {
    refuse(call, x.shape.product() == 0 ? "x" : "out", "no elements", "some");
  }
  return {adds, rows, slots, static_cast<const std::int32_t*>(table.data)};
}

RowTable checked_table(bool adds, const ConstTensorView& x, const ConstTensorView& out,
                       std::span<const std::int32_t> table, int ranks, const Device& where) {
  const std::string_view call = adds ? "add_rows" : "copy_rows";
  const auto [rows, slots] = checked_rows(adds, x, out, where);
  if (std::ssize(table) != ranks * slots) {
    refuse(call, "table", std::to_string(table.size()) + " entries",
           std::to_string(ranks) + " ranks times " + std::to_string(slots) + " slots");
  }
  RowTable made{.adds = adds, .rows = rows, .slots = slots};
  for (std::int64_t place = 0; place < std::ssize(table); ++place) {
    const std::int64_t row = table[static_cast<std::size_t>(place)];
    if (row < -1 || row >= ranks * rows) {
      refuse(call, "table", std::to_string(row),
             "-1 … " + std::to_string(ranks * rows - 1) + ", rows of all ranks");
    }
    if (row < 0) continue;
    const int owner = static_cast<int>(row / rows), holder = static_cast<int>(place / slots);
    if (adds) {
      made.moves.push_back({holder, place % slots, owner, row % rows});
    } else {
      made.moves.push_back({owner, row % rows, holder, place % slots});
    }
  }
  made.hash = hash_of(table);
  return made;
}

}  // namespace ferry
