#include "cuda/latency/proxy/test_rank.hpp"

#include <bit>
#include <map>

#include "core/number/quantize.hpp"
#include "core/test_errors.hpp"

namespace ferry::cuda::test {
FakeRank::FakeRank(int rank, int ranks, const FakeConfig& config,
                   std::unique_ptr<fabric::Fabric> fabric)
    : memory_(std::make_shared<engine::Memory>(std::move(fabric))) {
  const LatencyConfig& exchange = config.exchange;
  const Domains domains = Domains::blocks(ranks, config.domain_size);
  layout_ = make_latency_memory(exchange, config.experts, ranks, domains.count());
  segment_ = memory_->fabric->register_memory(layout_.crossing.bytes);
  view_.group.rank = rank;
  view_.group.ranks = ranks;
  view_.placement = {config.experts, ranks};
  view_.layout = layout_.wire;
  view_.capacity = exchange.capacity;
  view_.hidden = exchange.hidden;
  view_.topk = exchange.topk;
  view_.parts = latency_parts(exchange.hidden);
  view_.dtype = exchange.dtype;
  for (int peer = 0; peer < ranks; ++peer) {
    if (domains.of(peer) != domains.of(rank)) beyond_.push_back(peer);
  }
  crossing_ = std::make_unique<LatencyCrossing>(
      CrossingParts{.view = view_,
                    .beyond = beyond_,
                    .layout = layout_.crossing,
                    .data = segment_.data,
                    .reach = engine::FabricReach(*memory_->fabric, 1)});
}

FakeRank::FakeRank(Bootstrap& bootstrap, const FakeConfig& config,
                   std::unique_ptr<fabric::Fabric> fabric)
    : FakeRank(bootstrap.rank(), bootstrap.size(), config, std::move(fabric)) {
  const auto handles = bootstrap.all_gather(segment_.handle, 20s);
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    if (peer == bootstrap.rank()) continue;
    memory_->fabric->attach(peer, segment_.id, segment_.bytes,
                            handles[static_cast<std::size_t>(peer)]);
  }
  bootstrap.all_gather({}, 20s);
  proxy_ = std::make_unique<LatencyProxy>(
      *memory_->fabric, [this](const std::exception& e) { failures_.emplace_back(e.what()); });
  proxy_->add(std::move(crossing_));
}

void FakeRank::write_row(std::byte* row, std::size_t bytes, std::uint32_t* tags, std::uint32_t tag,
                         Generation g, std::uint32_t token, int slot) const {
  const auto parts = static_cast<std::size_t>(view_.parts);
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t end = (part + 1) * bytes / parts;
    for (std::size_t i = part * bytes / parts; i < end; ++i) {
      row[i] = row_byte(rank(), g, token, slot, i);
    }
    store_word(tags + part, tag);
    if (proxy_) std::this_thread::yield();
  }
}

FakeBatch FakeRank::batch(int source, Generation g) const {
  std::mt19937 random(static_cast<unsigned>(g * 64 + static_cast<std::uint64_t>(source)));
  FakeBatch batch;
  batch.tokens = random() % static_cast<unsigned>(view_.capacity + 1);
  if (g % 5 == 0 && source == 0) batch.tokens = 0;
  const bool weighted = g / 2 % 2 == 0;
  batch.format = (g % 3 == 0 ? 1u : 0u) | (weighted ? kWithWeights : 0u);
  std::map<std::int64_t, std::uint32_t> count;
  for (std::uint32_t i = 0; i < batch.tokens * static_cast<unsigned>(view_.topk); ++i) {
    const auto expert =
        static_cast<std::int64_t>(random() % static_cast<unsigned>(view_.placement.experts + 2)) -
        2;
    const bool none = expert < 0 || count[expert] == view_.capacity;
    batch.routes.push_back(none ? -1 : expert);
    if (none) {
      batch.places.push_back(kNoPlace);
    } else {
      const std::int64_t first = view_.placement.first_expert(view_.placement.rank_of(expert));
      batch.places.push_back(
          make_place(static_cast<std::uint32_t>(expert - first), count[expert]++));
    }
    batch.weights.push_back(static_cast<float>(i) + 0.5f);
  }
  return batch;
}

std::uint32_t FakeRank::slots_at(const FakeBatch& batch, std::uint32_t token, int rank) const {
  std::uint32_t slots = 0;
  for (int k = 0; k < view_.topk; ++k) {
    const std::int64_t expert =
        batch.routes[token * static_cast<std::size_t>(view_.topk) + static_cast<std::size_t>(k)];
    if (expert >= 0 && view_.placement.rank_of(expert) == rank) slots |= 1u << k;
  }
  return slots;
}

std::size_t FakeRank::row_bytes(std::uint32_t format) const {
  const auto hidden = static_cast<std::size_t>(view_.hidden);
  if ((format & 0xff) == 0) return hidden * size_of(view_.dtype);
  return round_up(hidden, 16) + scale_count(hidden) * 4;
}

std::size_t FakeRank::sum_bytes(std::uint32_t kind) const {
  if ((kind & 3) == 1) return view_.layout.encoded.e4m3_bytes;
  if ((kind & 3) == 2) return view_.layout.encoded.logfmt_bytes;
  return static_cast<std::size_t>(view_.hidden) * size_of(view_.dtype);
}

bool FakeRank::has_credit(int peer, Generation g) const {
  return g <= 2 || load_word(LatencyPlaces{view_, g}.released(inbox(), peer)) >= g - 2;
}

