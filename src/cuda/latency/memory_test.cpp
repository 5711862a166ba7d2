// What the CUDA engine's latency mode refuses for its size, and what it takes in memory. No GPU.
#include "cuda/latency/memory.hpp"

#include <gtest/gtest.h>

#include <string>

#include "cuda/engine.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

LatencyConfig small_rows() {
  LatencyConfig config;
  config.capacity = 65535;
  config.hidden = 8;
  config.topk = 1;
  config.dtype = Dtype::bf16;
  return config;
}

std::string refusal(const LatencyConfig& config, std::int64_t experts, int ranks) {
  try {
    (void)cuda_latency_memory_hint(config, experts, ranks, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    return error.what();
  }
  return {};
}

TEST(LatencyMemoryTest, RowsOfAResultAreNumberedIn32Bits) {
  EXPECT_EQ(refusal(small_rows(), 4 * 8191, 4), "");  // 2^31 less some
  const std::string said = refusal(small_rows(), 5 * 8192, 5);
  EXPECT_NE(said.find("rows of a result"), std::string::npos) << said;
  EXPECT_NE(said.find("2684313600"), std::string::npos) << said;
}

TEST(LatencyMemoryTest, RefusesWhatKernelsCannotCount) {
  LatencyConfig config = small_rows();
  config.capacity = 65536;
  EXPECT_NE(refusal(config, 4, 4).find("capacity: got 65536"), std::string::npos);
  EXPECT_NE(refusal(small_rows(), 8193, 1).find("experts of a rank: got 8193"), std::string::npos);
  config = small_rows();
  config.topk = 33;
  EXPECT_NE(refusal(config, 64, 4).find("topk: got 33"), std::string::npos);
}

}  // namespace
}  // namespace ferry::cuda
