// Combine over several domains, hierarchical: sums of a domain cross as one row, in chunks, from
// the rank on the owner's rail; the owner adds the domains in ascending order.
#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_call.hpp"

namespace ferry::host {
namespace {

class DomainCombine {
 public:
  DomainCombine(const CombineCall& call, const CombineMemory& memory, const Combined& result)
      : call_(call), memory_(memory), result_(result) {}

  void push_sums();
  void wait_for_sums();
  void sum_domains();

 private:
  void push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end);
  template <class FirstRow>
  void find_rows(FirstRow&& first_row);
  void sum_destinations(std::span<const Destination> destinations, void* out) const;
  void add_weights(std::span<const Destination> destinations, float* to) const;
  void add_inside(std::span<const Destination> destinations, float* to) const;
  /// Of one token at its owner, and what is kept from token to token.
  struct TokenSums {
    std::vector<Destination> destinations{};  // in the own domain
    std::vector<const void*> rows{};          // a sum for each domain, ascending
    std::vector<bool> there{};                // [D]
    std::vector<std::int64_t> next{};         // [D]: row of the staging buffer that comes next
    std::vector<std::byte> inside{};          // the own domain's sum
  };
  void find_sums(std::int64_t token, TokenSums& sums);

  const CombineCall& call_;
  const ExchangePlan& plan_ = call_.exchange();
  Channel& channel_ = call_.channel();
  const CombineMemory& memory_;
  const Combined& result_;
  std::vector<const std::byte*> row_base_{};  // for each rank of the domain: its first row
  std::vector<const std::byte*> weight_base_{};
};

void DomainCombine::push_sums() {
  for (std::size_t feeder = 0; feeder < call_.plan->crossing.feeders.size(); ++feeder) {
    const int owner = call_.plan->crossing.feeders[feeder];
    const auto rows_at = call_.plan->crossing.first_rows(feeder);
    find_rows([&](int member) { return rows_at[index(call_.engine.topology().index(member))]; });
    const std::int64_t rows = call_.plan->forwards[feeder].rows();
    const std::int64_t chunk = chunk_rows(call_.rows.row_bytes(), call_.chunk_bytes);
    for (std::int64_t first = 0; first < rows; first += chunk) {
      push_chunk(feeder, first, std::min(rows, first + chunk));
    }
    channel_.deliver(owner, index(rows) * (call_.rows.row_bytes() + call_.weight_bytes()));
  }
}

/// Where one source's rows lie in this domain, that begin at first_row(member).
template <class FirstRow>
void DomainCombine::find_rows(FirstRow&& first_row) {
  row_base_.assign(index(call_.engine.size()), nullptr);
  weight_base_.assign(index(call_.engine.size()), nullptr);
  const Domains& domains = call_.engine.topology();
  for (const int member : domains.members(domains.of(call_.engine.rank()))) {
    const StepMessage theirs = channel_.head(member);
    const std::size_t first = index(first_row(member));
    row_base_[index(member)] =
        channel_.pointer(member, {theirs.segment, theirs.offset}) + first * call_.rows.row_bytes();
    weight_base_[index(member)] =
        channel_.pointer(member, {theirs.side_segment, theirs.side_offset}) +
        first * call_.weight_bytes();
  }
}

void DomainCombine::push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end) {
  const Forward& forward = call_.plan->forwards[feeder];
  const int owner = call_.plan->crossing.feeders[feeder];
  const std::size_t row_bytes = call_.rows.row_bytes();
  std::vector<std::byte> sums(index(end - first) * row_bytes);
  std::vector<float> weights(index(end - first) * call_.weight_bytes() / sizeof(float));
  for (std::int64_t row = first; row < end; ++row) {
    const std::span<const Destination> destinations(
        forward.destinations.data() + forward.destination_offset[index(row)],
        index(forward.destination_offset[index(row + 1)] - forward.destination_offset[index(row)]));
    sum_destinations(destinations, sums.data() + index(row - first) * row_bytes);
    if (call_.has_weights())
      add_weights(destinations, weights.data() + index(row - first) * index(call_.plan->topk));
  }
  const StepMessage theirs = channel_.head(owner);
  const std::uint64_t tag = channel_.delivery_tag();
  const std::size_t at = index(call_.plan->crossing.feeder_sum_row[feeder] + first);
  channel_.reach().write(owner, {theirs.staging_segment, theirs.staging_offset + at * row_bytes},
                         sums.data(), sums.size(), tag);
  if (!call_.has_weights()) return;
  channel_.reach().write(
      owner, {theirs.staging_side_segment, theirs.staging_side_offset + at * call_.weight_bytes()},
      weights.data(), weights.size() * sizeof(float), tag);
}

