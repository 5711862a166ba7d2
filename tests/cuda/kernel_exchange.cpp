#include "kernel_exchange.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/number.hpp"

namespace ferry::cuda::test {
namespace {

/// Where every token goes: its row at each rank, in the order of sources and tokens.
void place_tokens(Exchange& x) {
  const int ranks = x.shape.ranks, topk = x.shape.topk, destinations = destinations_of(topk, ranks);
  x.arrivals.assign(at(ranks), {});
  x.destinations.assign(at(ranks), {});
  x.rows_at.assign(at(ranks), {});
  for (int s = 0; s < ranks; ++s) {
    std::vector<std::int32_t> sent(at(ranks), 0);
    for (std::int64_t t = 0; t < x.tokens(s); ++t) {
      std::vector<bool> goes(at(ranks), false);
      for (int k = 0; k < topk; ++k) {
        const std::int32_t id = x.ids[at(s)][at(t * topk + k)];
        if (id >= 0) goes[at(x.placement.rank_of(id))] = true;
      }
      int used = 0;
      for (int d = 0; d < ranks; ++d) {
        x.rows_at[at(s)].push_back(goes[at(d)] ? x.received(d) : -1);
        if (!goes[at(d)]) continue;
        x.destinations[at(s)].insert(x.destinations[at(s)].end(), {d, sent[at(d)]++});
        x.arrivals[at(d)].push_back({s, t});
        ++used;
      }
      for (; used < destinations; ++used)
        x.destinations[at(s)].insert(x.destinations[at(s)].end(), {-1, 0});
    }
  }
}

}  // namespace

std::int64_t Exchange::sent(int rank, bool others_only) const {
  std::int64_t count = 0;
  for (int d = 0; d < shape.ranks; ++d) {
    if (others_only && d == rank) continue;
    count += std::count_if(arrivals[at(d)].begin(), arrivals[at(d)].end(),
                           [&](const Arrival& a) { return a.source == rank; });
  }
  return count;
}

std::vector<std::int32_t> Exchange::local_ids(int rank) const {
  const auto first = static_cast<std::int32_t>(placement.first_expert(rank));
  const auto end = static_cast<std::int32_t>(placement.first_expert(rank + 1));
  std::vector<std::int32_t> local;
  for (const Arrival& a : arrivals[at(rank)]) {
    for (int k = 0; k < shape.topk; ++k) {
      const std::int32_t id = ids[at(a.source)][at(a.token * shape.topk + k)];
      local.push_back(id >= first && id < end ? id - first : -1);
    }
  }
  return local;
}

conformance::World Exchange::world() const {
  conformance::World world{shape.ranks, shape.experts, shape.topk};
  for (int r = 0; r < shape.ranks; ++r) {
    const auto& own = ids[at(r)];
    world.inputs.push_back({.tokens = tokens(r), .topk_idx = {own.begin(), own.end()}});
  }
  return world;
}

Exchange make_exchange(const ExchangeShape& shape, Random& random) {
  Exchange x;
  x.shape = shape;
  x.placement = {shape.experts, shape.ranks};
  for (int s = 0; s < shape.ranks; ++s) {
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < x.tokens(s); ++t) {
      const std::size_t begin = ids.size();
      for (int k = 0; k < shape.topk; ++k) {
        auto id = static_cast<std::int32_t>(random.below(shape.experts));
        // Distinct where there are enough, as a router's are; else the odd repeat.
        for (int tries = 0; tries < 8 && std::find(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                                   ids.end(), id) != ids.end();
             ++tries) {
          id = static_cast<std::int32_t>(random.below(shape.experts));
        }
        ids.push_back(random.below(100) < shape.unused_percent ? -1 : id);
      }
    }
    x.ids.push_back(std::move(ids));
  }
  place_tokens(x);
  return x;
}

