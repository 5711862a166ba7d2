#include "cuda/throughput/gpu_page.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <type_traits>

namespace ferry::cuda {

static_assert(std::is_trivially_copyable_v<GpuPage> && std::is_standard_layout_v<GpuPage>);

namespace {

/// Acquire: what it counts can be read.
std::uint64_t count_in(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}
void publish(std::uint64_t& word, std::uint64_t count) {
  std::atomic_ref(word).store(count, std::memory_order_release);
}

[[noreturn]] void refuse(const char* what, std::uint64_t got, std::uint64_t most) {
  throw Error(ErrorKind::mismatch, std::string("what a rank shows of its GPU memory has ") +
                                       std::to_string(got) + what + ", expected at most " +
                                       std::to_string(most));
}

}  // namespace

void GpuPage::show(std::span<const std::byte> card) {
  if (card.size() > kMostCard) {
    throw Error(ErrorKind::system, "what this rank says of its GPU has " +
                                       std::to_string(card.size()) + " bytes, expected at most " +
                                       std::to_string(kMostCard));
  }
  std::copy(card.begin(), card.end(), card_.begin());
  publish(card_bytes_, card.size());
}

void GpuPage::add(const fabric::Segment& segment) {
  segments_.at(count_) = engine::card_of(segment);
  publish(count_, count_ + 1);
}

std::vector<std::byte> GpuPage::card() const {
  const std::uint64_t bytes = count_in(card_bytes_);
  if (bytes > kMostCard) refuse(" bytes", bytes, kMostCard);
  return {card_.begin(), card_.begin() + static_cast<std::ptrdiff_t>(bytes)};
}

std::vector<engine::Card> GpuPage::segments() const {
  const std::uint64_t count = count_in(count_);
  if (count > segments_.size()) refuse(" segments", count, segments_.size());
  std::vector<engine::Card> all(segments_.begin(),
                                segments_.begin() + static_cast<std::ptrdiff_t>(count));
  for (const engine::Card& segment : all) {
    if (segment.handle_bytes > fabric::kMaxHandleBytes) {
      refuse(" bytes of a segment's handle", segment.handle_bytes, fabric::kMaxHandleBytes);
    }
  }
  return all;
}

}  // namespace ferry::cuda
