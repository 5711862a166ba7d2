// Combine over several domains, hierarchical: sums of a domain cross as one row, in chunks, from
// the rank on the owner's rail; the owner adds the domains in ascending order, each token as soon
// as its sums are here, while others are on their way.
#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_call.hpp"

namespace ferry::host {
namespace {

class DomainCombine {
 public:
  DomainCombine(const CombineCall& call, const CombineMemory& memory, const Combined& result);

  void exchange_sums();

 private:
  /// By index inside the domain: where the rows of one source begin.
  struct Bases {
    std::vector<const std::byte*> rows{};
    std::vector<const std::byte*> weights{};
  };
  template <class FirstRow>
  Bases find_rows(FirstRow&& first_row) const;
  std::int64_t rows_of_chunk() const {
    return chunk_rows(call_.rows.row_bytes(), call_.chunk_bytes);
  }
  bool push_sums(std::int64_t first);
  void push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end);
  void take_sums();
  void await_sums();
  void sum_complete();
  bool is_complete(std::int64_t token) const;
  void sum_token();
  void sum_destinations(const Bases& from, std::span<const Destination> destinations,
                        void* out) const;
  void add_weights(const Bases& from, std::span<const Destination> destinations, float* to) const;
  void add_inside(std::span<const Destination> destinations, float* to) const;
  void find_sums();
  std::span<const Destination> destinations_of(std::int64_t token) const {
    return std::span(plan_.destinations)
        .subspan(index(plan_.destination_offset[index(token)]),
                 index(plan_.destination_offset[index(token + 1)] -
                       plan_.destination_offset[index(token)]));
  }