/// fp32 in ascending rank order, rounded once.
void DomainCombine::sum_destinations(std::span<const Destination> destinations, void* out) const {
  std::array<const void*, kMaxTopk> rows{};
  SumRows sum;
  sum.rows = rows.data();
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  for (const Destination& destination : destinations) {
    rows[index(sum.count++)] =
        row_base_[index(destination.rank)] + index(destination.row) * call_.rows.row_bytes();
  }
  sum.out = out;
  kernels().sum_rows(sum);
}

void DomainCombine::add_weights(std::span<const Destination> destinations, float* to) const {
  for (const Destination& destination : destinations) {
    const auto* weights = reinterpret_cast<const float*>(
        weight_base_[index(destination.rank)] + index(destination.row) * call_.weight_bytes());
    for (std::size_t k = 0; k < index(call_.plan->topk); ++k) to[k] += weights[k];
  }
}

void DomainCombine::wait_for_sums() {
  const Domains& domains = call_.engine.topology();
  for (int domain = 0; domain < domains.count(); ++domain) {
    if (domain == domains.of(call_.engine.rank())) continue;
    channel_.await_delivered("combine: rows", domains.rail(call_.engine.rank(), domain));
  }
}

/// Where the sums of one token's domains are, in ascending order: the own domain's is made in
/// `inside`, `next` counts those that came. Weights are added on the way.
void DomainCombine::find_sums(std::int64_t token, TokenSums& sums) {
  const Domains& domains = call_.engine.topology();
  std::fill(sums.there.begin(), sums.there.end(), false);
  sums.destinations.clear();
  sums.rows.clear();
  for (std::int64_t l = plan_.destination_offset[index(token)];
       l < plan_.destination_offset[index(token + 1)]; ++l) {
    const Destination destination = plan_.destinations[index(l)];
    sums.there[index(domains.of(destination.rank))] = true;
    if (domains.together(destination.rank, call_.engine.rank()))
      sums.destinations.push_back(destination);
  }
  float* weights =
      call_.has_weights() ? result_.topk_weights.as<float>() + token * call_.plan->topk : nullptr;
  if (weights != nullptr) std::fill_n(weights, call_.plan->topk, 0.0f);
  for (int domain = 0; domain < domains.count(); ++domain) {
    if (!sums.there[index(domain)]) continue;
    if (domain == domains.of(call_.engine.rank())) {
      sum_destinations(sums.destinations, sums.inside.data());
      sums.rows.push_back(sums.inside.data());
      if (weights != nullptr) add_inside(sums.destinations, weights);
      continue;
    }
    const std::size_t row = index(sums.next[index(domain)]++);
    sums.rows.push_back(memory_.stage + row * call_.rows.row_bytes());
    if (weights == nullptr) continue;
    const auto* theirs =
        reinterpret_cast<const float*>(memory_.staging_weights + row * call_.weight_bytes());
    for (std::size_t k = 0; k < index(call_.plan->topk); ++k) weights[k] += theirs[k];
  }
}

void DomainCombine::sum_domains() {
  const std::size_t row_bytes = call_.rows.row_bytes();
  find_rows([this](int member) { return plan_.peer_row[index(member)]; });
  TokenSums sums;
  sums.next.assign(call_.plan->crossing.offset.begin(), call_.plan->crossing.offset.end() - 1);
  sums.inside.resize(row_bytes);
  sums.there.resize(index(call_.engine.topology().count()));
  SumRows sum;
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  const auto at = [&](const std::optional<ConstTensorView>& bias, std::int64_t token) {
    return bias ? static_cast<const std::byte*>(bias->data) + index(token) * row_bytes : nullptr;
  };
  for (std::int64_t token = 0; token < call_.plan->tokens; ++token) {
    find_sums(token, sums);
    sum.rows = sums.rows.data();
    sum.count = static_cast<std::int64_t>(sums.rows.size());
    sum.bias0 = at(call_.options.bias0, token);
    sum.bias1 = at(call_.options.bias1, token);
    sum.out = static_cast<std::byte*>(result_.x.data()) + index(token) * row_bytes;
    kernels().sum_rows(sum);
  }
}

/// The sum inside the own domain is a number of its own, as that of every other domain.
void DomainCombine::add_inside(std::span<const Destination> destinations, float* to) const {
  std::array<float, kMaxTopk> sums{};
  add_weights(destinations, sums.data());
  for (std::size_t k = 0; k < index(call_.plan->topk); ++k) to[k] += sums[k];
}

}  // namespace

void combine_domains(const CombineCall& call, const CombineMemory& memory, const Combined& result) {
  DomainCombine combine(call, memory, result);
  combine.push_sums();
  combine.wait_for_sums();
  combine.sum_domains();
}

}  // namespace ferry::host
