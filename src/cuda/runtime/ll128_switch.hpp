// The environment variable that turns LL128 rows off; apart, because reading it needs no GPU.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

namespace ferry::cuda {

/// FERRY_LATENCY_LL128=0. Where that is not set, its older name FERRY_LATENCY_LINES counts; the
/// first time a line on stderr says so.
inline bool ll128_is_switched_off() {
  const char* text = std::getenv("FERRY_LATENCY_LL128");
  if (text == nullptr) {
    text = std::getenv("FERRY_LATENCY_LINES");
    if (text == nullptr) return false;
    static std::once_flag said;
    std::call_once(said, [] {
      std::fputs("ferry: FERRY_LATENCY_LINES is deprecated; set FERRY_LATENCY_LL128 instead\n",
                 stderr);
    });
  }
  return std::string_view(text) == "0";
}

}  // namespace ferry::cuda
