#include "cuda/throughput/call_clock.hpp"

#include "cuda/throughput/call.hpp"

namespace ferry::cuda {

void CallClock::tell(engine::LateTuner& tuner) {
  for (; !running_.empty(); running_.pop_front()) {
    const Timing& call = running_.front();
    if (!is_done(call.end)) return;
    float ms = 0;
    const cudaError_t result = cudaEventElapsedTime(&ms, call.begin.get(), call.end.get());
    if (result != cudaSuccess) (void)cudaGetLastError();
    if (result == cudaSuccess && !call.record->refused()) {
      tuner.took(call.number, static_cast<double>(ms) * 1e-3);
    } else {
      tuner.lost(call.number);
    }
  }
}

}  // namespace ferry::cuda
