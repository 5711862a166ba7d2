// Stands in for NCCL in nccl_test: FAKE_NCCL says what it does.
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  const char* told = std::getenv("FAKE_NCCL");
  const std::string_view way = told != nullptr ? told : "";
  if (way == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(200));
  *version = 22809;
  return way == "fails" ? 1 : 0;
}