  const CombineCall& call_;
  const ExchangePlan& plan_ = call_.exchange();
  const CrossingPlan& crossing_ = call_.plan->crossing;
  const Domains& domains_ = call_.engine.topology();
  const int domain_ = domains_.of(call_.engine.rank());
  Channel& channel_ = call_.channel();
  const CombineMemory& memory_;
  const Combined& result_;
  std::vector<Bases> feeder_rows_{};
  Bases own_rows_{};
  std::vector<std::byte> sums_{};  // of a chunk that leaves
  std::vector<float> weights_{};
  std::int64_t summed_ = 0;  // tokens
  // [D]: row of the staging buffer that comes next, and the first that is not here yet.
  std::vector<std::int64_t> next_{}, here_{};
  // Of the token that comes next: its ranks in the own domain, that domain's sum, and a sum for
  // each domain, ascending.
  std::vector<Destination> inside_{};
  std::vector<std::byte> inside_sum_{};
  std::vector<const void*> token_sums_{};
  std::vector<bool> there_{};  // [D]: it has a sum there
};

DomainCombine::DomainCombine(const CombineCall& call, const CombineMemory& memory,
                             const Combined& result)
    : call_(call), memory_(memory), result_(result) {
  for (std::size_t feeder = 0; feeder < crossing_.feeders.size(); ++feeder) {
    const auto first = crossing_.first_rows(feeder);
    feeder_rows_.push_back(
        find_rows([&](int member) { return first[index(domains_.index(member))]; }));
  }
  own_rows_ = find_rows([this](int member) { return plan_.peer_row[index(member)]; });
  sums_.resize(index(rows_of_chunk()) * call_.rows.row_bytes());
  weights_.resize(index(rows_of_chunk()) * call_.weight_bytes() / sizeof(float));
  next_.assign(crossing_.offset.begin(), crossing_.offset.end() - 1);
  here_ = next_;
  inside_sum_.resize(call_.rows.row_bytes());
}

template <class FirstRow>
DomainCombine::Bases DomainCombine::find_rows(FirstRow&& first_row) const {
  Bases bases;
  for (const int member : domains_.members(domain_)) {
    const StepMessage theirs = channel_.head(member);
    const std::size_t first = index(first_row(member));
    const std::byte* rows = member == call_.engine.rank()
                                ? memory_.rows
                                : channel_.pointer(member, {theirs.segment, theirs.offset});
    bases.rows.push_back(rows + first * call_.rows.row_bytes());
    bases.weights.push_back(channel_.pointer(member, {theirs.side_segment, theirs.side_offset}) +
                            first * call_.weight_bytes());
  }
  return bases;
}

void DomainCombine::exchange_sums() {
  for (std::int64_t first = 0; push_sums(first); first += rows_of_chunk()) {
    take_sums();
    sum_complete();
  }
  for (sum_complete(); summed_ < call_.plan->tokens; sum_complete()) {
    await_sums();
    take_sums();
  }
}

/// One chunk for each feeder, from its row `first`; false: there was none left.
bool DomainCombine::push_sums(std::int64_t first) {
  const std::vector<int>& feeders = crossing_.feeders;
  const auto start = static_cast<std::size_t>(
      std::upper_bound(feeders.begin(), feeders.end(), call_.engine.rank()) - feeders.begin());
  bool any = false;
  for (std::size_t i = 0; i < feeders.size(); ++i) {  // each starts elsewhere
    const std::size_t feeder = (start + i) % feeders.size();
    const std::int64_t rows = call_.plan->forwards[feeder].rows();
    if (first >= rows) continue;
    push_chunk(feeder, first, std::min(rows, first + rows_of_chunk()));
    any = true;
  }
  return any;
}

void DomainCombine::push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end) {
  const Forward& forward = call_.plan->forwards[feeder];
  const int owner = crossing_.feeders[feeder];
  const std::size_t row_bytes = call_.rows.row_bytes();
  std::fill(weights_.begin(), weights_.end(), 0.0f);
  for (std::int64_t row = first; row < end; ++row) {
    const std::span<const Destination> destinations(
        forward.destinations.data() + forward.destination_offset[index(row)],
        index(forward.destination_offset[index(row + 1)] - forward.destination_offset[index(row)]));
    sum_destinations(feeder_rows_[feeder], destinations,
                     sums_.data() + index(row - first) * row_bytes);
    if (call_.has_weights()) {
      add_weights(feeder_rows_[feeder], destinations,
                  weights_.data() + index(row - first) * index(call_.plan->topk));
    }
  }
  const StepMessage theirs = channel_.head(owner);
  const std::size_t at = index(crossing_.feeder_sum_row[feeder] + first);
  const auto write = [&](std::uint32_t segment, std::uint64_t offset, const void* data,
                         std::size_t width) {
    channel_.reach().write(owner, {segment, offset + at * width}, data, index(end - first) * width,
                           channel_.chunk_tag(owner));
  };
  write(theirs.staging_segment, theirs.staging_offset, sums_.data(), row_bytes);
  if (call_.has_weights()) {
    write(theirs.staging_side_segment, theirs.staging_side_offset, weights_.data(),
          call_.weight_bytes());
  }
  channel_.send_chunk(owner, index(end - first) * (row_bytes + call_.weight_bytes()));
}

/// Polls what has come.
void DomainCombine::take_sums() {
  for (int domain = 0; domain < domains_.count(); ++domain) {
    if (domain == domain_) continue;
    const int rail = domains_.rail(call_.engine.rank(), domain);
    std::int64_t& here = here_[index(domain)];
    while (here < crossing_.offset[index(domain + 1)] && channel_.take_chunk(rail)) {
      here += rows_of_chunk();
    }
  }
}

/// Waits for the first sum that the next token lacks.
void DomainCombine::await_sums() {
  for (const Destination& destination : destinations_of(summed_)) {
    const int domain = domains_.of(destination.rank);
    if (domain == domain_ || next_[index(domain)] < here_[index(domain)]) continue;
    channel_.await_chunk("combine: rows", domains_.rail(call_.engine.rank(), domain));
    here_[index(domain)] += rows_of_chunk();
    return;
  }
}

/// Sums the tokens that lack nothing, up to the first that does: sums come in ascending order.
void DomainCombine::sum_complete() {
  for (; summed_ < call_.plan->tokens && is_complete(summed_); ++summed_) sum_token();
}

