// Rounds through the inboxes: in each round a block stores a part of every peer's piece into that
// peer's inbox and raises a flag there; who reads it raises one back. Block b of a rank talks to
// blocks b of the others alone. Results that are spread go into the peers' tensors where peers can
// touch these, else through the inboxes, too.
//
// A round is written over by the one kInboxDepth later. Each reader says what it has read (`back`).
// Where results come through the inboxes, they say it: a rank begins round k + 2 when it has taken
// the results of round k - 2, whose owner had then reduced it; and a result of round k follows the
// pieces of round k, which their rank sends after it has taken the results of round k - 4. The swap
// of heads comes between two calls. A result is stored into a tensor when the pieces of its round
// have come from all ranks: nobody reads what it replaces any more.
#pragma once
#include "cuda/kernels/collectives/call.cuh"

namespace ferry::cuda::device {

/// One block's part of the rounds.
class InboxRounds {
 public:
  __device__ InboxRounds(const CollectiveParameters& p, const CollectivePeers& peers,
                         std::uint64_t generation)
      : p_(p), peers_(peers), generation_(generation), chunk_(p.chunk) {}

  /// Rounds of a piece of so many bytes.
  __device__ std::int64_t rounds(std::int64_t bytes) const {
    const std::int64_t together = chunk_ * gridDim.x;
    return (bytes + together - 1) / together;
  }
  /// Where in a piece this block's part of the round begins, and how much of `bytes` it is.
  __device__ std::int64_t begin(std::int64_t round) const {
    return (round * gridDim.x + blockIdx.x) * chunk_;
  }
  __device__ std::int64_t part(std::int64_t round, std::int64_t bytes) const {
    const std::int64_t rest = bytes - begin(round);
    return rest < 0 ? 0 : (rest < chunk_ ? rest : chunk_);
  }

  __device__ std::byte* piece(int owner, int source, std::int64_t round) const {
    return slot(owner, p_.layout.pieces, source, round);
  }
  __device__ std::byte* result(int owner, int source, std::int64_t round) const {
    return slot(owner, p_.layout.results, source, round);
  }

  /// Whole block: what it stored for or read of each peer in this round is told to those that
  /// `with(peer)`. `flags`: layout.come or layout.back.
  template <class With>
  __device__ void tell(std::size_t flags, std::int64_t round, const With& with) const {
    __syncthreads();
    const int i = thread() + 1;
    if (i < p_.group.ranks && with(peer_after(p_.group, i))) {
      const int peer = peer_after(p_.group, i);
      store_release(flag(peer, flags, p_.group.rank), value(round));
    }
  }
  /// Whole block: waits until those peers have told of this round. False: the group has failed.
  template <class With>
  __device__ bool await(std::size_t flags, std::int64_t round, const With& with) const {
    bool there = true;
    const int peer = thread();
    if (peer < p_.group.ranks && peer != p_.group.rank && with(peer)) {
      there = await_round(p_, generation_, flag(p_.group.rank, flags, peer), peer, value(round));
    }
    return __syncthreads_and(there) != 0;
  }

  /// Whole block: this round's part of every peer's piece of x goes out.
  __device__ void push(std::int64_t round) const {
    const int ranks = p_.group.ranks;
#pragma unroll 1
    for (int i = 1; i < ranks; ++i) {
      const int peer = peer_after(p_.group, i);
      const std::int64_t bytes = part(round, p_.to.size(peer, ranks));
      if (bytes == 0) continue;
      const std::byte* from = p_.x + p_.to.offset(peer) + begin(round);
      std::byte* to = piece(peer, p_.group.rank, round);
      copy_vectors(block_walk(), from, to, bytes);
    }
    tell(p_.layout.come, round, [&](int peer) { return part(round, p_.to.size(peer, ranks)) > 0; });
  }

 private:
  __device__ std::byte* slot(int owner, std::size_t inboxes, int source, std::int64_t round) const {
    const std::size_t index =
        static_cast<std::size_t>(round % kInboxDepth) * static_cast<std::size_t>(p_.group.ranks) +
        static_cast<std::size_t>(source);
    return peers_.inbox[owner] + inboxes + index * p_.layout.round_bytes +
           static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(chunk_);
  }
  __device__ std::uint64_t* flag(int owner, std::size_t flags, int source) const {
    return reinterpret_cast<std::uint64_t*>(peers_.inbox[owner] + flags) + source * kMaxBlocks +
           static_cast<int>(blockIdx.x);
  }
  /// Never falls from call to call.
  __device__ std::uint64_t value(std::int64_t round) const {
    return (generation_ << 20) + static_cast<std::uint64_t>(round) + 1;
  }

