// The caller's CUDA stream as a ferry::Stream.
#include <utility>

#include "base/kept_error.hpp"
#include "core/check.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/runtime/runtime.hpp"

namespace ferry::cuda {
namespace {

/// Work and its end; freed by the driver's thread that ran it.
struct Work {
  std::function<void()> run;
  std::shared_ptr<KeptError> error;
};

void CUDART_CB run_work(void* pointer) {
  const std::unique_ptr<Work> work(static_cast<Work*>(pointer));
  try {
    if (work->run) work->run();
  } catch (...) {
    *work->error = KeptError::current();
  }
}

/// The end of work, which may have thrown.
class WorkEvent final : public Event::State {
 public:
  WorkEvent(GpuEvent event, int device, std::shared_ptr<KeptError> error)
      : point_(event_of(std::move(event), device)), error_(std::move(error)) {}
  bool ready() override { return point_.ready(); }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    point_.wait(deadline, on_wait);
    if (*error_) error_->raise();
  }

 private:
  Event point_;
  std::shared_ptr<KeptError> error_;
};

class CudaQueue final : public Stream::Queue {
 public:
  CudaQueue(cudaStream_t stream, int device)
      : stream_(stream), device_(device), events_(std::make_shared<EventPool>(device)) {}

  Event submit(std::function<void()> work) override {
    const OnDevice here(device_);
    auto error = std::make_shared<KeptError>();
    auto held = std::make_unique<Work>(Work{std::move(work), error});
    check(cudaLaunchHostFunc(stream_, run_work, held.get()), "cudaLaunchHostFunc");
    held.release();
    return Event(std::make_shared<WorkEvent>(recorded(), device_, std::move(error)));
  }
  Event record() override {
    const OnDevice here(device_);
    return event_of(recorded(), device_);
  }
  void wait(const Event& event) override {
    if (const GpuEvent point = gpu_event_of(event)) {
      const OnDevice here(device_);
      check(cudaStreamWaitEvent(stream_, point.get(), 0), "cudaStreamWaitEvent");
      return;
    }
    try {
      event.wait();  // of other work: here and now
    } catch (...) {  // whoever needs the result sees the error
    }
  }
  void synchronize() override { record().wait(); }
  Device device() const override { return {DeviceKind::cuda, device_}; }
  void* native() const override { return stream_; }

 private:
  GpuEvent recorded() {
    GpuEvent event = events_->take();
    check(cudaEventRecord(event.get(), stream_), "cudaEventRecord");
    return event;
  }

  cudaStream_t stream_;
  int device_;
  std::shared_ptr<EventPool> events_;
};

}  // namespace
}  // namespace ferry::cuda

namespace ferry {

Stream Stream::of_cuda(void* cuda_stream, int device) {
  // Ferry makes and waits for events of a stream on threads of its own and of the caller.
  if (cuda_stream == cudaStreamPerThread) {
    refuse("Stream::of_cuda", "cuda_stream",
           "cudaStreamPerThread, which is another stream in each thread",
           "a stream that you made (cudaStreamCreateWithFlags), or 0, the default stream");
  }
  return Stream(std::make_shared<cuda::CudaQueue>(static_cast<cudaStream_t>(cuda_stream), device));
}

}  // namespace ferry
