#include <gtest/gtest.h>

#include <ferry/ferry.hpp>
#include <string>

TEST(Version, TheLibrarySaysWhatTheHeadersSay) {
  const auto number = [](int part) { return std::to_string(part); };
  EXPECT_EQ(ferry::version(), number(FERRY_VERSION_MAJOR) + "." + number(FERRY_VERSION_MINOR) +
                                  "." + number(FERRY_VERSION_PATCH));
}

TEST(Version, TheHostEngineUsesWhatTheCompilersLibraryFinds) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  EXPECT_EQ(ferry::host_kernels(), avx512 ? "avx512" : avx2 ? "avx2" : "baseline");
#else
  EXPECT_EQ(ferry::host_kernels(), "baseline");
#endif
}