void FakeRank::await_credit(int peer, Generation g) const {
  await("credit", peer, [&] { return has_credit(peer, g); });
}

void FakeRank::send_header(const LatencyPlaces& at, const FakeBatch& batch, int peer) {
  const Generation g = at.generation;
  const auto topk = static_cast<std::size_t>(view_.topk);
  std::vector<std::uint32_t> numbers(static_cast<std::size_t>(view_.placement.local_experts(peer)));
  std::uint64_t* head = at.header(outbox(), peer);
  for (std::uint32_t token = 0; token < batch.tokens; ++token) {
    const std::uint32_t slots = slots_at(batch, token, peer);
    for (std::size_t k = 0; k < topk; ++k) {
      const std::size_t i = token * topk + k;
      const std::uint32_t place = (slots >> k & 1) != 0 ? batch.places[i] : kNoPlace;
      if (place != kNoPlace) ++numbers[place >> 16];
      store_word(at.places(outbox(), peer) + i, tagged_word(place, g));
      if ((batch.format & kWithWeights) == 0) continue;
      store_word(at.header_weights(outbox(), peer) + i,
                 tagged_word(std::bit_cast<std::uint32_t>(batch.weights[i]), g));
    }
  }
  for (std::size_t e = 0; e < numbers.size(); ++e) {
    store_word(at.numbers(outbox(), peer) + e, tagged_word(numbers[e], g));
  }
  store_word(head + 1, tagged_word(0, g));
  store_word(head, tagged_word(make_head(static_cast<int>(batch.tokens), batch.format), g));
}

void FakeRank::send_dispatch(Generation g) {
  const LatencyPlaces at{view_, g};
  const FakeBatch batch = this->batch(rank(), g);
  for (const int peer : beyond_) {
    if (!left_out_.contains(peer)) await_credit(peer, g);
  }
  for (const int peer : beyond_) {
    if (left_out_.contains(peer)) {
      store_word(at.header(outbox(), peer), tagged_word(make_head(0, batch.format), g));
      store_word(at.header(outbox(), peer) + 1, tagged_word(kLeftOut, g));
      continue;
    }
    // Rows and headers are written by different blocks: in any order.
    if (g % 2 == 0) send_header(at, batch, peer);
    for (std::uint32_t token = batch.tokens; token-- > 0;) {
      if (slots_at(batch, token, peer) == 0) continue;
      write_row(at.row(outbox(), peer, token), row_bytes(batch.format),
                at.row_tags(outbox(), peer, token), at.tag(), g, token, -1);
    }
    if (g % 2 != 0) send_header(at, batch, peer);
  }
}

void FakeRank::expect_rows(const LatencyPlaces& at, const FakeBatch& batch, int source) const {
  const Generation g = at.generation;
  const auto topk = static_cast<std::size_t>(view_.topk);
  const auto is = [&](const std::uint64_t* word, std::uint32_t data) {
    await("word", source, [&] { return is_word_of(load_word(word), g); });
    return static_cast<std::uint32_t>(load_word(word)) == data;
  };
  const std::uint64_t* head = at.header(inbox(), source);
  EXPECT_TRUE(is(head, make_head(static_cast<int>(batch.tokens), batch.format)));
  EXPECT_TRUE(is(head + 1, 0));
  std::vector<std::uint32_t> numbers(
      static_cast<std::size_t>(view_.placement.local_experts(rank())));
  for (std::uint32_t token = 0; token < batch.tokens; ++token) {
    const std::uint32_t slots = slots_at(batch, token, rank());
    for (std::size_t k = 0; k < topk; ++k) {
      const std::size_t i = token * topk + k;
      const bool here = (slots >> k & 1) != 0;
      if (here) ++numbers[batch.places[i] >> 16];
      EXPECT_TRUE(is(at.places(inbox(), source) + i, here ? batch.places[i] : kNoPlace));
      if ((batch.format & kWithWeights) == 0) continue;
      const std::uint64_t* weight = at.header_weights(inbox(), source) + i;
      EXPECT_TRUE(is(weight, slots != 0 ? std::bit_cast<std::uint32_t>(batch.weights[i]) : 0));
    }
    if (slots == 0) continue;
    const std::uint32_t* tags = at.row_tags(inbox(), source, token);
    for (int part = 0; part < view_.parts; ++part) {
      await("row", source, [&] { return load_word(tags + part) == at.tag(); });
    }
    EXPECT_TRUE(
        is_all(at.row(inbox(), source, token), row_bytes(batch.format), source, g, token, -1))
        << "token " << token << " of rank " << source << " in generation " << g;
  }
  for (std::size_t e = 0; e < numbers.size(); ++e) {
    EXPECT_TRUE(is(at.numbers(inbox(), source) + e, numbers[e]));
  }
}

void FakeRank::receive_dispatch(Generation g) {
  for (const int source : beyond_) {
    if (left_out_.contains(source)) continue;
    expect_rows(LatencyPlaces{view_, g}, batch(source, g), source);
  }
}

void FakeRank::release(Generation g) {
  const LatencyPlaces at{view_, g};
  for (const int peer : beyond_) store_word(at.released(outbox(), peer), g);
}

void FakeRank::set_gone(int peer, Gone gone) {
  store_word(LatencyPlaces{view_, 0}.gone(outbox(), peer), static_cast<std::uint32_t>(gone));
}

bool FakeRank::sees_gone(int peer, Gone gone) const {
  return load_word(LatencyPlaces{view_, 0}.gone(inbox(), peer)) == static_cast<std::uint32_t>(gone);
}

}  // namespace ferry::cuda::test
