// Combine, direct: rows are read in place inside the domain; those that cross are pushed to their
// owners in chunks, and a token is summed as soon as its rows are here: while they are in the
// caches, and while others are on their way.
#include <algorithm>
#include <array>
#include <limits>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_call.hpp"

namespace ferry::host {
namespace {

class DirectCombine {
 public:
  DirectCombine(const CombineCall& call, const CombineMemory& memory, const Combined& result)
      : call_(call), memory_(memory), result_(result) {}

  void find_rows();
  void exchange_rows();
  void sum_weights();

 private:
  std::int64_t rows_of_chunk() const {
    return chunk_rows(call_.rows.row_bytes(), call_.chunk_bytes);
  }
  bool push_rows(std::int64_t first);
  void take_rows();
  void await_rows();
  void sum_complete();
  void sum_tokens(std::int64_t first, std::int64_t end);

  const CombineCall& call_;
  const ExchangePlan& plan_ = call_.exchange();
  Channel& channel_ = call_.channel();
  const CombineMemory& memory_;
  const Combined& result_;
  std::vector<std::int64_t> rows_here_{};     // for each rank: how many of its rows may be summed
  std::int64_t summed_ = 0;                   // tokens
  std::vector<const std::byte*> row_base_{};  // for each rank: its first row of mine
  std::vector<const std::byte*> weight_base_{};
};

void DirectCombine::find_rows() {
  const std::size_t row_bytes = call_.rows.row_bytes();
  for (int peer = 0; peer < call_.engine.size(); ++peer) {
    const auto d = static_cast<std::size_t>(peer);
    if (!channel_.has(peer)) {  // no rows are there
      row_base_.push_back(nullptr);
      weight_base_.push_back(nullptr);
      continue;
    }
    const StepMessage theirs = channel_.head(peer);
    const auto first = static_cast<std::size_t>(plan_.peer_row[d]);
    const bool own = peer == call_.engine.rank();
    const std::byte* rows =
        own ? memory_.rows : channel_.pointer(peer, {theirs.segment, theirs.offset});
    if (rows != nullptr) {
      const std::byte* weights = channel_.pointer(peer, {theirs.side_segment, theirs.side_offset});
      row_base_.push_back(rows + first * row_bytes);
      weight_base_.push_back(weights + first * call_.weight_bytes());
    } else {
      const auto staged = static_cast<std::size_t>(plan_.send_offset[d]);
      row_base_.push_back(memory_.stage + staged * row_bytes);
      weight_base_.push_back(memory_.staging_weights + staged * call_.weight_bytes());
    }
  }
}

void DirectCombine::exchange_rows() {
  rows_here_.assign(index(call_.engine.size()), std::numeric_limits<std::int64_t>::max());
  for (int peer = 0; peer < call_.engine.size(); ++peer) {
    if (!call_.in_domain(peer)) rows_here_[index(peer)] = 0;  // what is inside is read in place
  }
  for (std::int64_t first = 0; push_rows(first); first += rows_of_chunk()) {
    take_rows();
    sum_complete();
  }
  for (sum_complete(); summed_ < call_.plan->tokens; sum_complete()) {
    await_rows();
    take_rows();
  }
}

/// One chunk for each owner in another domain, from row `first` of what came from it; false: there
/// was none left.
bool DirectCombine::push_rows(std::int64_t first) {
  bool any = false;
  for (int i = 1; i < call_.engine.size(); ++i) {  // each starts elsewhere
    const int owner = (call_.engine.rank() + i) % call_.engine.size();
    const std::int64_t mine = plan_.recv_offset[index(owner)];
    const std::int64_t rows = plan_.recv_offset[index(owner) + 1] - mine;
    if (call_.in_domain(owner) || first >= rows) continue;
    any = true;
    const std::size_t count = index(std::min(rows_of_chunk(), rows - first));
    const std::size_t from = index(mine + first);
    // At the owner rows lie by the rank that they come from.
    const std::size_t to = index(plan_.peer_sent_before[index(owner)] + first);
    const StepMessage theirs = channel_.head(owner);
    const auto write = [&](std::uint32_t segment, std::uint64_t offset, const std::byte* data,
                           std::size_t width) {
      channel_.reach().write(owner, {segment, offset + to * width}, data + from * width,
                             count * width, channel_.chunk_tag(owner));
    };
    write(theirs.staging_segment, theirs.staging_offset, memory_.rows, call_.rows.row_bytes());
    if (call_.has_weights()) {
      write(theirs.staging_side_segment, theirs.staging_side_offset, memory_.mine_weights,
            call_.weight_bytes());
    }
    channel_.send_chunk(owner, count * (call_.rows.row_bytes() + call_.weight_bytes()));
  }
  return any;
}

/// Polls what has come.
void DirectCombine::take_rows() {
  for (int peer = 0; peer < call_.engine.size(); ++peer) {
    std::int64_t& here = rows_here_[index(peer)];
    while (here < plan_.send_rows(peer) && channel_.take_chunk(peer)) here += rows_of_chunk();
  }
}

/// Waits for the first row that the next token lacks.
void DirectCombine::await_rows() {
  for (std::int64_t l = plan_.destination_offset[index(summed_)];; ++l) {
    const Destination destination = plan_.destinations[index(l)];
    std::int64_t& here = rows_here_[index(destination.rank)];
    if (destination.row < here) continue;
    channel_.await_chunk("combine: rows", destination.rank);
    here += rows_of_chunk();
    return;
  }
}

/// Sums the tokens that lack no row, up to the first that does: rows come in ascending order.
void DirectCombine::sum_complete() {
  const std::int64_t first = summed_;
  const auto is_here = [&](const Destination& destination) {
    return destination.row < rows_here_[index(destination.rank)];
  };
  const auto destination = [&](std::int64_t token) {
    return plan_.destinations.begin() + plan_.destination_offset[index(token)];
  };
  while (summed_ < call_.plan->tokens &&
         std::all_of(destination(summed_), destination(summed_ + 1), is_here)) {
    ++summed_;
  }
  sum_tokens(first, summed_);
}

void DirectCombine::sum_tokens(std::int64_t first, std::int64_t end) {
  const std::size_t row_bytes = call_.rows.row_bytes();
  // Two sets of pointers in turn: while one token is summed, the rows of the next are fetched.
  std::array<std::array<const void*, kMaxTopk>, 2> rows{};
  const auto find = [&](std::size_t token) {
    std::int64_t count = 0;
    if (token == static_cast<std::size_t>(end)) return count;
    for (std::int64_t l = plan_.destination_offset[token]; l < plan_.destination_offset[token + 1];
         ++l) {
      const Destination destination = plan_.destinations[static_cast<std::size_t>(l)];
      rows[token % 2][static_cast<std::size_t>(count++)] =
          row_base_[static_cast<std::size_t>(destination.rank)] +
          static_cast<std::size_t>(destination.row) * row_bytes;
    }
    return count;
  };
  const Kernels& run = kernels();
  SumRows sum;
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  sum.next_count = find(static_cast<std::size_t>(first));
  auto* out = static_cast<std::byte*>(result_.x.data());
  for (auto token = static_cast<std::size_t>(first); token < static_cast<std::size_t>(end);
       ++token) {
    sum.rows = rows[token % 2].data();
    sum.count = sum.next_count;
    sum.next_rows = rows[(token + 1) % 2].data();
    sum.next_count = find(token + 1);
    sum.bias0 = call_.bias_row(call_.options.bias0, token);
    sum.bias1 = call_.bias_row(call_.options.bias1, token);
    sum.out = out + token * row_bytes;
    run.sum_rows(sum);
  }
}

void DirectCombine::sum_weights() {
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  auto* out = result_.topk_weights.as<float>();
  std::fill(out, out + static_cast<std::size_t>(call_.plan->tokens) * topk, 0.0f);
  for (std::size_t token = 0; token < static_cast<std::size_t>(call_.plan->tokens); ++token) {
    for (std::int64_t l = plan_.destination_offset[token]; l < plan_.destination_offset[token + 1];
         ++l) {
      const Destination destination = plan_.destinations[static_cast<std::size_t>(l)];
      const auto* weights = reinterpret_cast<const float*>(
          weight_base_[static_cast<std::size_t>(destination.rank)] +
          static_cast<std::size_t>(destination.row) * call_.weight_bytes());
      for (std::size_t k = 0; k < topk; ++k) out[token * topk + k] += weights[k];
    }
  }
}

}  // namespace

void combine_direct(const CombineCall& call, const CombineMemory& memory, const Combined& result) {
  DirectCombine combine(call, memory, result);
  combine.find_rows();
  combine.exchange_rows();
  if (call.has_weights()) combine.sum_weights();
}

}  // namespace ferry::host