PlanView upload_plan(KernelGroup& group, const Exchange& x, int rank) {
  const int ranks = x.shape.ranks;
  const std::int64_t local = x.placement.local_experts(rank);
  PlanView plan;
  plan.tokens = x.tokens(rank);
  plan.topk = x.shape.topk;
  plan.placement = x.placement;
  plan.layout = make_plan_layout(plan.tokens, plan.topk, ranks, local);
  Bytes bytes(plan.layout.bytes, std::byte{0xCB});
  const auto put = [&](std::size_t offset, const auto& words) {
    if (!words.empty()) {
      std::memcpy(bytes.data() + offset, words.data(), words.size() * sizeof(words[0]));
    }
  };
  std::vector<std::int32_t> rank_tokens(at(ranks * ranks), 0), slots(at(ranks * local), 0);
  std::vector<std::int64_t> peer_row(at(ranks), 0), peer_rows, recv_offset(at(ranks + 1), 0);
  for (int d = 0; d < ranks; ++d) {
    peer_rows.push_back(x.received(d));
    for (const Arrival& a : x.arrivals[at(d)]) {
      ++rank_tokens[at(a.source * ranks + d)];
      if (a.source < rank) ++peer_row[at(d)];
    }
  }
  for (int s = 0; s < ranks; ++s) {
    recv_offset[at(s + 1)] = recv_offset[at(s)] + rank_tokens[at(s * ranks + rank)];
  }
  const std::vector<std::int32_t> ids = x.local_ids(rank);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Arrival& a = x.arrivals[at(rank)][i / at(plan.topk)];
    if (ids[i] >= 0) ++slots[at(a.source * local + ids[i])];
  }
  put(plan.layout.destinations, x.destinations[at(rank)]);
  put(plan.layout.ids, x.ids[at(rank)]);
  put(plan.layout.rank_tokens, rank_tokens);
  put(plan.layout.expert_slots, slots);
  put(plan.layout.peer_row, peer_row);
  put(plan.layout.peer_rows, peer_rows);
  put(plan.layout.recv_offset, recv_offset);
  put(plan.layout.state, std::vector<std::uint64_t>{1});
  plan.data = group.upload(rank, bytes).data;
  return plan;
}

ExpertMajor place_expert_major(const std::vector<std::int32_t>& ids, std::int64_t local_experts,
                               std::int64_t alignment) {
  ExpertMajor result;
  result.slot_rows.assign(ids.size(), -1);
  std::int64_t next = 0;
  for (std::int64_t expert = 0; expert < local_experts; ++expert) {
    result.offsets.push_back(next);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == expert) result.slot_rows[i] = next++;
    }
    while (next % alignment != 0) ++next;
  }
  result.offsets.push_back(next);
  return result;
}

std::vector<float> random_floats(Random& random, std::int64_t count) {
  std::vector<float> values(at(count));
  for (float& value : values) {
    value = static_cast<float>(random.below(1 << 20)) / float(1 << 19) - 1.0f;
  }
  return values;
}

Bytes random_elements(Random& random, Dtype dtype, std::int64_t count) {
  Bytes row(at(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t word = random.next();
    if (word % 64 == 0) {  // any bits
      const auto bits = static_cast<std::uint32_t>(word >> 32);
      std::memcpy(row.data() + at(i) * size_of(dtype), &bits, size_of(dtype));
    } else if (word % 64 == 1) {  // near the smallest numbers
      const auto code = static_cast<std::uint32_t>(word >> 32 & 0x8000000fu);
      const std::uint32_t bits = dtype == Dtype::f32 ? code : (code >> 16 | (code & 15u));
      std::memcpy(row.data() + at(i) * size_of(dtype), &bits, size_of(dtype));
    } else {
      const float value = static_cast<float>(static_cast<std::int32_t>(word >> 32)) * 0x1p-29f;
      conformance::store(row.data(), dtype, i, value);
    }
  }
  return row;
}

std::int64_t first_difference(const std::byte* got, const std::byte* expected, Dtype dtype,
                              std::int64_t count) {
  if (std::memcmp(got, expected, at(count) * size_of(dtype)) == 0) return -1;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t offset = at(i) * size_of(dtype);
    if (std::memcmp(got + offset, expected + offset, size_of(dtype)) == 0) continue;
    const bool nans = dtype == Dtype::f32 && std::isnan(conformance::load(got, dtype, i)) &&
                      std::isnan(conformance::load(expected, dtype, i));
    if (!nans) return i;
  }
  return -1;
}

int fair_sms(int ranks) {
  int num_sms = 0;
  FERRY_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  const int sharing = (ranks + gpu_count() - 1) / gpu_count();
  return std::max(1, num_sms / sharing - 1);
}

}  // namespace ferry::cuda::test