bool DomainCombine::is_complete(std::int64_t token) const {
  const auto destinations = destinations_of(token);
  return std::all_of(destinations.begin(), destinations.end(), [&](const Destination& destination) {
    const int domain = domains_.of(destination.rank);
    return domain == domain_ || next_[index(domain)] < here_[index(domain)];
  });
}

void DomainCombine::sum_token() {
  find_sums();
  SumRows sum;
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  sum.rows = token_sums_.data();
  sum.count = static_cast<std::int64_t>(token_sums_.size());
  sum.bias0 = call_.bias_row(call_.options.bias0, index(summed_));
  sum.bias1 = call_.bias_row(call_.options.bias1, index(summed_));
  sum.out = static_cast<std::byte*>(result_.x.data()) + index(summed_) * call_.rows.row_bytes();
  kernels().sum_rows(sum);
}

/// Where the sums of the next token's domains are, in ascending order: the own domain's is made,
/// `next_` counts those that came. Weights are added on the way.
void DomainCombine::find_sums() {
  token_sums_.clear();
  inside_.clear();
  float* weights =
      call_.has_weights() ? result_.topk_weights.as<float>() + summed_ * call_.plan->topk : nullptr;
  if (weights != nullptr) std::fill_n(weights, call_.plan->topk, 0.0f);
  there_.assign(index(domains_.count()), false);
  for (const Destination& destination : destinations_of(summed_)) {
    there_[index(domains_.of(destination.rank))] = true;
    if (domains_.of(destination.rank) == domain_) inside_.push_back(destination);
  }
  for (int domain = 0; domain < domains_.count(); ++domain) {
    if (!there_[index(domain)]) continue;
    if (domain == domain_) {
      sum_destinations(own_rows_, inside_, inside_sum_.data());
      token_sums_.push_back(inside_sum_.data());
      if (weights != nullptr) add_inside(inside_, weights);
      continue;
    }
    const std::size_t row = index(next_[index(domain)]++);
    token_sums_.push_back(memory_.stage + row * call_.rows.row_bytes());
    if (weights == nullptr) continue;
    const auto* theirs =
        reinterpret_cast<const float*>(memory_.staging_weights + row * call_.weight_bytes());
    for (std::size_t k = 0; k < index(call_.plan->topk); ++k) weights[k] += theirs[k];
  }
}

/// fp32 in ascending rank order, rounded once.
void DomainCombine::sum_destinations(const Bases& from, std::span<const Destination> destinations,
                                     void* out) const {
  std::array<const void*, kMaxTopk> rows{};
  SumRows sum;
  sum.rows = rows.data();
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  for (const Destination& destination : destinations) {
    rows[index(sum.count++)] = from.rows[index(domains_.index(destination.rank))] +
                               index(destination.row) * call_.rows.row_bytes();
  }
  sum.out = out;
  kernels().sum_rows(sum);
}

void DomainCombine::add_weights(const Bases& from, std::span<const Destination> destinations,
                                float* to) const {
  for (const Destination& destination : destinations) {
    const auto* weights =
        reinterpret_cast<const float*>(from.weights[index(domains_.index(destination.rank))] +
                                       index(destination.row) * call_.weight_bytes());
    for (std::size_t k = 0; k < index(call_.plan->topk); ++k) to[k] += weights[k];
  }
}

/// The sum inside the own domain is a number of its own, as that of every other domain.
void DomainCombine::add_inside(std::span<const Destination> destinations, float* to) const {
  std::array<float, kMaxTopk> sums{};
  add_weights(own_rows_, destinations, sums.data());
  for (std::size_t k = 0; k < index(call_.plan->topk); ++k) to[k] += sums[k];
}

}  // namespace

void combine_domains(const CombineCall& call, const CombineMemory& memory, const Combined& result) {
  DomainCombine(call, memory, result).exchange_sums();
}

}  // namespace ferry::host