  const CollectiveParameters& p_;
  const CollectivePeers& peers_;
  std::uint64_t generation_;
  std::int64_t chunk_;  // bytes
};

/// Every rank; for tell and await.
struct Everybody {
  __device__ bool operator()(int) const { return true; }
};

/// Whole block: its part of this rank's piece of this round is reduced; where results are spread
/// they go out. `direct`: into the peers' tensors.
template <class T>
__device__ void reduce_round(const CollectiveParameters& p, CollectivePeers& peers,
                             const InboxRounds& inbox, std::int64_t round, bool direct) {
  const int ranks = p.group.ranks, self = p.group.rank;
  const std::int64_t whole = p.to.size(self, ranks), at = inbox.begin(round);
  const std::int64_t bytes = inbox.part(round, whole);
  const std::byte* own = p.x + p.to.offset(self) + at;
  std::byte* out = p.out + (p.spreads ? p.to.offset(self) : 0) + at;
  for (int rank = thread(); rank < ranks && p.spreads; rank += threads()) {
    peers.result[rank] =
        direct ? peers.tensor[rank] + p.to.offset(self) + at : inbox.result(rank, self, round);
  }
  __syncthreads();
  reduce_vectors<T, 4>(
      p.op, ranks, block_walk(), bytes, is_aligned(own) && is_aligned(out),
      [&](auto whole, int rank, std::int64_t v) {
        return rank == self ? load_as<decltype(whole)::value>(own, bytes, v)
                            : load_vector(inbox.piece(self, rank, round) + v * kVectorBytes);
      },
      [&](auto whole, std::int64_t v, const uint4& vector) {
        constexpr bool kWhole = decltype(whole)::value;
        store_as<kWhole>(out, bytes, v, vector);
        if (!p.spreads) return;
#pragma unroll 1
        for (int i = 1; i < ranks; ++i) {
          store_as<kWhole>(peers.result[peer_after(p.group, i)], bytes, v, vector);
        }
      });
  inbox.tell(p.layout.back, round, Everybody{});
}

/// Whole block: takes the other ranks' results of this round. False: the group has failed.
__device__ inline bool take_results(const CollectiveParameters& p, const InboxRounds& inbox,
                                    std::int64_t round) {
  const int ranks = p.group.ranks;
  const auto bytes_of = [&](int rank) { return inbox.part(round, p.to.size(rank, ranks)); };
  if (!inbox.await(p.layout.back, round, [&](int rank) { return bytes_of(rank) > 0; })) {
    return false;
  }
#pragma unroll 1
  for (int i = 1; i < ranks; ++i) {
    const int source = peer_after(p.group, i);
    const std::int64_t bytes = bytes_of(source);
    const std::byte* from = inbox.result(p.group.rank, source, round);
    std::byte* to = p.out + p.to.offset(source) + inbox.begin(round);
    copy_vectors(block_walk(), from, to, bytes);
  }
  // The slot may be written again after a message that this block sends later: its reads come
  // first.
  __syncthreads();
  return true;
}

/// Whole block. `direct`: results go into the peers' tensors. False: the group has failed.
template <class T>
__device__ bool reduce_staged(const CollectiveParameters& p, CollectivePeers& peers,
                              std::uint64_t generation, bool direct) {
  const InboxRounds inbox(p, peers, generation);
  const int ranks = p.group.ranks, self = p.group.rank;
  const bool takes = p.spreads && !direct;
  std::int64_t rounds = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    rounds = max(rounds, inbox.rounds(p.to.size(rank, ranks)));
  }
  const auto mine = [&](std::int64_t round) { return inbox.part(round, p.to.size(self, ranks)); };
  for (std::int64_t round = 0; round < min(rounds, std::int64_t{2}); ++round) inbox.push(round);
  for (std::int64_t round = 0; round < rounds; ++round) {
    if (round + 2 < rounds) {
      // Where results come through the inboxes, those of round - 2 were taken.
      if (!takes && round >= 2 && !inbox.await(p.layout.back, round - 2, Everybody{})) {
        return false;
      }
      inbox.push(round + 2);
    }
    if (!inbox.await(p.layout.come, round, [&](int) { return mine(round) > 0; })) return false;
    reduce_round<T>(p, peers, inbox, round, direct);
    if (takes && round > 0 && !take_results(p, inbox, round - 1)) return false;
  }
  return !takes || rounds == 0 || take_results(p, inbox, rounds - 1);
}

/// Whole block: takes this round's parts of what the peers sent. False: the group has failed.
__device__ inline bool take_pieces(const CollectiveParameters& p, const InboxRounds& inbox,
                                   std::int64_t round) {
  const int ranks = p.group.ranks;
  const auto bytes_of = [&](int rank) { return inbox.part(round, p.from.size(rank, ranks)); };
  if (!inbox.await(p.layout.come, round, [&](int rank) { return bytes_of(rank) > 0; })) {
    return false;
  }
#pragma unroll 1
  for (int i = 1; i < ranks; ++i) {
    const int source = peer_after(p.group, i);
    const std::int64_t bytes = bytes_of(source);
    const std::byte* from = inbox.piece(p.group.rank, source, round);
    std::byte* to = p.out + p.from.offset(source) + inbox.begin(round);
    copy_vectors(block_walk(), from, to, bytes);
  }
  inbox.tell(p.layout.back, round, [&](int rank) { return bytes_of(rank) > 0; });
  return true;
}

/// Whole block. False: the group has failed.
__device__ inline bool copy_staged(const CollectiveParameters& p, const CollectivePeers& peers,
                                   std::uint64_t generation) {
  const InboxRounds inbox(p, peers, generation);
  const int ranks = p.group.ranks;
  std::int64_t rounds = 0;
  for (int i = 1; i < ranks; ++i) {
    const int peer = peer_after(p.group, i);
    rounds = max(rounds, inbox.rounds(max(p.to.size(peer, ranks), p.from.size(peer, ranks))));
  }
  for (std::int64_t round = 0; round < min(rounds, std::int64_t{2}); ++round) inbox.push(round);
  for (std::int64_t round = 0; round < rounds; ++round) {
    if (round + 2 < rounds) {
      const auto sends = [&](int peer) {
        return inbox.part(round - 2, p.to.size(peer, ranks)) > 0;
      };
      if (round >= 2 && !inbox.await(p.layout.back, round - 2, sends)) return false;
      inbox.push(round + 2);
    }
    if (!take_pieces(p, inbox, round)) return false;
  }
  return true;
}

}  // namespace ferry::cuda::device
