// NCCL's part of one configuration on one rank.
#include <stdexcept>

#include "bench/gpu_rank.hpp"

namespace ferry::cli {
namespace {

/// Of every rank the tokens that `source` sends there, ascending.
std::vector<std::vector<std::int64_t>> tokens_to_ranks(const BenchSettings& one, int source) {
  const auto routes = make_routes(one, one.tokens, source);
  std::vector<std::vector<std::int64_t>> tokens(static_cast<std::size_t>(one.ranks));
  for (std::int64_t t = 0; t < one.tokens; ++t) {
    for (const int rank : destinations(one, routes, t)) {
      tokens[static_cast<std::size_t>(rank)].push_back(t);
    }
  }
  return tokens;
}

/// Appends the rows of one rank's tokens, each with its scales behind it. Returns their bytes.
std::size_t append_rows(std::vector<std::byte>& rows, const RowPattern& pattern,
                        std::int64_t scales, int rank, const std::vector<std::int64_t>& tokens) {
  const std::size_t before = rows.size();
  for (const std::int64_t token : tokens) {
    const std::byte* row = pattern.row(rank, token);
    rows.insert(rows.end(), row, row + pattern.row_bytes());
    for (std::int64_t c = 0; c < scales; ++c) {
      const float scale = scale_of(rank, token, c);
      const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
      rows.insert(rows.end(), bytes, bytes + sizeof scale);
    }
  }
  return rows.size() - before;
}

}  // namespace

NcclExchange::NcclExchange(const NcclRank& nccl, const BenchSettings& one, std::uint64_t data_seed,
                           int rank, const GpuStream& stream)
    : nccl_(nccl), stream_(stream) {
  const RowPattern pattern(data_seed, one.hidden, one.dtype);
  const auto mine = tokens_to_ranks(one, rank);
  std::vector<std::byte> send;
  for (int peer = 0; peer < one.ranks; ++peer) {
    const auto theirs = tokens_to_ranks(one, peer);
    NcclBlock block;
    block.send_offset = send.size();
    block.send_bytes =
        append_rows(send, pattern, one.scales(), rank, mine[static_cast<std::size_t>(peer)]);
    block.receive_offset = expected_.size();
    block.receive_bytes =
        append_rows(expected_, pattern, one.scales(), peer, theirs[static_cast<std::size_t>(rank)]);
    blocks_.push_back(block);
  }
  send_ = std::make_unique<GpuBuffer>(send.size());
  receive_ = std::make_unique<GpuBuffer>(expected_.size());
  stream.upload(send_->data(), send.data(), send.size());
}

void NcclExchange::call() const {
  nccl_.all_to_all(send_->data(), receive_->data(), blocks_, stream_.raw);
}

void NcclExchange::check() const {
  call();
  std::vector<std::byte> received(expected_.size());
  stream_.download(received.data(), receive_->data(), received.size());
  if (received != expected_) throw std::runtime_error("NCCL brought other rows than were sent");
}

}  // namespace ferry::cli
