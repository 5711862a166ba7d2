// The public Window: copies of rows that lie in memory of this process.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/engine.hpp"
#include "ferry/collectives.hpp"

namespace ferry {
namespace {

/// The rank whose row that is.
std::size_t owner_of(const WindowState& state, std::int64_t number) {
  const auto next = std::upper_bound(state.first.begin(), state.first.end(), number);
  return static_cast<std::size_t>(next - state.first.begin()) - 1;
}

std::int64_t number_at(const ConstTensorView& numbers, std::int64_t i) {
  return numbers.dtype == Dtype::i64 ? static_cast<const std::int64_t*>(numbers.data)[i]
                                     : static_cast<const std::int32_t*>(numbers.data)[i];
}

}  // namespace

Tensor Window::rows() const {
  return state_->own;
}

std::int64_t Window::first(int rank) const {
  const auto ranks = static_cast<int>(state_->rows.size());
  if (rank < 0 || rank > ranks) {
    refuse("Window::first", "rank", std::to_string(rank), "0 … " + std::to_string(ranks));
  }
  return state_->first[static_cast<std::size_t>(rank)];
}

void Window::get(const ConstTensorView& numbers, const TensorView& out) const {
  constexpr const char* kGet = "Window::get";
  const TensorView own = state_->own.view();
  if (numbers.dtype != Dtype::i64 && numbers.dtype != Dtype::i32) {
    refuse(kGet, "numbers", "dtype " + std::string(name_of(numbers.dtype)), "i64 or i32");
  }
  check_tensor(kGet, "numbers", numbers, 1, {});
  check_exact(kGet, "out", out, own.dtype, {numbers.shape[0], own.columns()}, {});
  const std::int64_t all = state_->first.back();
  const std::size_t row_bytes = own.row_bytes();
  auto* to = static_cast<std::byte*>(out.data);
  // Each is read once: they may lie in `out`, or change meanwhile.
  std::vector<std::int64_t> checked(static_cast<std::size_t>(numbers.shape[0]));
  for (std::size_t i = 0; i < checked.size(); ++i) {  // before anything is written
    checked[i] = number_at(numbers, static_cast<std::int64_t>(i));
    if (checked[i] >= 0 && checked[i] < all) continue;
    refuse(kGet, "numbers", std::to_string(checked[i]) + " at [" + std::to_string(i) + "]",
           "0 … " + std::to_string(all - 1));
  }
  for (const std::int64_t number : checked) {
    const std::size_t rank = owner_of(*state_, number);
    const auto row = static_cast<std::size_t>(number - state_->first[rank]);
    std::memcpy(to, state_->rows[rank] + row * row_bytes, row_bytes);
    to += row_bytes;
  }
}

}  // namespace ferry
