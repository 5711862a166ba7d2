// Combine, direct: rows that cross are pushed to their owners in chunks, and a token is summed as
// soon as its rows are here: while they are in the caches, and while others are on their way.
#include <algorithm>
#include <limits>

#include "host/throughput/combine_job.hpp"

namespace ferry::host {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

void CombineJob::exchange_rows() {
  rows_here_.assign(index(engine_.size()), std::numeric_limits<std::int64_t>::max());
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (!in_domain(peer)) rows_here_[index(peer)] = 0;  // what is inside is read in place
  }
  for (std::int64_t first = 0; push_rows(first); first += rows_of_chunk()) {
    take_rows();
    sum_complete();
  }
  for (sum_complete(); summed_ < plan_->tokens; sum_complete()) {
    await_rows();
    take_rows();
  }
}

/// At the owner rows lie by the rank that they come from.
std::int64_t CombineJob::first_staged_at(int owner) const {
  std::int64_t before = 0;
  for (int d = 0; d < engine_.rank(); ++d) {
    before += plan().rank_tokens[index(std::int64_t{owner} * engine_.size() + d)];
  }
  return before;
}

/// One chunk for each owner beyond the line, from row `first` of what came from it; false: there
/// was none left.
bool CombineJob::push_rows(std::int64_t first) {
  bool any = false;
  for (int i = 1; i < engine_.size(); ++i) {  // each starts elsewhere
    const int owner = (engine_.rank() + i) % engine_.size();
    const std::int64_t mine = plan().recv_offset[index(owner)];
    const std::int64_t rows = plan().recv_offset[index(owner) + 1] - mine;
    if (in_domain(owner) || first >= rows) continue;
    any = true;
    const std::size_t count = index(std::min(rows_of_chunk(), rows - first));
    const std::size_t from = index(mine + first);
    const std::size_t to = index(first_staged_at(owner) + first);
    const StepMessage theirs = channel().head(owner);
    const auto write = [&](std::uint32_t segment, std::uint64_t offset, const std::byte* data,
                           std::size_t width) {
      channel().reach().write(owner, {segment, offset + to * width}, data + from * width,
                              count * width, channel().chunk_tag(owner));
    };
    write(theirs.stage_segment, theirs.stage_offset, mine_, rows_.row_bytes());
    if (has_weights()) {
      write(theirs.stage_side_segment, theirs.stage_side_offset, mine_weights_, weight_bytes());
    }
    channel().send_chunk(owner, count * (rows_.row_bytes() + weight_bytes()));
  }
  return any;
}

/// Looks what has come.
void CombineJob::take_rows() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    std::int64_t& here = rows_here_[index(peer)];
    while (here < plan().send_rows(peer) && channel().take_chunk(peer)) here += rows_of_chunk();
  }
}

/// Waits for the first row that the next token lacks.
void CombineJob::await_rows() {
  for (std::int64_t l = plan().lane_offset[index(summed_)];; ++l) {
    const Lane lane = plan().lanes[index(l)];
    std::int64_t& here = rows_here_[index(lane.rank)];
    if (lane.row < here) continue;
    channel().await_chunk("combine: rows", lane.rank);
    here += rows_of_chunk();
    return;
  }
}

/// Sums the tokens that lack no row, up to the first that does: rows come in ascending order.
void CombineJob::sum_complete() {
  const std::int64_t first = summed_;
  const auto is_here = [&](const Lane& lane) { return lane.row < rows_here_[index(lane.rank)]; };
  const auto lane = [&](std::int64_t token) {
    return plan().lanes.begin() + plan().lane_offset[index(token)];
  };
  while (summed_ < plan_->tokens && std::all_of(lane(summed_), lane(summed_ + 1), is_here)) {
    ++summed_;
  }
  sum_tokens(first, summed_);
}

}  // namespace ferry::host
