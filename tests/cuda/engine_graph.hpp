// A CUDA graph of calls on a stream.
#pragma once
#include <chrono>
#include <functional>
#include <thread>

#include "gpu_buffer.hpp"

namespace ferry::test {

/// A graph and what runs it.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& calls) : stream_(stream) {
    need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
         "cudaStreamBeginCapture");
    calls();
    need(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    need(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    need(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
    need(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { need(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch"); }
  void run() const {
    launch();
    wait();
  }
  void wait() const {
    while (cudaStreamQuery(stream_) == cudaErrorNotReady)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace ferry::test
