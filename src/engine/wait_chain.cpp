#include "engine/wait_chain.hpp"

#include <set>

#include "engine/channel.hpp"
#include "protocol/failure_broadcast.hpp"

namespace ferry::engine {

using protocol::FailureBroadcast;

static_assert(2 * protocol::kFlagStride <= kLineBytes);

void WaitChain::say(FabricReach& reach, In in, int peer, protocol::Generation generation) {
  const std::uint64_t word =
      peer < 0 ? 0 : protocol::pack_broadcast(FailureBroadcast::Kind::kLate, peer, generation);
  std::uint64_t& said = said_[static_cast<std::size_t>(in)];
  if (word == said) return;
  said = word;
  for (int to = 0; to < ranks_; ++to) {
    if (to != rank_) reach.notify(to, {Channel::kControl, at(rank_, in)}, word);
  }
}

int WaitChain::awaited_by(int rank, protocol::Generation since) const {
  for (const In in : {In::call, In::transfer}) {
    const protocol::Flag flag{reinterpret_cast<std::uint64_t*>(control_ + at(rank, in))};
    // relaxed: the word is the whole message; nothing else is read on the strength of it.
    const std::uint64_t word = flag.load(protocol::order::relaxed);
    const FailureBroadcast said = protocol::unpack_broadcast(word, rank);
    if (word != 0 && said.generation >= since && said.culprit < ranks_) return said.culprit;
  }
  return -1;
}

int WaitChain::last_after(int rank, protocol::Generation since) const {
  std::set<int> passed;
  int last = rank;
  for (int next = rank; next >= 0; next = awaited_by(last, since)) {
    if (next == rank_ || !passed.insert(next).second) return rank;
    last = next;
  }
  return last;
}

}  // namespace ferry::engine
