// CUDA's runtime as the engine uses it: errors with words, the device of a call, events that are
// used again, and what is known of a stream that is being captured into a graph.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace ferry::cuda {

/// Throws Error(exhausted) when memory is missing, else Error(system), unless the call succeeded.
void check(cudaError_t result, const char* call);
/// The same of the driver's calls; throws Error(system).
void check_driver(CUresult result, const char* call);

/// While it lives, this thread uses `device`, and may make any call while some stream is captured
/// into a graph: what the engine asks then concerns other streams.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// On the current device, of the greatest priority: streams of one priority may share a queue of
/// the GPU, where what is urgent would come behind a kernel that waits for it.
cudaStream_t make_urgent_stream();

/// The capture that a stream takes part in; `active` false: none.
struct Capture {
  bool active = false;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
};
/// Throws Error(unsupported) for the default stream while another stream is captured.
Capture capture_of(cudaStream_t stream);
/// Whether nothing may be recorded on the stream now. Never throws.
bool is_capturing(cudaStream_t stream) noexcept;

/// The stream's number, unlike that of any stream before: handles are used again. Not
/// for one that is being captured.
unsigned long long id_of(cudaStream_t stream);

/// Keeps `things` as long as the graph or anything made of it can run.
void keep_with_graph(cudaGraph_t graph, std::vector<std::shared_ptr<void>> things);

/// Goes back to its pool with the last copy.
using GpuEvent = std::shared_ptr<std::remove_pointer_t<cudaEvent_t>>;

/// Thread-safe. Events live as long as the pool, and that as long as an event is out.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  /// Whose events have time stamps, if they are `timed`.
  explicit EventPool(int device, bool timed = false) : device_(device), timed_(timed) {}
  ~EventPool();
  int device() const { return device_; }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  GpuEvent take();
  /// Takes one and records it, on the current device. Never throws: null when that is not possible.
  GpuEvent record(cudaStream_t stream) noexcept;

 private:
  int device_;
  bool timed_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

/// True of no event. Never blocks. Throws Error(system) when the GPU has failed.
bool is_done(const GpuEvent& event);

}  // namespace ferry::cuda
