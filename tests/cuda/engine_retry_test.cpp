// Calls of the CUDA engine that could not begin, and are made again; what is refused or provided
// for before any call. Skips without a GPU what needs one.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/runtime/pinned.hpp"
#include "engine_hog.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kTokens = 64, kHidden = 1024;  // 256 kB
constexpr std::int64_t kExperts = 4;

/// Every token goes to one expert and comes back as it was.
struct Tokens {
  Buffer x{(kTokens * kHidden + 1) * 4}, ids{kTokens * 8}, weights{kTokens * 4};
  std::vector<float> values{};
  Device where;

  Tokens(const Seat& seat) : where{DeviceKind::cuda, seat.device} {
    std::vector<std::int64_t> routes;
    for (std::int64_t i = 0; i < kTokens * kHidden + 1; ++i) {
      values.push_back(static_cast<float>((i * 7 + seat.rank()) % 1000));
    }
    for (std::int64_t t = 0; t < kTokens; ++t) routes.push_back((t + seat.rank()) % kExperts);
    seat.copier.put(x.data(), values);
    seat.copier.put(ids.data(), routes);
    seat.copier.put(weights.data(), std::vector<float>(kTokens, 1.0F));
  }
  /// `skip` elements on: at 1 not at a multiple of 16 bytes.
  ConstTensorView rows(std::int64_t skip) const {
    return {static_cast<const float*>(x.data()) + skip, Dtype::f32, {kTokens, kHidden}, where};
  }
  ConstTensorView routes() const { return {ids.data(), Dtype::i64, {kTokens, 1}, where}; }
  ConstTensorView factors() const { return {weights.data(), Dtype::f32, {kTokens, 1}, where}; }
  void check(const Seat& seat, const LatencyCombined& back, std::size_t skip) const {
    const auto got = seat.copier.get<float>(back.x, kTokens);
    for (std::size_t i = 0; i < got.size(); ++i) {
      need(got[i] == values[i + skip], "element " + std::to_string(i) + " came back changed");
    }
  }
};

std::string error_of(const std::function<void()>& call, ErrorKind kind) {
  return need_error(kind, "not refused", call).what();
}

std::string words_of(const std::function<void()>& call) {
  const auto error = test::error_of(call);
  return error ? error->what() : "not refused";
}

/// Rank 0 makes the call without GPU memory, in vain; the others wait.
void without_memory(Seat& seat, const char* name, const std::function<void()>& call) {
  seat.meet();
  if (seat.rank() == 0) {
    const Hog hog;
    const std::string said = error_of(call, ErrorKind::exhausted);
    need(said.rfind(name, 0) == 0 && said.find("rank 0 has no room") != std::string::npos, said);
  }
  seat.meet();
}

class EngineRetryTest : public EngineTest {
 protected:
  void run(const std::function<void(Seat&)>& body) {
    Shape shape;
    shape.experts = kExperts;
    each(shape, body);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineRetryTest, ::testing::Values(RankCount{2, false}),
                         ranks_name);

TEST_P(EngineRetryTest, ALatencyDispatchWithoutMemoryMayBeRepeated) {
  run([](Seat& seat) {
    LatencyExchange latency(seat.group, {kTokens, kHidden, 1, Dtype::f32});
    const Tokens tokens(seat);
    seat.meet();
    const LatencyReceived first = latency.dispatch(tokens.rows(0), tokens.routes(), {});
    const auto second = [&] { return latency.dispatch(tokens.rows(1), tokens.routes(), {}); };
    without_memory(seat, "latency dispatch: ", [&] { (void)second(); });
    const LatencyReceived received = second();  // the first is alive: no turn of the two is lost
    tokens.check(seat, latency.combine(first.x, first, tokens.factors(), {}), 0);
    tokens.check(seat, latency.combine(received.x, received, tokens.factors(), {}), 1);
    seat.meet();
  });
}

TEST_P(EngineRetryTest, ALatencyCombineWithoutMemoryMayBeRepeated) {
  run([](Seat& seat) {
    LatencyExchange latency(seat.group, {kTokens, kHidden, 1, Dtype::f32});
    const Tokens tokens(seat);
    seat.meet();
    const LatencyReceived received = latency.dispatch(tokens.rows(0), tokens.routes(), {});
    const auto combine = [&] {
      return latency.combine(received.x, received, tokens.factors(), {});
    };
    without_memory(seat, "latency combine: ", [&] { (void)combine(); });
    tokens.check(seat, combine(), 0);
    const std::string again = error_of([&] { (void)combine(); }, ErrorKind::invalid_argument);
    need(again.find("combined already") != std::string::npos, again);
    seat.meet();
  });
}

/// A call that only tells of an earlier one has not begun.
TEST_P(EngineRetryTest, AReceiveThatCouldNotBeginMayBeRepeated) {
  run([](Seat& seat) {
    LatencyExchange latency(seat.group, {kTokens, kHidden, 1, Dtype::f32});
    const Tokens tokens(seat);
    const Buffer wrong(kTokens * 8);
    seat.copier.put(wrong.data(), std::vector<std::int64_t>(kTokens, kExperts));
    ConstTensorView bad = tokens.routes();
    bad.data = wrong.data();
    OwnStream own(seat.device);
    const auto fail_untold = [&] {  // a plan that nobody asks
      (void)seat.group.plan(bad, {.stream = &own.stream});
      own.stream.synchronize();
      std::this_thread::sleep_for(4s);  // until the engine has seen it, on a machine at work too
      seat.meet();
    };
    seat.meet();
    LatencyDispatchOptions sending{.hook = true};
    LatencyReceived received = latency.dispatch(tokens.rows(0), tokens.routes(), sending);
    LatencyCombineOptions back{.hook = true};
    const auto combine = [&] {
      return latency.combine(received.x, received, tokens.factors(), back);
    };
    fail_untold();
    std::string said = words_of([&] { received.receive(); });
    need(said.find("an earlier call failed") != std::string::npos, said);
    said = error_of([&] { (void)combine(); }, ErrorKind::invalid_argument);
    need(said.find("receive() before combine") != std::string::npos, said);
    received.receive();
    LatencyCombined sums = combine();
    fail_untold();
    said = words_of([&] { sums.receive(); });
    need(said.find("an earlier call failed") != std::string::npos, said);
    sums.receive();
    tokens.check(seat, sums, 0);
    said = error_of([&] { sums.receive(); }, ErrorKind::invalid_argument);
    need(said.find("a second receive()") != std::string::npos, said);
    seat.meet();
  });
}

TEST(EngineStreamTest, ThatOfEachThreadIsRefused) {
  const std::string said =
      error_of([] { (void)Stream::of_cuda(cudaStreamPerThread, 0); }, ErrorKind::invalid_argument);
  EXPECT_NE(said.find("cudaStreamPerThread"), std::string::npos) << said;
}

TEST(EnginePlansTest, OfAllLayersHaveRoomFromTheBeginning) {
  constexpr std::size_t kLayers = 58, kHalves = 2, kRanks = 8, kAllExperts = 256;
  constexpr std::size_t kBytes = 128 + (kRanks * kRanks + kAllExperts) * 4;
  EXPECT_GE(cuda::plans_at_once(kBytes), kLayers * kHalves);
  EXPECT_EQ(cuda::plans_at_once(std::size_t{1} << 30), 4u);
}

}  // namespace
}  // namespace ferry::test
