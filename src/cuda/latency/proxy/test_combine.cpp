// A rank without a GPU: the halves of its combine.
#include <bit>

#include "cuda/latency/proxy/test_rank.hpp"

namespace ferry::cuda::test {
bool FakeRank::pushes_weights(Generation g, std::uint32_t kind) const {
  return (batch(0, g).format & kWithWeights) == 0 && (kind & kPerSlot) == 0;
}

void FakeRank::push_weights(Generation g) {
  const LatencyPlaces at{view_, g};
  const FakeBatch batch = this->batch(rank(), g);
  const auto topk = static_cast<std::size_t>(view_.topk);
  for (std::size_t i = batch.routes.size(); i-- > 0;) {
    if (batch.routes[i] < 0) continue;
    const int peer = view_.placement.rank_of(batch.routes[i]);
    if (std::find(beyond_.begin(), beyond_.end(), peer) == beyond_.end()) continue;
    if (left_out_.contains(peer)) continue;
    store_word(at.weights(outbox(), peer) + i / topk * topk + i % topk,
               tagged_word(std::bit_cast<std::uint32_t>(batch.weights[i]), g));
  }
}

void FakeRank::receive_weights(Generation g) {
  const LatencyPlaces at{view_, g};
  for (const int source : beyond_) {
    if (left_out_.contains(source)) continue;
    const FakeBatch batch = this->batch(source, g);
    for (std::size_t i = 0; i < batch.routes.size(); ++i) {
      if (batch.routes[i] < 0 || view_.placement.rank_of(batch.routes[i]) != rank()) continue;
      const std::uint64_t* word = at.weights(inbox(), source) + i;
      await("weight", source, [&] { return is_word_of(load_word(word), g); });
      EXPECT_EQ(static_cast<std::uint32_t>(load_word(word)),
                std::bit_cast<std::uint32_t>(batch.weights[i]));
    }
  }
}

void FakeRank::send_sums(Generation g, std::uint32_t kind, bool halfway) {
  const LatencyPlaces at{view_, g};
  const std::size_t bytes = sum_bytes(kind);
  const auto send = [&](std::uint32_t token, int row, int slot) {
    std::byte* to = (kind & 3) != 0 ? at.encoded_sum(outbox(), row, token)
                                    : at.sum(outbox(), row, token, bytes);
    write_row(to, bytes, at.sum_tags(outbox(), row, token), at.tag() ^ kind << kFormatShift, g,
              token, slot);
  };
  for (const int owner : beyond_) {
    if (left_out_.contains(owner)) continue;
    const FakeBatch batch = this->batch(owner, g);
    for (std::uint32_t token = batch.tokens; token-- > 0;) {
      const std::uint32_t slots = slots_at(batch, token, rank());
      if (slots == 0 || (halfway && token % 2 == 0)) continue;
      if ((kind & kPerSlot) == 0) {
        send(token, owner, 0);
        continue;
      }
      const int first = first_slot_row(view_.layout, owner, view_.topk);
      for (int k = 0; k < view_.topk; ++k) {
        if ((slots >> k & 1) != 0) send(token, first + k, k);
      }
    }
  }
}

void FakeRank::receive_sums(Generation g, std::uint32_t kind) {
  const LatencyPlaces at{view_, g};
  const std::size_t bytes = sum_bytes(kind);
  const FakeBatch batch = this->batch(rank(), g);
  const auto receive = [&](std::uint32_t token, int row, int peer, int slot) {
    const std::uint32_t* tags = at.sum_tags(inbox(), row, token);
    for (int part = 0; part < view_.parts; ++part) {
      await("sum", peer,
            [&] { return load_word(tags + part) == (at.tag() ^ kind << kFormatShift); });
    }
    const std::byte* from =
        (kind & 3) != 0 ? at.encoded_sum(inbox(), row, token) : at.sum(inbox(), row, token, bytes);
    EXPECT_TRUE(is_all(from, bytes, peer, g, token, slot))
        << "token " << token << " from rank " << peer << " in generation " << g;
  };
  for (std::uint32_t token = 0; token < batch.tokens; ++token) {
    for (const int peer : beyond_) {
      const std::uint32_t slots = slots_at(batch, token, peer);
      if (slots == 0 || left_out_.contains(peer)) continue;
      if ((kind & kPerSlot) == 0) {
        receive(token, peer, peer, 0);
        continue;
      }
      for (int k = 0; k < view_.topk; ++k) {
        if ((slots >> k & 1) != 0) receive(token, k, peer, k);
      }
    }
  }
}

}  // namespace ferry::cuda::test
