// When chunks fall back, and which format `automatic` takes.
#include "host/collectives/compression.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace ferry::host::test {
namespace {

constexpr std::uint64_t kLarge = 32 << 20;
constexpr CodeTally kUsual{0.00066, 1.0, 0};

TEST(Compression, AFormatThatIsAskedForIsTaken) {
  const CompressionPolicy policy;
  EXPECT_FALSE(policy.formats(ReduceFormat::exact, kLarge).codes());
  for (const auto format :
       {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3, ReduceFormat::e5m2}) {
    const CodeFormats formats = policy.formats(format, 1);
    EXPECT_EQ(formats.measured, format);
    EXPECT_EQ(formats.sent, format);
    EXPECT_GT(formats.bound, 0);
  }
}

TEST(Compression, AChunkFallsBackAsFarAsItMust) {
  const CompressionPolicy policy;
  const CodeFormats e4m3 = policy.formats(ReduceFormat::e4m3, kLarge);
  const CodeFormats bf16 = policy.formats(ReduceFormat::bf16, kLarge);
  const CodeError good{0.0007, 1.0}, bad{0.1, 1.0}, nan{0, 0, true, false}, big{0, 0, false, true};
  const CodeError empty{};
  EXPECT_EQ(judge(e4m3, ReduceFormat::e4m3, good), FallBack::none);
  EXPECT_EQ(judge(e4m3, ReduceFormat::e4m3, empty), FallBack::none);
  EXPECT_EQ(judge(e4m3, ReduceFormat::e4m3, bad), FallBack::spike);
  EXPECT_EQ(judge(e4m3, ReduceFormat::bf16, bad), FallBack::none);
  EXPECT_EQ(judge(e4m3, ReduceFormat::e4m3, nan), FallBack::nonfinite);
  EXPECT_EQ(judge(bf16, ReduceFormat::bf16, big), FallBack::overflow);
  EXPECT_EQ(judge(bf16, ReduceFormat::bf16, bad), FallBack::none);
  const auto after = [&](ReduceFormat format, FallBack why) {
    return format_after(e4m3, format, why);
  };
  EXPECT_EQ(after(ReduceFormat::e4m3, FallBack::none), ReduceFormat::e4m3);
  EXPECT_EQ(after(ReduceFormat::e4m3, FallBack::spike), ReduceFormat::bf16);
  EXPECT_EQ(after(ReduceFormat::f16, FallBack::overflow), ReduceFormat::bf16);
  EXPECT_EQ(after(ReduceFormat::bf16, FallBack::overflow), ReduceFormat::exact);
  EXPECT_EQ(after(ReduceFormat::e4m3, FallBack::nonfinite), ReduceFormat::exact);
}

TEST(Compression, AutomaticWarmsUpThenHoldsAfterAFallBack) {
  CompressionPolicy policy;
  const auto sent = [&] { return policy.formats(ReduceFormat::automatic, kLarge).sent; };
  const auto call = [&](const CodeTally& tally) {
    policy.learn(policy.formats(ReduceFormat::automatic, kLarge), tally);
  };
  for (std::uint64_t i = 0; i < CompressionPolicy::kWarmUp; ++i) {
    EXPECT_EQ(sent(), ReduceFormat::bf16) << i;
    EXPECT_EQ(policy.formats(ReduceFormat::automatic, kLarge).measured, ReduceFormat::e4m3);
    call(kUsual);
  }
  EXPECT_EQ(sent(), ReduceFormat::e4m3);
  call({0.00066, 1.0, 1});
  for (std::uint64_t i = 0; i < CompressionPolicy::kHold; ++i) {
    EXPECT_EQ(sent(), ReduceFormat::bf16) << i;
    call(kUsual);
  }
  EXPECT_EQ(sent(), ReduceFormat::e4m3);
}

TEST(Compression, AutomaticLeavesAloneWhatGainsLittle) {
  CompressionPolicy policy;
  EXPECT_FALSE(policy.formats(ReduceFormat::automatic, 4 << 10).codes());
  EXPECT_TRUE(policy.formats(ReduceFormat::automatic, 1 << 20).codes());
  EXPECT_LT(predicted_gain(4 << 10, ReduceFormat::e4m3), CompressionPolicy::kLeastGain);
  EXPECT_NEAR(predicted_gain(1 << 30, ReduceFormat::e4m3), 1 - 33.0 / 128, 0.01);
  EXPECT_NEAR(predicted_gain(1 << 30, ReduceFormat::bf16), 0.5, 0.01);
  // A call that was exact teaches nothing.
  policy.learn(policy.formats(ReduceFormat::automatic, 4 << 10), {0.5, 1.0, 3});
  EXPECT_EQ(policy.mean(ReduceFormat::e4m3), CompressionPolicy().mean(ReduceFormat::e4m3));
}

TEST(Compression, TheMeanFollowsALastingChangeNotASpike) {
  CompressionPolicy policy;
  const CodeFormats formats = policy.formats(ReduceFormat::e4m3, kLarge);
  const double usual = policy.mean(ReduceFormat::e4m3);
  policy.learn(formats, {1e6, 1.0, 1});
  EXPECT_LT(policy.mean(ReduceFormat::e4m3), 1.5 * usual);
  for (int i = 0; i < 60; ++i) policy.learn(formats, {0.01, 1.0, 1});
  EXPECT_NEAR(policy.mean(ReduceFormat::e4m3), 0.01, 0.001);
}

// Such as sums of what a call has rounded, or gradients of a layer that is not used.
TEST(Compression, ValuesThatTheFormatHoldsDoNotMakeOthersASpike) {
  CompressionPolicy policy;
  for (const auto format :
       {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3, ReduceFormat::e5m2}) {
    const double usual = policy.mean(format);
    for (int i = 0; i < 60; ++i) policy.learn(policy.formats(format, kLarge), {0, 1.0, 0});
    EXPECT_EQ(policy.mean(format), usual);
    const CodeFormats formats = policy.formats(format, kLarge);
    EXPECT_EQ(judge(formats, format, {1.1 * usual, 1.0}), FallBack::none);
  }
}

// What a message says may be anything.
TEST(Compression, NonsenseTeachesNothing) {
  CompressionPolicy policy;
  const double infinity = std::numeric_limits<double>::infinity();
  const double usual = policy.mean(ReduceFormat::e4m3);
  const CodeFormats formats = policy.formats(ReduceFormat::e4m3, kLarge);
  for (const CodeTally& tally :
       {CodeTally{infinity, 1, 0}, CodeTally{1, infinity, 0}, CodeTally{-1, 1, 0},
        CodeTally{1, -1, 0}, CodeTally{infinity - infinity, 1, 0}, CodeTally{0, 0, 0}}) {
    policy.learn(formats, tally);
    EXPECT_EQ(policy.mean(ReduceFormat::e4m3), usual);
  }
}

}  // namespace
}  // namespace ferry::host::test
