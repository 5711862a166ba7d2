#include "cuda/latency/proxy/test_rejoin.hpp"

#include <algorithm>

namespace ferry::cuda::test {

bool FakeRejoin::is_beyond(int peer) const {
  return std::find(rank_.beyond().begin(), rank_.beyond().end(), peer) != rank_.beyond().end();
}

std::size_t FakeRejoin::lines(bool answers) const {
  const DeviceLatencyLayout& layout = rank_.view().layout;
  return answers ? layout.answers : layout.offers;
}

void FakeRejoin::publish(Generation generation) {
  for (const int peer : rank_.beyond()) {
    store_word(LatencyPlaces::line_of(rank_.outbox(), lines(answering_), peer), word(generation));
  }
  if (!board_) return;
  (*board_)[answering_ ? 1 : 0][static_cast<std::size_t>(rank_.rank())] = word(generation);
}

std::uint64_t FakeRejoin::heard(bool answer, int peer) const {
  if (peer == rank_.rank()) return word(answer ? agreed_ : used_);
  if (!is_beyond(peer)) return (*board_)[answer ? 1 : 0][static_cast<std::size_t>(peer)];
  return load_word(LatencyPlaces::line_of(rank_.inbox(), lines(answer), peer));
}

void FakeRejoin::begin(Generation used) {
  ++round_;
  answering_ = false;
  used_ = used;
  publish(used);
}

bool FakeRejoin::poll() {
  std::uint64_t latest = round_;
  Generation newest = 0;
  for (int peer = 0; peer < rank_.ranks(); ++peer) {
    const std::uint64_t word = heard(answering_, peer), offer = heard(false, peer);
    missing_ = peer;
    latest = std::max(latest, round_of(offer));
    if (round_of(word) < round_ && round_of(offer) <= round_) return false;
    latest = std::max(latest, round_of(word));
    newest = std::max(newest, generation_in(word));
  }
  if (latest > round_) {
    round_ = latest;
    answering_ = false;
    publish(used_);
    return false;
  }
  if (!answering_) {
    answering_ = true;
    agreed_ = newest + 2;
    publish(agreed_);
    return false;
  }
  EXPECT_EQ(newest, agreed_) << "rank " << rank_.rank();
  go_on();
  return true;
}

void FakeRejoin::go_on() const {
  const LatencyPlaces at{rank_.view(), agreed_};
  for (const int peer : rank_.beyond()) {
    auto masked = static_cast<std::uint32_t>(Gone::without_us);
    std::atomic_ref(*at.gone(rank_.inbox(), peer))
        .compare_exchange_strong(masked, static_cast<std::uint32_t>(Gone::no));
    rank_.set_gone(peer, Gone::no);
  }
  rank_.leave_out({});
  rank_.release(agreed_);
  store_word(at.rejoined(rank_.inbox()), word(agreed_));
}

}  // namespace ferry::cuda::test
