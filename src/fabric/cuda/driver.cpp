#include "fabric/cuda/driver.hpp"

#include <cuda_runtime_api.h>

namespace ferry::fabric {
namespace {

/// The driver interface that Ferry is written for: the versions that cuda.h's names stand for.
constexpr unsigned kInterface = 12000;

cudaError_t find(const char* name, void** call, cudaDriverEntryPointQueryResult* found) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, call, kInterface, cudaEnableDefault, found);
#else
  static_cast<void>(kInterface);
  return cudaGetDriverEntryPoint(name, call, cudaEnableDefault, found);
#endif
}

template <typename Call>
void load(const char* name, Call& call, std::string& problem) {
  if (!problem.empty()) return;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = find(name, &found, &result);
  if (error != cudaSuccess) {
    problem = std::string("no CUDA driver: ") + cudaGetErrorString(error);
    static_cast<void>(cudaGetLastError());  // it is ours, not the next caller's
  } else if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    problem = std::string("the CUDA driver is too old: it has no ") + name +
              "; install the driver of CUDA 12.3 or newer";
  } else {
    call = reinterpret_cast<Call>(found);
  }
}

Driver loaded() {
  Driver d;
#define FERRY_DRIVER_LOAD(name) load(#name, d.name, d.problem);
  FERRY_DRIVER_CALLS(FERRY_DRIVER_LOAD)
#undef FERRY_DRIVER_LOAD
  if (!d.problem.empty()) return d;
  const CUresult result = d.cuInit(0);
  const char* text = nullptr;
  if (result != CUDA_SUCCESS) d.cuGetErrorString(result, &text);
  if (result == CUDA_ERROR_NO_DEVICE) {
    d.problem = "no CUDA GPU is visible to this process";
  } else if (result != CUDA_SUCCESS) {
    d.problem = std::string("the CUDA driver does not start: ") + (text ? text : "unknown error");
  }
  return d;
}

std::string result_text(CUresult result, const char* call) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  return std::string(call) + ": " + (name ? name : "unknown error") + (text ? ", " : "") +
         (text ? text : "");
}

}  // namespace

const Driver& driver() {
  static const Driver instance = loaded();
  return instance;
}

CallRefused::CallRefused(CUresult result, const char* call)
    : std::runtime_error(result_text(result, call)), result_(result) {}

}  // namespace ferry::fabric
