// Stands in for NCCL in nccl_test: FAKE_NCCL says what it does.
#include <unistd.h>

#include <cstdlib>
#include <string_view>

extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  const char* told = std::getenv("FAKE_NCCL");
  const std::string_view way = told != nullptr ? told : "";
  if (way == "slow") usleep(200'000);
  *version = 22809;
  return way == "fails" ? 1 : 0;
}
