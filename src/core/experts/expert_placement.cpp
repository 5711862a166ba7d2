#include "ferry/experts.hpp"

#include <memory>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "core/check.hpp"
#include "core/experts/balance.hpp"
#include "core/experts/expert_table.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMostPlaces = std::int64_t{1} << 20;

void check_rank(const char* call, int rank, int ranks) {
  if (rank >= 0 && rank < ranks) return;
  refuse(call, "rank", std::to_string(rank), "0 … " + std::to_string(ranks - 1));
}

std::vector<int> all_of(int ranks) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return all;
}

}  // namespace

ExpertPlacement::ExpertPlacement(std::int64_t experts, int ranks, int slots) {
  constexpr const char* kCall = "ExpertPlacement";
  const std::string most = "1 … " + std::to_string(kMostPlaces);
  if (experts < 1 || experts > kMostPlaces) {
    refuse(kCall, "experts", std::to_string(experts), most);
  }
  check_ranks(ranks);
  if (slots < 1 || slots > kMostPlaces / ranks) {
    refuse(kCall, "slots", std::to_string(slots),
           "1 … " + std::to_string(kMostPlaces / ranks) + " on each of " + std::to_string(ranks) +
               " ranks");
  }
  table_ = std::make_unique<ExpertTable>(static_cast<std::int32_t>(experts), ranks, slots);
  balance(all_of(ranks));
}

ExpertPlacement::~ExpertPlacement() = default;
ExpertPlacement::ExpertPlacement(ExpertPlacement&&) noexcept = default;
ExpertPlacement& ExpertPlacement::operator=(ExpertPlacement&&) noexcept = default;

std::int64_t ExpertPlacement::experts() const {
  return table_->experts();
}
int ExpertPlacement::ranks() const {
  return table_->seats();
}
int ExpertPlacement::slots() const {
  return table_->slots();
}

void ExpertPlacement::balance(std::span<const int> ranks, std::span<const double> load,
                              int copies) {
  constexpr const char* kCall = "balance";
  std::vector<std::uint8_t> live(index(table_->seats()));
  for (const int rank : ranks) {
    check_rank(kCall, rank, table_->seats());
    live[index(rank)] = 1;
  }
  if (!load.empty() && load.size() != index(experts())) {
    refuse(kCall, "load", std::to_string(load.size()) + " numbers",
           std::to_string(experts()) + ", one for each expert, or none");
  }
  if (copies < 1) refuse(kCall, "copies", std::to_string(copies), "at least 1");
  const std::vector<double> equal(load.empty() ? index(experts()) : 0, 1.0);
  const Domains domains = Domains::blocks(table_->seats(), 0);
  BalanceRequest request;
  request.domains = &domains;
  request.live = live;
  request.slots = table_->slots();
  request.load = load.empty() ? std::span<const double>(equal) : load;
  request.copies = copies;
  request.old = table_.get();
  *table_ = ferry::balance(request);
}

std::uint64_t ExpertPlacement::digest() const {
  std::vector<int> numbers{table_->experts(), table_->slots()};
  for (int place = 0; place < table_->seats() * table_->slots(); ++place) {
    numbers.push_back(table_->expert_at(place));
  }
  const std::uint64_t hash = hash_of(numbers);
  return hash == 0 ? 1 : hash;
}
std::vector<std::int32_t> ExpertPlacement::held_by(int rank) const {
  check_rank("held_by", rank, table_->seats());
  std::vector<std::int32_t> held;
  for (int slot = 0; slot < table_->slots(); ++slot) {
    held.push_back(table_->expert_at(rank * table_->slots() + slot));
  }
  return held;
}

Tensor ExpertPlacement::places(const ConstTensorView& topk_idx, int rank,
                               const std::vector<bool>& masked) const {
  constexpr const char* kCall = "places";
  check_rank(kCall, rank, table_->seats());
  if (!masked.empty() && masked.size() != index(table_->seats())) {
    refuse(kCall, "masked", std::to_string(masked.size()) + " ranks",
           std::to_string(table_->seats()) + ", as LatencyExchange::masked says, or none");
  }
  const std::vector<std::int32_t> routes = checked_routes(kCall, topk_idx, table_->experts());
  const CopyChoice choice = table_->choice(rank, Domains::blocks(table_->seats(), 0), masked);
  const auto found = std::make_shared<std::vector<std::int64_t>>(routes.size());
  const auto topk = index(topk_idx.shape[1]);
  for (std::size_t i = 0; i < routes.size(); ++i) {
    if (routes[i] < 0) {
      (*found)[i] = -1;
      continue;
    }
    const auto token = static_cast<std::int64_t>(i / topk);
    (*found)[i] = choice.place(rank, token, routes[i]);
    if ((*found)[i] < 0) {
      refuse(kCall, "topk_idx",
             "token " + std::to_string(token) + " to expert " + std::to_string(routes[i]) +
                 ", whose copies are all on masked ranks",
             "experts with a copy on another rank; place them anew with balance");
    }
  }
  const Extents shape{topk_idx.shape[0], topk_idx.shape[1]};
  return {TensorView(found->data(), Dtype::i64, shape),
          std::shared_ptr<void>(found, found->data())};
}

}  // namespace ferry
